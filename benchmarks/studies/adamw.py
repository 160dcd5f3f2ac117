"""AdamW, dense and sparse, on a small GPT: bits per byte by method and ranks, at the best of three rates.

Ranks are simulated in one process: each computes the gradient of its share of the batch with the one model
that all ranks hold, and `SimulatedCluster` synchronizes them and counts what is sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch
from gpt import parameter_groups

from benchmarks.studies.baselines import BASELINES
from benchmarks.studies.study import Result, Study, at_best_rate, behind, markdown, parsed
from benchmarks.studies.tasks import Task, gpt_task
from benchmarks.studies.training import train
from horovod_sparse.feedback import ErrorFeedback, Recipe, parse_recipe
from horovod_sparse.sparsifiers.dense import Dense

SETTING = {"num_steps": 400, "batch": 16, "warmup": 0.1, "weight_decay": 0.1, "clip_norm": 1.0, "beta2": 0.99}
SEEDS = (0, 1, 2)
RATES = (1.5e-3, 3e-3, 6e-3)
#: a larger GPT, of 5.0 million parameters, on shorter pieces, and its rates
LARGE = {"num_steps": 1500, "batch": 8, "layers": 4, "width": 320, "length": 64}
SLOWER = (3.75e-4, 7.5e-4, *RATES)
#: the last part of the steps, whose loss is the training score: text that the model has not seen before
LAST = 0.1


@dataclass(frozen=True)
class Method:
    """A row of the table: ranks, a recipe or baseline, and differences from `SETTING`."""

    size: int
    text: str
    setting: dict[str, Any] = field(default_factory=dict)


def _methods() -> dict[str, Method]:
    methods = {"P=2, dense": Method(2, "dense")}
    methods["P=2, topk 1 %, error"] = Method(2, "topk:density=0.01")
    for size in (2, 4, 8, 16):
        methods[f"P={size}, topk 1 %, adam"] = Method(size, "topk:density=0.01,feedback=adam")
    own = "feedback=adam(whole_batch=false)"  # s = 1
    for size in (2, 4, 8, 16):
        methods[f"P={size}, topk 1 %, adam, s = 1"] = Method(size, f"topk:density=0.01,{own}")
    methods["P=4, topk 1 %, rmsprop"] = Method(4, "topk:density=0.01,feedback=rmsprop")
    of_rank = "feedback=rmsprop(whole_batch=false)"
    methods["P=4, topk 1 %, rmsprop, s = 1"] = Method(4, f"topk:density=0.01,{of_rank}")
    short = "topk:density=0.003,values=2bit,indices=gaps"
    methods["P=2, topk 0.3 %, 2 bits, gaps, adam"] = Method(2, f"{short},feedback=adam")
    methods["P=2, topk 0.3 %, 2 bits, gaps, adam, s = 1"] = Method(2, f"{short},{own}")
    methods["P=2, qsgd"] = Method(2, "qsgd")
    methods |= {f"P=2, {name}": Method(2, name) for name in BASELINES if name != "dense"}
    methods["5 M, P=4, dense"] = Method(4, "dense", LARGE)
    methods["5 M, P=4, topk 1 %, adam, s = 1"] = Method(4, f"topk:density=0.01,{own}", LARGE)
    methods["5 M, P=4, topk 0.3 %, 2 bits, gaps, adam, s = 1"] = Method(4, f"{short},{own}", LARGE)
    return methods


METHODS = _methods()


def rate_at(step: int, rate: float, setting: dict[str, Any]) -> float:
    """Returns the learning rate at a step: a linear rise, then half a cosine down to 0."""
    steps, warmup = setting["num_steps"], setting["warmup"] * setting["num_steps"]
    falling = 0.5 * (1 + math.cos(math.pi * max(0.0, step - warmup) / (steps - warmup)))
    return rate * min(1.0, (step + 1) / warmup) * falling


def measure(run: str) -> Result:
    """Trains once."""
    name, rate, seed = parsed(run)
    method = METHODS[name]
    setting = SETTING | method.setting
    shape = {name: setting[name] for name in ("layers", "width", "length") if name in setting}
    task = gpt_task(batch_size=setting["batch"] // method.size, **shape)
    return trained(task, method, setting, rate, seed)


def trained(task: Task, method: Method, setting: dict[str, Any], rate: float, seed: int) -> Result:
    """Trains once; the sum is clipped, but not what ranks normalize themselves."""
    baseline = BASELINES.get(method.text)
    recipe = parse_recipe(method.text) if baseline is None else Recipe(Dense(), ErrorFeedback())

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if baseline is not None and baseline.is_step:  # plain SGD applies a direction, with the same decay
            return torch.optim.SGD(parameter_groups(parameters, setting["weight_decay"]), lr=rate)
        if "rmsprop" in method.text:  # which has no decay apart
            return torch.optim.RMSprop(parameters, lr=rate, alpha=setting["beta2"])
        return adamw(parameters, rate, setting)

    is_step = getattr(recipe.feedback, "applies_rate", False) if baseline is None else baseline.is_step
    trace = train(
        task,
        recipe,
        size=method.size,
        num_steps=setting["num_steps"],
        learning_rate_at=lambda step: rate_at(step, rate, setting),
        seed=seed,
        make_optimizer=make,
        edit=None if is_step else lambda gradient: clip(gradient, setting["clip_norm"]),
        exchange=None if baseline is None else lambda shapes: baseline.make(shapes, setting),
    )
    last = trace.losses[-round(LAST * setting["num_steps"]) :]
    return {
        "bits": round(trace.score, 4),
        "training_bits": round(float(np.mean(last)) / math.log(2), 4),
        "bytes_per_step": round(trace.bytes_per_step),
        "num_elements": trace.num_elements,
    }


def adamw(
    parameters: Sequence[torch.nn.Parameter], rate: float, setting: Mapping[str, Any]
) -> torch.optim.AdamW:
    """Returns AdamW as a user would make it."""
    groups = parameter_groups(parameters, setting["weight_decay"])
    return torch.optim.AdamW(groups, lr=rate, betas=(setting.get("beta1", 0.9), setting["beta2"]))


def clip(gradient: torch.Tensor, norm: float) -> None:
    """Scales a gradient, [n], to at most this norm."""
    gradient.mul_(min(1.0, norm / (float(gradient.norm()) + 1e-6)))


def table(result: Result) -> str:
    """Returns a table with a row per method at its best rate, as means over the seeds."""
    rows, runs = [], result["runs"]
    for name, method in METHODS.items():
        if (found := at_best_rate(runs, name)) is None:
            continue
        rate, own = found
        bits, test, sent, count = (
            [run[key] for run in own.values()]
            for key in ("training_bits", "bits", "bytes_per_step", "num_elements")
        )
        row = [name, f"{rate:g}", f"{fmean(bits):.3f}", f"{max(bits) - min(bits):.3f}"]
        more = behind(runs, name, "5 M, P=4, dense" if method.setting else "P=2, dense", "training_bits")
        row += [f"{fmean(more):+.3f}", f"{fmean(test):.3f}"]
        row += [f"{fmean(sent) / 1000:,.1f}", f"{4 * count[0] / fmean(sent):.0f}x", str(len(own))]
        rows.append(row)
    head = ["method", "rate", "bits, training", "spread", "to dense", "bits, test", "kB per step", "fewer"]
    return markdown([*head, "seeds"], rows)


STUDY = Study(
    "adamw",
    lambda: [
        f"{name}/rate {rate:g}/seed {seed}"
        for seed, name in itertools.product(SEEDS, METHODS)
        for rate in (SLOWER if METHODS[name].setting else RATES)
    ],
    measure,
    table,
    facts={"setting": SETTING},
)
