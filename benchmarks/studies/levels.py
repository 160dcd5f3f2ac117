"""Accuracy of examples/pytorch_mnist.py on four real ranks: as 2 x 2, as 4 x 1, and with one level."""

from __future__ import annotations

import numpy as np

from benchmarks.studies.study import Result, Study, example, horovodrun, launched, markdown

DENSITY, SEEDS, SIZE = 0.01, (0, 1, 2), 4
SPARSIFIERS = ("topk", "exdyna")
#: by name: arguments of the example, and ranks that share a host
TOPOLOGIES = {"flat": ("flat", 1), "4 x 1": ("host", 1), "2 x 2": ("host", 2)}
#: points that the accuracies of a sparsifier may be apart
GOAL = 0.5


def names() -> list[str]:
    """Dense training on one level only: all levels do the same there."""
    rows = [("none", "flat"), *((name, one) for name in SPARSIFIERS for one in TOPOLOGIES)]
    return [f"{name}/{topology}/seed {seed}" for seed in SEEDS for name, topology in rows]


def measure(run: str) -> Result:
    """Launches a training."""
    compression, topology, seed = run.split("/")
    levels, per_host = TOPOLOGIES[topology]
    command = [*horovodrun(SIZE, example("pytorch_mnist")), "--compression", compression]
    if compression != "none":
        command += ["--density", str(DENSITY), "--levels", levels]
    command += ["--epochs", "8", "--seed", seed.removeprefix("seed ")]
    return launched(command, HOROVOD_SPARSE_RANKS_PER_HOST=str(per_host))


def table(result: Result) -> str:
    """A row for each compression and topology; a training that diverged has learned nothing."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, run in result["runs"].items():
        compression, topology, _ = name.split("/")
        accuracy = 0.0 if run.get("diverged") else 100 * float(run["accuracy"])
        found.setdefault(compression, {}).setdefault(topology, []).append(accuracy)
    rows = []
    for compression, by_topology in found.items():
        means = [float(np.mean(seeds)) for seeds in by_topology.values()]
        apart = max(means) - min(means)
        goal = "" if len(means) == 1 else f"{apart:.2f}, {'met' if apart <= GOAL else '**missed**'}"
        for (topology, seeds), mean in zip(by_topology.items(), means, strict=True):
            each = ", ".join(f"{seed:.1f}" for seed in seeds)
            rows.append([compression, topology, f"{mean:.2f}", each, goal])
    head = ["compression", "levels", "accuracy %", "by seed", f"points apart, goal {GOAL}"]
    return markdown(head, rows)


FACTS = {"size": SIZE, "epochs": 8, "density": DENSITY}
STUDY = Study("levels", names, measure, table, stem="levels_accuracy", facts=FACTS)
