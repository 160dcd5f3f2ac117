"""The residual when the learning rate falls: scaled as the papers' equations do, or not."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.studies.study import Result, Study, markdown, rounded
from benchmarks.studies.tasks import Task, digits_task
from benchmarks.studies.training import train
from horovod_sparse.feedback import ErrorFeedback, recipe

SETTING = {"learning_rate": 0.02, "density": 0.01, "size": 4, "num_steps": 400, "drop_at": 300}
SEEDS = (0, 1, 2)
ALGORITHMS = ("exdyna", "topk")
FORMS = {"scaled": True, "unscaled": False}


def measure(run: str, task: Task | None = None, setting: dict[str, Any] = SETTING) -> Result:
    """Trains once."""
    variant, _, seed = run.partition("/seed ")
    algorithm, form = variant.split(", ")
    trace = train(
        task or digits_task(width=320),
        recipe(algorithm, density=setting["density"], feedback=ErrorFeedback(scale_residual=FORMS[form])),
        size=setting["size"],
        num_steps=setting["num_steps"],
        learning_rate_at=lambda step: setting["learning_rate"] * (0.1 if step >= setting["drop_at"] else 1.0),
        seed=int(seed),
    )
    return {"losses": rounded(trace.losses), "accuracy": round(trace.score, 4)}


def variants() -> list[str]:
    """Rows of the table."""
    return [f"{algorithm}, {form}" for algorithm in ALGORITHMS for form in FORMS]


def table(result: Result) -> str:
    """Loss before and after the drop, and accuracy, as mean and range over the seeds."""
    drop, rows = result["setting"]["drop_at"], []
    for variant in variants():
        runs = [run for name, run in result["runs"].items() if name.startswith(f"{variant}/")]
        losses = np.array([run["losses"] for run in runs])
        spans = [losses[:, first : first + 20] for first in (drop - 20, drop, losses.shape[1] - 20)]
        scores = [run["accuracy"] for run in runs]
        score = f"{np.mean(scores):.1%} ({min(scores):.1%} to {max(scores):.1%})"
        rows.append([variant, *(f"{span.mean():.4f}" for span in spans), score])
    head = ["residual", "loss, 20 steps before", "20 steps after", "last 20 steps", "test accuracy"]
    return markdown(head, rows)


STUDY = Study(
    "feedback",
    lambda: [f"{variant}/seed {seed}" for seed in SEEDS for variant in variants()],
    measure,
    table,
    facts={"setting": SETTING},
)
