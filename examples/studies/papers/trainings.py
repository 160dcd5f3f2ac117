"""ExDyna on 2 to 16 simulated ranks (Fig. 8), SparDL's teams and residuals on 14 (its Figs. 7 and 17)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from horovod_sparse.feedback import Recipe, recipe
from horovod_sparse.sparsifiers.schedule import Exponential
from studies import results
from studies.tasks import Task, digits_task
from studies.training import Trace, train

RANKS_FILE = results.MEASUREMENTS / "paper_ranks.json"
TEAMS_FILE = results.MEASUREMENTS / "paper_teams.json"

#: ExDyna, Fig. 8: every P shares out the same 64 samples of a step, so that all P are asked for the same
RANKS: dict[str, Any] = {
    "sizes": [2, 4, 8, 16],
    "samples": 64,
    "width": 128,
    "num_steps": 360,
    "warmup_steps": 20,
    "rate": 0.02,
    "density": 0.01,
    "score_every": 30,
}
#: SparDL, Figs. 7 and 17: 14 workers, as the paper has
TEAMS: dict[str, Any] = {
    "size": 14,
    "teams": [2, 7],
    "modes": ["global", "partial", "local"],
    "batch_size": 4,
    "width": 128,
    "num_steps": 120,
    "rate": 0.2,
    "density": 0.01,
    "score_every": 15,
    "seeds": [0, 1, 2],
}


class Scores:
    """Wraps the steps of a training: the test score before the first step, and after every so many.

    Args:
        task: that is trained.
        every: steps from one score to the next.

    Attributes:
        steps: done before a score.
        scores: as many.
    """

    def __init__(self, task: Task, every: int) -> None:
        self.steps: list[int] = []
        self.scores: list[float] = []
        self._task, self._every = task, every
        self._models: list[nn.Module] = []

    @property
    def task(self) -> Task:
        """The task, whose model is seen here."""

        def make_model() -> nn.Module:
            self._models.append(self._task.make_model())
            return self._models[-1]

        return dataclasses.replace(self._task, make_model=make_model)

    def __call__(self, steps: Iterator[int]) -> Iterator[int]:
        """The same steps."""
        done = 0
        for step in steps:
            if step % self._every == 0:
                self._note(step)
            yield step
            done = step + 1
        self._note(done)

    def _note(self, step: int) -> None:
        self.steps.append(step)
        self.scores.append(round(self._task.score(self._models[-1]), 4))


def _scored(
    task: Task,
    made: Recipe,
    every: int,
    size: int,
    num_steps: int,
    rate_at: Callable[[int], float],
    seed: int = 0,
) -> tuple[Trace, dict[str, Any]]:
    seen = Scores(task, every)
    trace = train(
        seen.task, made, size=size, num_steps=num_steps, learning_rate_at=rate_at, seed=seed, progress=seen
    )
    return trace, {
        "num_elements": trace.num_elements,
        "steps": seen.steps,
        "scores": seen.scores,
        "losses": [float(f"{loss:.4g}") for loss in trace.losses],
    }


def on_ranks(name: str, size: int, setting: dict[str, Any]) -> dict[str, Any]:
    """A training on P ranks.

    Args:
        name: of the sparsifier, or "dense".
        size: P.
        setting: see `RANKS`.

    Returns:
        `steps`, `scores`, `losses`, and the mean density of the union after the warm-up.
    """
    warmup = setting["warmup_steps"]
    if name == "dense":
        made = recipe("topk", density=1.0)  # of which nothing is left behind
    else:
        made = recipe(name, density=setting["density"], schedule=Exponential(steps=warmup))
    task = digits_task(setting["width"], setting["samples"] // size)
    trace, run = _scored(
        task, made, setting["score_every"], size, setting["num_steps"], lambda _: setting["rate"]
    )
    counts = trace.counts[warmup:]
    return run | {"union": float(f"{sum(counts) / len(counts) / trace.num_elements:.4g}")}


def in_teams(teams: int, mode: str, seed: int, setting: dict[str, Any]) -> dict[str, Any]:
    """A training with SparDL, the learning rate falling along a cosine.

    Args:
        teams: d.
        mode: of residuals.
        seed: of the model's start and of the order of the data.
        setting: see `TEAMS`.

    Returns:
        `steps`, `scores`, `losses`; with B-SAG `quota` (L, what is wanted of a block), `sent` (h) and
        `after` (elements after the all-gather between teams), of rank 0 in every step.
    """
    task = dataclasses.replace(digits_task(setting["width"], setting["batch_size"]), momentum=0.0)
    size, num_steps = setting["size"], setting["num_steps"]
    trace, run = _scored(
        task,
        recipe("spardl", density=setting["density"], teams=teams, residuals=mode),
        setting["score_every"],
        size,
        num_steps,
        lambda step: setting["rate"] * 0.5 * (1.0 + math.cos(math.pi * step / num_steps)),
        seed,
    )
    if "num_after_teams" in trace.facts[-1]:
        run["quota"] = round(setting["density"] * trace.num_elements) * teams / size
        run["sent"] = [int(facts["num_between_teams"]) for facts in trace.facts]
        run["after"] = [int(facts["num_after_teams"]) for facts in trace.facts]
    return run


def measure_ranks(result: dict[str, Any], setting: dict[str, Any] = RANKS) -> Iterator[None]:
    """Runs that are missing are added to `result["runs"]`; control returns after each."""
    result["setting"] = setting
    runs = result.setdefault("runs", {})
    wanted = [("dense", 2), *(("exdyna", size) for size in setting["sizes"])]
    for name, size in wanted:
        key = "dense" if name == "dense" else f"{name}/{size}"
        if key not in runs:
            runs[key] = on_ranks(name, size, setting)
            yield


def measure_teams(result: dict[str, Any], setting: dict[str, Any] = TEAMS) -> Iterator[None]:
    """Likewise, for every seed, number of teams and mode."""
    result["setting"] = setting
    runs = result.setdefault("runs", {})
    for seed, teams, mode in itertools.product(setting["seeds"], setting["teams"], setting["modes"]):
        key = f"{teams}/{mode}/seed {seed}"
        if key not in runs:
            runs[key] = in_teams(teams, mode, seed, setting)
            yield
