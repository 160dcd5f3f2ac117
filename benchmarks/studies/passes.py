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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resnet import resnet
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.studies.adamw import adamw, rate_at
from benchmarks.studies.study import Result, Study, around, at_best_rate, launched, load, markdown, parsed
from benchmarks.studies.tasks import Task, digits_task, gpt_task
from horovod_sparse import ddp

SEEDS, LAST, SCORE = (0, 1, 2), 0.1, "training"
CELLS = [("gpt", 2), ("gpt", 4), ("gpt", 8), ("cnn", 2), ("resnet", 2)]
SETTING = {"warmup": 0.1, "weight_decay": 0.1, "clip_norm": 1.0, "beta2": 0.99}
#: task -> steps and rates that dense training tries; a best rate at an edge is none
TASKS: dict[str, tuple[int, tuple[float, ...]]] = {
    "gpt": (600, (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2)),
    "cnn": (300, (0.01, 0.03, 0.1, 0.3)),
    "resnet": (300, (0.01, 0.03, 0.1, 0.3, 1.0)),
    "resnet18": (100, ()),
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
    """Returns a task by name; with ResNets, digits are 14 x 14."""
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
            self.body = resnet("resnet20" if task == "resnet" else task, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            small = nn.functional.avg_pool2d(images.unsqueeze(1), 2)
            return self.body(small.expand(-1, 3, -1, -1))

    return replace(digits_task(batch_size=16), make_model=cnn if task == "cnn" else ResNet)


def train(name: str) -> Result:
    """Trains once with all ranks; returns means over ranks."""
    label, rate, seed = parsed(name)
    cell, method = label.split("/")
    task_name = cell.partition(",")[0]
    is_gpt, momentum = task_name == "gpt", partial(torch.optim.SGD, momentum=0.9)
    setting = {**SETTING, "num_steps": TASKS[task_name][0]}
    text, options = METHODS.get(method) or DENSITIES[method]
    make = partial(adamw, rate=rate, setting=setting) if is_gpt else momentum
    clip_norm = SETTING["clip_norm"] if is_gpt else math.inf
    found = trained(_network(task_name), make, text, options, {**setting, "clip_norm": clip_norm}, rate, seed)
    if "diverged" in found:
        return found
    training = found["training"] / (math.log(2) if is_gpt else 1.0)
    return {SCORE: round(training, 4), "test": round(found["test"], 4), "num_elements": found["num_elements"]}


def trained(
    task: Task,
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    compression: str,
    options: Mapping[str, Any],
    setting: dict[str, Any],
    rate: float,
    seed: int,
    device: str = "cpu",
    after_step: Callable[[int, torch.optim.Optimizer], None] = lambda step, optimizer: None,
) -> Result:
    """Trains on this rank, and returns means over ranks; `diverged` if the loss became infinite."""
    torch.manual_seed(seed)
    net, num_steps, losses = task.make_model().to(device), setting["num_steps"], []
    model = DistributedDataParallel(net)
    trains = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trains)
    sync: Any = None
    if "outer" in options:
        sync = ddp.LocalSteps(optimizer, model, compression=compression or None, **options)
    elif compression:
        sync = ddp.attach(model, compression, optimizer, **options)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step, batch in enumerate(task.batches(rank, size, num_steps, seed)):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, rate, setting)
        optimizer.zero_grad()
        loss = task.loss(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(trains, setting["clip_norm"])
        optimizer.step()
        after_step(step, optimizer)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            return {"diverged": True}
    count = sum(parameter.numel() for parameter in trains)
    sent = 4.0 * count
    if sync is not None:
        # telemetry counts exchanges, not passes
        sent = sync.telemetry.mean.bytes_sent * sync.telemetry.num_steps / num_steps
        sync.finish()
    last = statistics.fmean(losses[-round(LAST * num_steps) :])
    told = torch.tensor([last, *task.test(net, rank, size)], dtype=torch.float64)
    dist.all_reduce(told)
    training, test = float(told[0]) / size, float(told[1] / told[2])
    return {SCORE: training, "test": test, "num_elements": count, "bytes_per_step": round(sent)}


def in_bits(found: Result) -> Result:
    """Returns a text model's result with its scores in bits."""
    if "diverged" in found:
        return found
    training, held_out = found.pop("training") / math.log(2), found.pop("test")
    return {"bits": round(held_out, 4), "training_bits": round(training, 4), **found}


def row(task: str, size: int, method: str) -> str:
    """Returns the name of a row: a training without its rate and seed."""
    return f"{task}, P={size}/{method}"


#: rows that are measured at their own best rate -> its first guess, and number of seeds
OWN = {row("gpt", 4, method): (3e-3, len(SEEDS)) for method in METHODS}
OWN |= {row("resnet18", 2, method): (0.1, 1) for method in list(METHODS)[:3]}


def best_rate(runs: Result, name: str, rates: Sequence[float] = ()) -> list[float]:
    """Returns the rate of a row's lowest loss, or none until `rates` (or half and twice it) are measured."""
    needed = [f"{name}/rate {rate:g}/seed 0" for rate in rates] or around(runs, name, math.nan, SCORE)
    best = at_best_rate(runs, name, SCORE)
    return [best[0]] if best is not None and all(run in runs for run in needed) else []


def names() -> list[str]:
    """Rates of dense trainings; then all methods at dense's best; then `OWN`, at the best of each."""
    runs, found = load(STUDY.file).get("runs", {}), list[str]()
    for task, size in CELLS:
        found += [f"{row(task, size, 'dense')}/rate {rate:g}/seed 0" for rate in TASKS[task][1]]
    for seed, (task, size) in itertools.product(SEEDS, CELLS):
        for rate in best_rate(runs, row(task, size, "dense"), TASKS[task][1]):
            methods = list(METHODS)[:5] if task == "gpt" else ["dense", *DENSITIES, "1 %, delay=1"]
            found += [f"{row(task, size, method)}/rate {rate:g}/seed {seed}" for method in methods]
    for own, (guess, num_seeds) in OWN.items():
        found += around(runs, own, guess, SCORE)
        for rate in best_rate(runs, own):
            found += [f"{own}/rate {rate:g}/seed {seed}" for seed in range(num_seeds)]
    return list(dict.fromkeys([*runs, *found]))


def measure(name: str) -> Result:
    """Launches a training."""
    return launch(int(name.partition("/")[0].partition("P=")[2]), __name__, name)


def launch(size: int, module: str, name: str) -> Result:
    """Launches a study's module on real ranks, for one training (`on_rank`)."""
    start = ["torchrun", "--standalone", "--nproc-per-node", str(size)]
    return launched([*start, "-m", module, "--training", name])


def table(result: Result) -> str:
    """Returns tables of every method, at the best rate of dense training and at its own."""
    runs = result.get("runs", {})

    def line(name: str, rate: float, edge: str = "") -> list[str]:
        there = [runs[run] for seed in SEEDS if (run := f"{name}/rate {rate:g}/seed {seed}") in runs]
        losses, tests = ([run.get(score, math.nan) for run in there] for score in (SCORE, "test"))
        told = [statistics.fmean(losses), max(losses) - min(losses), statistics.fmean(tests)]
        return [*name.split("/"), f"{rate:g}{edge}", *(f"{one:.3f}" for one in told), str(len(there))]

    at_dense = [
        line(name, rate)
        for task, size in CELLS
        for rate in best_rate(runs, row(task, size, "dense"), TASKS[task][1])
        for name in (row(task, size, method) for method in dict.fromkeys((*METHODS, *DENSITIES)))
        if f"{name}/rate {rate:g}/seed 0" in runs
    ]
    own = [
        line(name, best[0], "" if best_rate(runs, name) else " (edge)")
        for name in OWN
        if (best := at_best_rate(runs, name, SCORE))
    ]
    head = ["training, ranks", "method", "rate", "loss, training", "spread", "test", "seeds"]
    return f"{markdown(head, at_dense)}\n\nEach at its own best rate:\n\n{markdown(head, own)}"


STUDY = Study("passes", names, measure, table, facts={"setting": SETTING})


def on_rank(train: Callable[[str], Result]) -> None:
    """Runs one rank of a training."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--training", required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = train(options.training)
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    on_rank(train)
