"""Sparse steps beside dense ones on real ranks: GPTs with AdamW, networks with batch norm with momentum.

Each run is a launch of torchrun. `every` and `delay` are those of `attach`; DiLoCo and SparseLoCo exchange
displacements every 15 steps. All methods see the same batches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resnet import resnet
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.studies.adamw import groups, rate_at
from benchmarks.studies.study import Result, Study, launched, load, markdown
from benchmarks.studies.tasks import Task, digits_task, gpt_task
from horovod_sparse import ddp

SEEDS, LAST = (0, 1, 2), 0.1
CELLS = [("gpt", 2), ("gpt", 4), ("gpt", 8), ("cnn", 2), ("resnet", 2)]
SETTING = {"warmup": 0.1, "weight_decay": 0.1, "clip_norm": 1.0, "beta2": 0.99}
#: task -> steps and rates that dense training tries; a best rate at an edge is none
TASKS = {
    "gpt": (600, (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2)),
    "cnn": (300, (0.01, 0.03, 0.1, 0.3)),
    "resnet": (300, (0.01, 0.03, 0.1, 0.3)),
}
#: method -> compression, and arguments of `attach` or, with an outer step, of `LocalSteps`
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("", {}),
    "1 %": ("best:density=0.01", {}),
    "1 %, delay=1": ("best:density=0.01", {"delay": 1}),
    "1 %, every=4": ("best:density=0.01", {"every": 4}),
    "1 %, every=15": ("best:density=0.01", {"every": 15}),
    "SparseLoCo, every=15": ("sparseloco", {"every": 15, "outer": ddp.OuterStep(lr=1.5)}),
    "DiLoCo, every=15": ("", {"every": 15, "outer": "nesterov"}),
}
DENSITIES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{density:g} %": (f"best:density={density / 100}", {}) for density in (25, 5, 1, 0.3)
} | {"0.3 %, delay=1": ("best:density=0.003", {"delay": 1})}


def _network(task: str) -> Task:
    """A task; images of digits are 14 x 14 for the ResNet."""
    if task == "gpt":
        return gpt_task(layers=2, width=64, batch_size=8, length=64)

    def cnn() -> nn.Module:
        layers: list[nn.Module] = [nn.Unflatten(1, (1, 28))]
        for inside, outside in ((1, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside)]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(576, 10))

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = resnet("resnet20", 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            small = nn.functional.avg_pool2d(images.unsqueeze(1), 2)
            return self.body(small.expand(-1, 3, -1, -1))

    return replace(digits_task(batch_size=16), make_model=cnn if task == "cnn" else ResNet)


def train(task_name: str, method: str, rate: float, seed: int) -> Result:
    """One training on this rank: means over ranks."""
    task, (num_steps, _) = _network(task_name), TASKS[task_name]
    text, options = METHODS.get(method) or DENSITIES[method]
    torch.manual_seed(seed)
    net = task.make_model()
    model = DistributedDataParallel(net)
    optimizer: torch.optim.Optimizer
    if task_name == "gpt":
        optimizer = torch.optim.AdamW(groups(list(net.parameters()), SETTING), betas=(0.9, SETTING["beta2"]))
    else:
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    sync: Any = None
    if "outer" in options:
        sync = ddp.LocalSteps(optimizer, model, compression=text or None, **options)
    elif text:
        sync = ddp.attach(model, text, optimizer, **options)
    setting, losses = {**SETTING, "num_steps": num_steps}, []
    for step, batch in enumerate(task.batches(dist.get_rank(), dist.get_world_size(), num_steps, seed)):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, rate, setting)
        optimizer.zero_grad()
        loss = task.loss(model, *batch)
        loss.backward()
        if task_name == "gpt":
            nn.utils.clip_grad_norm_(net.parameters(), SETTING["clip_norm"])
        optimizer.step()
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            return {"diverged": True}
    if sync is not None:
        sync.finish()
    last = statistics.fmean(losses[-round(LAST * num_steps) :])
    told = torch.tensor([last, *task.test(net, dist.get_rank(), dist.get_world_size())], dtype=torch.float64)
    dist.all_reduce(told)
    unit = math.log(2) if task_name == "gpt" else 1.0
    return {
        "training": round(float(told[0]) / dist.get_world_size() / unit, 4),
        "test": round(float(told[1] / told[2]), 4),
        "num_elements": sum(parameter.numel() for parameter in net.parameters()),
    }


def label(task: str, size: int, method: str, rate: float, seed: int) -> str:
    return f"{task}, P={size}/{method}/rate {rate:g}/seed {seed}"


def best_rate(result: Result, task: str, size: int, method: str) -> float:
    """The rate of the least training loss with the first seed; NaN: not all are measured."""
    runs = [result.get("runs", {}).get(label(task, size, method, rate, 0)) for rate in TASKS[task][1]]
    if None in runs:
        return math.nan
    losses = [run.get("training", math.inf) for run in runs]
    return TASKS[task][1][losses.index(min(losses))]


def search(result: Result, method: str) -> tuple[list[float], float]:
    """Rates that a method tries at P = 4, by factors of two from dense's best, and its own best among them.

    The best is NaN until both of its neighbours are measured.
    """
    first, runs, best = best_rate(result, "gpt", 4, "dense"), result.get("runs", {}), 0
    losses: dict[int, float] = {}
    while True:
        near = [best, best + 1, best - 1]
        for power in near:
            run = runs.get(label("gpt", 4, method, first * 2**power, 0))
            losses[power] = math.nan if run is None else float(run.get("training", math.inf))
        tried, better = [first * 2**power for power in losses], min(near, key=losses.__getitem__)
        if any(math.isnan(losses[power]) for power in near):
            return tried, math.nan
        if better == best:
            return tried, first * 2**best
        best = better


def names() -> list[str]:
    """Rates of dense trainings; then all methods at dense's best; then, at P = 4, at the best of each.

    What depends on a best rate appears once others are measured: give the command until it has nothing to do.
    """
    result = load(STUDY.file)
    found: dict[str, None] = {}

    def ask(task: str, size: int, method: str, rates: Sequence[float], seeds: Sequence[int]) -> None:
        found.update(
            (label(task, size, method, rate, seed), None)
            for seed in seeds
            for rate in rates
            if not math.isnan(rate)
        )

    for task, size in CELLS:
        ask(task, size, "dense", TASKS[task][1], SEEDS[:1])
    for seed, (task, size) in itertools.product(SEEDS, CELLS):
        at_dense = [best_rate(result, task, size, "dense")]
        methods = list(METHODS)[:5] if task == "gpt" else ["dense", *DENSITIES, "1 %, delay=1"]
        for method in methods:
            ask(task, size, method, at_dense, [seed])
    for method in METHODS:
        rates, best = search(result, method)
        ask("gpt", 4, method, rates, SEEDS[:1])
        ask("gpt", 4, method, [best], SEEDS)
    return list(found)


def measure(name: str) -> Result:
    """Launches a training."""
    size = name.partition("/")[0].partition("P=")[2]
    command = ["torchrun", "--standalone", "--nproc-per-node", size, "-m", __name__, "--training", name]
    return launched(command)


def _mean(result: Result, task: str, size: int, method: str, rate: float) -> list[str] | None:
    runs = [result.get("runs", {}).get(label(task, size, method, rate, seed)) for seed in SEEDS]
    there = [run for run in runs if run is not None]
    if not there:
        return None
    if any("training" not in run for run in there):
        return ["diverged", "", "", str(len(there))]
    training = [run["training"] for run in there]
    test = statistics.fmean(run["test"] for run in there)
    spread = f"{max(training) - min(training):.3f}"
    return [f"{statistics.fmean(training):.3f}", spread, f"{test:.3f}", str(len(there))]


def table(result: Result) -> str:
    """Every method at the rate that is best for dense; then at its own."""
    head = ["training, ranks", "method", "rate", "loss, training", "spread", "test", "seeds"]
    common = [
        [f"{task}, P={size}", method, f"{rate:g}", *found]
        for task, size in CELLS
        for rate in [best_rate(result, task, size, "dense")]
        for method in dict.fromkeys((*METHODS, *DENSITIES))
        if (found := _mean(result, task, size, method, rate)) is not None
    ]
    own = [
        ["gpt, P=4", method, f"{rate:g}", *found]
        for method in METHODS
        for rate in [search(result, method)[1]]
        if (found := _mean(result, "gpt", 4, method, rate)) is not None
    ]
    return f"{markdown(head, common)}\n\nEach at its own best rate:\n\n{markdown(head, own)}"


STUDY = Study("passes", names, measure, table, facts={"setting": SETTING})


def main() -> None:
    """A rank of one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--training", required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cell, method, rate, seed = options.training.split("/")
    task = cell.partition(",")[0]
    found = train(task, method, float(rate.removeprefix("rate ")), int(seed.removeprefix("seed ")))
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
