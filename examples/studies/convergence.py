"""Accuracy of examples/pytorch_mnist.py on two real ranks, for every sparsifier, against dense.

With DistributedDataParallel it is that of examples/ddp_digits.py, beside PyTorch's PowerSGD.

scripts/study convergence               run what is missing, then write the table
scripts/study convergence --only topk   these runs only
scripts/study convergence --again       measure anew
scripts/study convergence --draw        only picture and table, from docs/measurements/convergence.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from rich.progress import track

from horovod_sparse.sparsifiers import ALGORITHMS
from studies import results

__all__ = ["command", "main", "summary", "table", "trained", "variants"]

FILE = results.MEASUREMENTS / "convergence.json"
EXAMPLES = Path(__file__).parents[1]
DENSITY, SEEDS, SIZE = 0.01, (0, 1, 2), 2
#: what makes no promise to converge at this density; docs/results.md says why
UNPROMISING = ("hard_threshold", "randomk", "signsgd")
#: other trainings, each with a dense one of its own: arguments by what follows the comma
TRAININGS = {
    "Adam": ["--optimizer", "adam", "--learning-rate", "0.001"],
    "restarts": ["--schedule", "restarts"],
    "restarts, no momentum": ["--schedule", "restarts", "--momentum", "0", "--learning-rate", "0.2"],
}
#: also shown without the warm-up, and in Horovod's own optimizer with compression= alone ("drop-in")
TWO, SMALL = ("exdyna", "topk"), "dense_below=1024"
#: rows that are trained with DistributedDataParallel, and what is measured of PyTorch's own compression
DDP, POWER_SGD = "DDP", {f"powersgd rank {rank}": f"powersgd:rank={rank}" for rank in (1, 4)}


def variants() -> dict[str, list[str]]:
    """Rows of the table -> arguments of the example."""
    rows = {name: ["--compression", name] for name in ("none", "fp16")}
    for name in ALGORITHMS:
        # a quantizer has no density, and nothing to warm up
        given = ["--density", str(DENSITY)] if ALGORITHMS[name].has_density else ["--warmup-epochs", "0"]
        rows[name] = ["--compression", name, *given]
    rows["signsgd, groups of 512"] = ["--compression", "signsgd:group=512", *rows["signsgd"][2:]]
    rows["qsgd, 2 bits"] = ["--compression", "qsgd:levels=1", *rows["qsgd"][2:]]
    rows["qsgd, no feedback"] = ["--compression", "qsgd:feedback=none", *rows["qsgd"][2:]]
    rows["randomk, no feedback"] = ["--compression", "randomk:feedback=none", *rows["randomk"][2:]]
    for name in TWO:
        rows[f"{name}, best"] = ["--compression", f"{name}:feedback=best", *rows[name][2:]]
        rows[f"{name}, no warm-up"] = [*rows[name], "--warmup-epochs", "0"]
        rows[f"{name}, drop-in"] = [*rows[name], "--stock"]
        rows[f"{name}, drop-in, small ones dense"] = [
            "--compression",
            f"{name}:{SMALL}",
            *rows[name][2:],
            "--stock",
        ]
    for words, arguments in TRAININGS.items():
        for name in ("none", *TWO):
            rows[f"{name}, {words}"] = [*rows[name], *arguments]
    behind = {name: rows[name] for name in ("none", *TWO)}
    behind |= {name: ["--compression", text] for name, text in POWER_SGD.items()}
    for name, arguments in behind.items():
        rows[f"{name}, {DDP}"] = arguments
        if name not in ("none", "topk"):
            rows[f"{name}, {DDP}, no warm-up"] = [*arguments, "--warmup-epochs", "0"]
    return rows


def dense_beside(variant: str) -> str:
    """The row that a row is compared with: dense training, with the same engine, optimizer and schedule.

    Example:
        >>> dense_beside("topk, Adam"), dense_beside("topk, drop-in"), dense_beside("exdyna, DDP, no warm-up")
        ('none, Adam', 'none', 'none, DDP')
    """
    _, _, words = variant.partition(", ")
    if words.startswith(DDP):
        return f"none, {DDP}"
    return f"none, {words}" if words in TRAININGS else "none"


def command(variant: str, seed: int, json_file: str) -> list[str]:
    """One launch."""
    if dense_beside(variant) == f"none, {DDP}":
        launcher = [
            "torchrun",
            "--standalone",
            "--nproc-per-node",
            str(SIZE),
            str(EXAMPLES / "ddp_digits.py"),
        ]
    else:
        launcher = ["horovodrun", "--gloo", "--log-level", "ERROR", "-np", str(SIZE), "python"]
        launcher.append(str(EXAMPLES / "pytorch_mnist.py"))
    return [
        *launcher,
        *variants()[variant],
        "--seed",
        str(seed),
        "--json",
        json_file,
    ]


def launch(variant: str, seed: int, timeout_s: float) -> dict[str, Any]:
    """One training; see `trained`."""
    return trained(lambda file: command(variant, seed, file), timeout_s)


def trained(command_for: Callable[[str], list[str]], timeout_s: float, **variables: str) -> dict[str, Any]:
    """One launch of an example; what it wrote, or that its gradients became infinite.

    Args:
        command_for: the command by the file that the example is to write.
        timeout_s: after which the launch has failed.
        **variables: of the environment, beside the caller's.

    Raises:
        RuntimeError: if the launch failed or took too long, with the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        arguments = ["timeout", "--kill-after=15", str(timeout_s), *command_for(str(file))]
        done = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **variables},
        )
        if done.returncode == 1 and "NonFiniteGradientError" in done.stderr:
            return {"diverged": True}
        if done.returncode != 0 or not file.exists():
            raise RuntimeError(
                f"{' '.join(arguments)} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
            )
        run: dict[str, Any] = json.loads(file.read_text())
    # times on a machine that others use say nothing
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in run.items()
        if not name.endswith("seconds")
    }


def summary(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Per row: mean, lowest and highest accuracy, number of seeds, how many of them diverged (they are
    in no mean), and means of bytes and union density."""
    rows: dict[str, list[dict[str, Any]]] = {}
    diverged: Counter[str] = Counter()
    for name, run in result["runs"].items():
        variant = name.rsplit("/", 1)[0]
        if run.get("diverged"):
            diverged[variant] += 1
        else:
            rows.setdefault(variant, []).append(run)
    return {
        variant: {
            "mean": float(np.mean([run["accuracy"] for run in runs])),
            "low": min(run["accuracy"] for run in runs),
            "high": max(run["accuracy"] for run in runs),
            "seeds": len(runs) + diverged[variant],
            "diverged": diverged[variant],
            "bytes": float(np.mean([run["bytes_per_step"] for run in runs])),
            "union": float(np.mean([run.get("density_union") or 1.0 for run in runs])),
        }
        for variant, runs in rows.items()
    }


def table(result: dict[str, Any]) -> str:
    """Accuracy and traffic of every row, in Markdown."""
    rows, facts = [], summary(result)
    order = [name for name in variants() if name in facts] + [
        name for name in facts if name not in variants()
    ]
    for variant in order:
        fact = facts[variant]
        dense = facts.get(dense_beside(variant), facts["none"])
        rows.append(
            [
                variant,
                f"{fact['mean']:.2%}",
                f"{fact['low']:.1%} to {fact['high']:.1%}",
                f"{fact['seeds']:.0f}" + (f", {fact['diverged']:.0f} diverged" if fact["diverged"] else ""),
                f"{100 * (fact['mean'] - dense['mean']):+.2f}",
                f"{fact['bytes'] / 1000:.1f}",
                f"{dense['bytes'] / fact['bytes']:.0f}x",
                f"{fact['union']:.2%}",
            ]
        )
    head = ["compression", "accuracy", "range", "seeds", "points to dense", "kB per step", "saving", "union"]
    return results.markdown(head, rows)


def draw(result: dict[str, Any]) -> None:
    """Accuracy of every row, all seeds, and the band of one point below dense."""
    results.PICTURES.mkdir(parents=True, exist_ok=True)
    facts = summary(result)
    order = [name for name in variants() if name in facts and dense_beside(name) == "none"][::-1]
    figure, axes = plt.subplots(figsize=(8, 0.3 * len(order) + 1.2), layout="constrained")
    dense = 100 * facts["none"]["mean"]
    axes.axvspan(dense - 1.0, dense, color="#1f5fbf", alpha=0.12, label="within 1 point of dense")
    for height, variant in enumerate(order):
        seeds = [
            100 * run["accuracy"]
            for name, run in result["runs"].items()
            if name.startswith(f"{variant}/") and not run.get("diverged")
        ]
        if np.mean(seeds) < dense - 3.0:  # far off: said, not drawn, so that the others can be told apart
            axes.text(
                dense - 2.9, height, f"{np.mean(seeds):.1f} %", va="center", fontsize=9, color="#c44e00"
            )
            continue
        axes.plot(seeds, [height] * len(seeds), "o", color="#7a7a7a", markersize=4)
        axes.plot([np.mean(seeds)], [height], "|", color="#c44e00", markersize=14, markeredgewidth=2)
    axes.set_xlim(dense - 3.0, dense + 1.5)
    axes.set_yticks(range(len(order)), order)
    axes.set_xlabel("test accuracy, % (dots: seeds; bar: mean)")
    axes.grid(True, axis="x", linewidth=0.3)
    axes.legend(fontsize=9, loc="lower left")
    figure.savefig(results.PICTURES / "convergence.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, draws, and writes the table; 1 if a row that promises to converge does not."""
    parser = results.command_line("scripts/study convergence", __doc__, FILE, timeout_s=900)
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=list(variants()), help="these rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="(default %(default)s)")
    options = parser.parse_args(arguments)
    result = results.load(options.json)
    if not options.draw:
        result |= {"command": "scripts/study convergence", "machine": results.machine(), "size": SIZE}
        runs = result.setdefault("runs", {})
        # all rows with one seed first: half a study should show every row
        todo = [(seed, row) for seed in options.seeds for row in options.only or variants()]
        todo = [(seed, row) for seed, row in todo if options.again or f"{row}/seed {seed}" not in runs]
        for seed, row in track(todo, description="trainings"):
            runs[f"{row}/seed {seed}"] = launch(row, seed, options.timeout)
            results.save(options.json, result)
            accuracy = runs[f"{row}/seed {seed}"].get("accuracy")
            print(f"{row}, seed {seed}: {accuracy:.1%}" if accuracy else f"{row}: diverged", file=sys.stderr)
    if options.json == FILE:
        draw(result)
        results.write_appendix()
    print(table(result))
    facts = summary(result)
    behind = [
        row
        for row, fact in facts.items()
        if "," not in row and row not in UNPROMISING and fact["mean"] < facts["none"]["mean"] - 0.01
    ]
    if behind:
        print(f"more than 1 point behind dense: {', '.join(behind)}", file=sys.stderr)
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
