"""Accuracy of examples/pytorch_mnist.py on real ranks, for every sparsifier, beside dense training.

Two ranks, and four that are two or four hosts. PyTorch's PowerSGD is that of examples/ddp_digits.py.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.studies.study import ROOT, Result, Study, launched, markdown
from horovod_sparse.sparsifiers import ALGORITHMS

DENSITY, SEEDS, SIZE = 0.01, (0, 1, 2), 2
#: what makes no promise to converge at this density; docs/algorithms.md says why
UNPROMISING = ("hard_threshold", "randomk", "signsgd")
#: other trainings, each with a dense one of its own: arguments by what follows the comma
TRAININGS = {
    "Adam": ["--optimizer", "adam", "--learning-rate", "0.001"],
    "restarts": ["--schedule", "restarts"],
    "restarts, no momentum": ["--schedule", "restarts", "--momentum", "0", "--learning-rate", "0.2"],
}
#: PyTorch's own compression, with DistributedDataParallel
DDP, POWER_SGD = "DDP", {f"powersgd rank {rank}": f"powersgd:rank={rank}" for rank in (1, 4)}
#: also shown without the warm-up, under these trainings, and on four ranks: with one level, or hosts x ranks
TWO, FOUR = ("exdyna", "topk"), "four ranks"
HOSTS = {"4 x 1": "1", "2 x 2": "2"}


def variants() -> dict[str, list[str]]:
    """Rows of the table -> arguments of the example."""
    rows = {name: ["--compression", name] for name in ("none", "fp16")}
    for name in ALGORITHMS:
        # a quantizer has no density, and nothing to warm up
        given = ["--density", str(DENSITY)] if ALGORITHMS[name].has_density else ["--warmup-epochs", "0"]
        rows[name] = ["--compression", name, *given]
    for label, name, arguments in (
        ("signsgd, groups of 512", "signsgd", "group=512"),
        ("qsgd, 2 bits", "qsgd", "levels=1"),
        ("qsgd, no feedback", "qsgd", "feedback=none"),
        ("randomk, no feedback", "randomk", "feedback=none"),
    ):
        rows[label] = ["--compression", f"{name}:{arguments}", *rows[name][2:]]
    for name in TWO:
        rows[f"{name}, best"] = ["--compression", f"{name}:feedback=best", *rows[name][2:]]
        rows[f"{name}, no warm-up"] = [*rows[name], "--warmup-epochs", "0"]
    for words, arguments_ in TRAININGS.items():
        for name in ("none", *TWO):
            rows[f"{name}, {words}"] = [*rows[name], *arguments_]
    for name in ("none", *TWO):
        rows[f"{name}, {FOUR}"] = rows[name]
    for name, hosts in itertools.product(TWO, HOSTS):
        rows[f"{name}, {FOUR}, {hosts}"] = [*rows[name], "--levels", "host"]
    rows[f"none, {DDP}"] = rows["none"]
    for name, text in POWER_SGD.items():
        rows[f"{name}, {DDP}"] = ["--compression", text]
        rows[f"{name}, {DDP}, no warm-up"] = ["--compression", text, "--warmup-epochs", "0"]
    return rows


def dense_beside(variant: str) -> str:
    """Returns the row to compare with: dense training with the same engine, optimizer and schedule.

    Example:
        >>> dense_beside("topk, Adam"), dense_beside("topk, best")
        ('none, Adam', 'none')
    """
    words = variant.partition(", ")[2]
    for engine in (DDP, FOUR):
        if words.startswith(engine):
            return f"none, {engine}"
    return f"none, {words}" if words in TRAININGS else "none"


def measure(run: str) -> Result:
    """Launches a row with a seed."""
    variant, _, seed = run.rpartition("/seed ")
    size, examples = 4 if FOUR in variant else SIZE, ROOT / "examples"
    command = ["horovodrun", "--gloo", "--log-level", "ERROR", "-np", str(size), "python"]
    command.append(f"{examples}/pytorch_mnist.py")
    if DDP in variant:
        command = ["torchrun", "--standalone", "--nproc-per-node", str(SIZE), f"{examples}/ddp_digits.py"]
    each = HOSTS.get(variant.rpartition(", ")[2], "1")
    return launched([*command, *variants()[variant], "--seed", seed], HOROVOD_SPARSE_RANKS_PER_HOST=each)


def summary(result: Result) -> dict[str, dict[str, float]]:
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


def table(result: Result) -> str:
    """Returns a table of every row's accuracy and traffic."""
    rows, facts = [], summary(result)
    known = [name for name in variants() if name in facts]
    for variant in [*known, *(name for name in facts if name not in known)]:
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
    return markdown(head, rows)


STUDY = Study(
    "convergence",
    # all rows with one seed first: half a study should show every row
    lambda: [f"{row}/seed {seed}" for seed in SEEDS for row in variants()],
    measure,
    table,
    facts={"size": SIZE},
)
