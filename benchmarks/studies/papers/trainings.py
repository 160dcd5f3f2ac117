"""ExDyna on 2 to 16 simulated ranks (Fig. 8), SparDL's teams and residuals on 14 (its Figs. 7 and 17)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from benchmarks.studies.papers import tables
from benchmarks.studies.study import Result, Study, rounded
from benchmarks.studies.tasks import digits_task
from benchmarks.studies.training import Trace, train
from horovod_sparse.feedback import recipe
from horovod_sparse.sparsifiers.schedule import Exponential

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


def _written(trace: Trace) -> Result:
    return {
        "num_elements": trace.num_elements,
        "steps": trace.steps,
        "scores": trace.scores,
        "losses": rounded(trace.losses),
    }


def on_ranks(run: str, setting: dict[str, Any] = RANKS) -> Result:
    """Trains on P ranks: the mean density of the union is that after the warm-up."""
    name, _, ranks = run.partition("/")
    size, warmup = int(ranks or 2), setting["warmup_steps"]
    if name == "dense":
        made = recipe("topk", density=1.0)  # of which nothing is left behind
    else:
        made = recipe(name, density=setting["density"], schedule=Exponential(steps=warmup))
    trace = train(
        digits_task(setting["width"], setting["samples"] // size),
        made,
        size=size,
        num_steps=setting["num_steps"],
        learning_rate_at=lambda step: setting["rate"],
        score_every=setting["score_every"],
    )
    counts = trace.counts[warmup:]
    return _written(trace) | {"union": float(f"{sum(counts) / len(counts) / trace.num_elements:.4g}")}


def in_teams(run: str, setting: dict[str, Any] = TEAMS) -> Result:
    """Trains with SparDL, the learning rate falling along a cosine."""
    number, mode, seed = run.split("/")
    teams, size, num_steps = int(number), setting["size"], setting["num_steps"]
    trace = train(
        dataclasses.replace(digits_task(setting["width"], setting["batch_size"]), momentum=0.0),
        recipe("spardl", density=setting["density"], teams=teams, residuals=mode),
        size=size,
        num_steps=num_steps,
        learning_rate_at=lambda step: setting["rate"] * 0.5 * (1.0 + math.cos(math.pi * step / num_steps)),
        seed=int(seed.removeprefix("seed ")),
        score_every=setting["score_every"],
    )
    return _written(trace)


RANKS_STUDY = Study(
    "paper_ranks",
    lambda: ["dense", *(f"exdyna/{size}" for size in RANKS["sizes"])],
    on_ranks,
    tables.ranks,
    facts={"setting": RANKS},
)
TEAMS_STUDY = Study(
    "paper_teams",
    lambda: [
        f"{teams}/{mode}/seed {seed}"
        for seed, teams, mode in itertools.product(TEAMS["seeds"], TEAMS["teams"], TEAMS["modes"])
    ],
    in_teams,
    tables.residuals,
    facts={"setting": TEAMS},
)
