"""Accuracy of examples/pytorch_mnist.py on four real ranks: as 2 x 2, as 4 x 1, and with one level.

scripts/study levels               run what is missing, then write the table
scripts/study levels --again       measure anew
scripts/study levels --draw        only the table, from docs/measurements/levels_accuracy.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.progress import track

from studies import convergence, results

__all__ = ["command", "main", "spread", "table"]

FILE = results.MEASUREMENTS / "levels_accuracy.json"
DENSITY, SEEDS, SIZE = 0.01, (0, 1, 2), 4
#: what is trained; dense on one level only, as all levels do the same there
SPARSIFIERS = ("topk", "exdyna")
#: by name: arguments of the example, and ranks that share a host
TOPOLOGIES = {"flat": ("flat", 1), "4 x 1": ("host", 1), "2 x 2": ("host", 2)}
#: points that the accuracies of a sparsifier may be apart
GOAL = 0.5


def command(compression: str, topology: str, seed: int, epochs: int, json_file: str) -> list[str]:
    """One launch."""
    launcher = ["horovodrun", "--gloo", "--log-level", "ERROR", "-np", str(SIZE), "python"]
    example = [*launcher, str(convergence.EXAMPLES / "pytorch_mnist.py"), "--compression", compression]
    if compression != "none":
        example += ["--density", str(DENSITY), "--levels", TOPOLOGIES[topology][0]]
    return [*example, "--epochs", str(epochs), "--seed", str(seed), "--json", json_file]


def launch(compression: str, topology: str, seed: int, epochs: int, timeout_s: float) -> dict[str, Any]:
    """One training; see `convergence.trained`."""

    def command_for(file: str) -> list[str]:
        return command(compression, topology, seed, epochs, file)

    per_host = str(TOPOLOGIES[topology][1])
    return convergence.trained(command_for, timeout_s, HOROVOD_SPARSE_RANKS_PER_HOST=per_host)


def accuracies(result: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Of every seed, by compression and topology; a training that diverged has read nothing."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, run in result.get("runs", {}).items():
        compression, topology, _ = name.split("/")
        accuracy = 0.0 if run.get("diverged") else float(run["accuracy"])
        found.setdefault(compression, {}).setdefault(topology, []).append(accuracy)
    return found


def spread(by_topology: dict[str, list[float]]) -> float:
    """Points between the best and the worst mean of one sparsifier.

    Example:
        >>> round(spread({"flat": [0.95, 0.97], "2 x 2": [0.955, 0.955]}), 3)
        0.5
    """
    means = [100 * float(np.mean(seeds)) for seeds in by_topology.values()]
    return max(means) - min(means)


def table(result: dict[str, Any]) -> str:
    """Accuracies in Markdown: a row for each compression and topology."""
    rows = []
    for compression, by_topology in accuracies(result).items():
        apart = spread(by_topology)
        met = "met" if apart <= GOAL else "**missed**"
        for topology, seeds in by_topology.items():
            goal = "" if len(by_topology) == 1 else f"{apart:.2f}, {met}"
            each = ", ".join(f"{100 * seed:.1f}" for seed in seeds)
            rows.append([compression, topology, f"{100 * np.mean(seeds):.2f}", each, goal])
    head = ["compression", "levels", "accuracy %", "by seed", f"points apart, goal {GOAL}"]
    return results.markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and writes the table; 1 where accuracies are further apart than they may be."""
    parser = results.command_line("scripts/study levels", __doc__, FILE, timeout_s=900)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="(default %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="(default %(default)s)")
    options = parser.parse_args(arguments)
    result = results.load(options.json)
    if not options.draw:
        result |= {"command": "scripts/study levels", "machine": results.machine(), "size": SIZE}
        result |= {"epochs": options.epochs, "density": DENSITY}
        runs = result.setdefault("runs", {})
        rows = [("none", "flat"), *((name, one) for name in SPARSIFIERS for one in TOPOLOGIES)]
        todo = [(seed, *row) for seed in options.seeds for row in rows]
        todo = [item for item in todo if options.again or _key(*item) not in runs]
        for seed, compression, topology in track(todo, description="trainings"):
            run = launch(compression, topology, seed, options.epochs, options.timeout)
            runs[_key(seed, compression, topology)] = run
            results.save(options.json, result)
            print(f"{compression}, {topology}, seed {seed}: {run.get('accuracy')}", file=sys.stderr)
    if options.json == FILE:
        results.write_appendix()
    print(table(result))
    return int(any(spread(one) > GOAL for one in accuracies(result).values()))


def _key(seed: int, compression: str, topology: str) -> str:
    return f"{compression}/{topology}/seed {seed}"


if __name__ == "__main__":
    sys.exit(main())
