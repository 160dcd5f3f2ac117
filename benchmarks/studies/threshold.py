"""Asked and achieved density over the steps of real trainings, for both threshold rules."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.studies.study import Result, Study, markdown
from benchmarks.studies.tasks import Task, digits_task, text_task
from benchmarks.studies.training import train_as_papers
from horovod_sparse.thresholds import Sketch

#: variants: the table's words -> arguments of the sparsifier
RULES: dict[str, dict[str, Any]] = {
    "exdyna sketch": {"name": "exdyna", "threshold": "sketch"},
    "exdyna sketch, memory=0": {"name": "exdyna", "threshold": Sketch(memory=0.0)},
    "exdyna sketch, rebalance=paper": {"name": "exdyna", "threshold": "sketch", "rebalance": "paper"},
    "exdyna paper": {"name": "exdyna", "threshold": "paper"},
    "micro sketch": {"name": "micro", "threshold": "sketch"},
    "micro paper": {"name": "micro", "threshold": "paper"},
}
_COMMON = {"density": 0.01, "size": 4, "num_steps": 500, "warmup_steps": 100, "drop_at": 300}
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"learning_rate": 0.02, **_COMMON},
    "text": {"learning_rate": 0.5, **_COMMON},
}


def measure(run: str, task: Task | None = None, setting: dict[str, Any] | None = None) -> Result:
    """Trains once."""
    name, rule = run.split("/")
    setting = setting or SETTINGS[name]
    task = task or (digits_task() if name == "digits" else text_task())
    trace = train_as_papers(task, RULES[rule], setting)
    return {
        "num_elements": trace.num_elements,
        "targets": trace.targets,
        "counts": trace.counts,
        "score": round(trace.score, 4),
    }


def facts(run: Result) -> dict[str, float | int | None]:
    """Compares a run's counts with the target.

    Returns:
        factor: count / k in step 1. mean, worst: of |count / k - 1| from step 5 on. settled: first step
        (from 1) from which ten steps in a row are within 10 %, None if there is none.
    """
    quotient = np.array(run["counts"]) / np.array(run["targets"])
    error = np.abs(quotient - 1.0)
    within = np.lib.stride_tricks.sliding_window_view(error <= 0.1, min(10, error.size)).all(axis=1)
    return {
        "factor": float(quotient[0]),
        "mean": float(error[4:].mean()),
        "worst": float(error[4:].max()),
        "settled": int(np.argmax(within)) + 1 if within.any() else None,
    }


def table(result: Result) -> str:
    """The runs against the target."""
    rows = []
    for name, run in result["runs"].items():
        fact = facts(run)
        score = f"{run['score']:.1%}" if name.startswith("digits") else f"{run['score']:.2f} bits"
        rows.append(
            [
                name.replace("/", ", "),
                f"{run['targets'][-1]:,}",
                f"{fact['factor']:.3g}",
                f"{fact['mean']:.1%}",
                f"{fact['worst']:.0%}",
                str(fact["settled"] or "never"),
                score,
            ]
        )
    head = ["training", "k", "count / k, step 1", "mean error", "worst", "settled in step", "score"]
    return markdown(head, rows)


STUDY = Study(
    "threshold",
    lambda: [f"{task}/{rule}" for task in SETTINGS for rule in RULES],
    measure,
    table,
    facts={"settings": SETTINGS},
)
