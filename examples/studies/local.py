"""Local steps on a small GPT: dense AdamW in every step, the same bytes by accumulation, DiLoCo, sparseloco.

scripts/study local                  run what is missing, then write the table
scripts/study local --only DiLoCo    methods whose name has this in it
scripts/study local --again          measure everything anew
scripts/study local --draw           only the table, from docs/measurements/local_steps.json

Ranks are simulated in one process, each with a model and an AdamW of its own; `SimulatedCluster` carries out
the exchanges and counts what is sent.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from horovod_sparse.feedback import parse_recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.training.rounds import mean_over_senders
from studies import results
from studies.adamw import adamw, rate_at
from studies.tasks import Task, gpt_task

__all__ = ["METHODS", "main", "table"]

FILE = results.MEASUREMENTS / "local_steps.json"
#: of the ranks together 8 pieces of 64 bytes in a step
SETTING = {"num_steps": 3000, "size": 4, "batch": 2, "length": 64, "width": 128, "warmup": 0.1}
SETTING |= {"weight_decay": 0.1, "clip_norm": 1.0, "beta2": 0.99, "rate": 3e-3}
SEEDS = (0, 1, 2)
#: steps at the end whose loss is the training score: text that the model has not seen before
LAST = 300
KEYS = "training_bits", "bits", "bytes_per_step"


@dataclass(frozen=True)
class Method:
    """A row: local steps between exchanges, what they send ("" for everything), and the outer step.

    With `accumulate` gradients of so many steps are added up for one step of AdamW instead.
    """

    every: int = 1
    text: str = ""
    lr: float = 1.0
    momentum: float = 0.0
    accumulate: int = 1
    combine: str = "ranks"


METHODS = {
    "AdamW in every step, dense": Method(),
    "gradients of 30 steps, dense": Method(accumulate=30),
    "DiLoCo, H = 30, dense": Method(30, lr=0.7, momentum=0.9),
    "sparseloco, H = 30": Method(30, "sparseloco"),
    "sparseloco, H = 30, by senders": Method(30, "sparseloco", combine="senders"),
}


def measure(method: Method, seed: int, setting: dict[str, Any], steps: Iterable[int]) -> dict[str, Any]:
    """One training."""
    torch.manual_seed(seed)
    size, length = setting["size"], setting["length"]
    task = gpt_task(width=setting["width"], batch_size=setting["batch"], length=length)
    model, started = task.make_model(), time.perf_counter()
    streams = [task.batches(rank, size, setting["num_steps"], seed) for rank in range(size)]
    if method.every == 1:
        losses, sent = _together(method, task, model, streams, setting, steps)
    else:
        losses, sent = _apart(method, task, model, streams, setting, steps)
    return {
        "bits": round(task.score(model), 4),
        "training_bits": round(float(np.mean(losses[-LAST:])) / math.log(2), 4),
        "bytes_per_step": round(sent / setting["num_steps"], 1),
        "num_elements": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.perf_counter() - started),
        "losses": [float(f"{loss:.4g}") for loss in losses],
    }


def _optimizer(model: torch.nn.Module, setting: dict[str, Any]) -> torch.optim.AdamW:
    return adamw(list(model.parameters()), setting["rate"], setting)


def _step(model: torch.nn.Module, optimizer: torch.optim.AdamW, rate: float, setting: dict[str, Any]) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), setting["clip_norm"])
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


def _together(
    method: Method,
    task: Task,
    model: torch.nn.Module,
    streams: Sequence[Any],
    setting: dict[str, Any],
    steps: Iterable[int],
) -> tuple[list[float], float]:
    """One model, since all ranks have the same: the gradient of all batches is the mean over ranks."""
    optimizer, losses, sent = _optimizer(model, setting), [], 0.0
    for step in steps:
        inputs, targets = (
            torch.from_numpy(np.concatenate(some))
            for some in zip(*(next(stream) for stream in streams), strict=True)
        )
        loss = task.loss(model, inputs, targets)
        (loss / method.accumulate).backward()
        losses.append(float(loss.detach()))
        if (step + 1) % method.accumulate == 0:
            _step(model, optimizer, rate_at(step, setting["rate"], setting), setting)
            sent += 4 * sum(parameter.numel() for parameter in model.parameters())
    return losses, sent


def _apart(
    method: Method,
    task: Task,
    model: torch.nn.Module,
    streams: Sequence[Any],
    setting: dict[str, Any],
    steps: Iterable[int],
) -> tuple[list[float], float]:
    """A model for every rank; every so many steps their mean displacement moves what all begin with again."""
    models = [copy.deepcopy(model) for _ in streams]
    optimizers = [_optimizer(one, setting) for one in models]
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    velocity, n = torch.zeros_like(start), start.numel()
    cluster = None if not method.text else SimulatedCluster(parse_recipe(method.text), n, len(models))
    losses, sent = [], 0.0
    for step in steps:
        found, rate = [], rate_at(step, setting["rate"], setting)
        for one, optimizer, stream in zip(models, optimizers, streams, strict=True):
            inputs, targets = map(torch.from_numpy, next(stream))
            loss = task.loss(one, inputs, targets)
            loss.backward()
            _step(one, optimizer, rate, setting)
            found.append(float(loss.detach()))
        losses.append(float(np.mean(found)))
        if (step + 1) % method.every:
            continue
        moved = [start - torch.nn.utils.parameters_to_vector(one.parameters()).detach() for one in models]
        if cluster is None:
            mean = torch.stack(moved).mean(0)
            sent += 4 * n
        else:
            sum_ = cluster.synchronize([one.numpy() for one in moved])[0]
            if method.combine == "senders":
                mean = torch.from_numpy(cluster.dense(mean_over_senders(sum_)))
            else:
                mean = torch.from_numpy(cluster.dense(sum_)) / len(models)
        velocity = method.momentum * velocity + mean
        start = start - method.lr * (mean + method.momentum * velocity)
        for one in models:
            torch.nn.utils.vector_to_parameters(start.clone(), one.parameters())  # they become views of it
    torch.nn.utils.vector_to_parameters(start, model.parameters())
    if cluster is not None:
        sent = sum(each[0] for each in cluster.recorder.bytes_sent)
    return losses, sent


def table(result: dict[str, Any]) -> str:
    """A row per method, as means over its seeds; dense is of the same ones."""
    rows, runs = [], result["runs"]
    for name, method in METHODS.items():
        seeds = [seed for seed in SEEDS if f"{name}/seed {seed}" in runs]
        if not seeds:
            continue
        own, dense = (
            {key: float(np.mean([runs[f"{one}/seed {seed}"][key] for seed in seeds])) for key in KEYS}
            for one in (name, next(iter(METHODS)))
        )
        fewer = dense["bytes_per_step"] / own["bytes_per_step"]
        rows.append(
            [
                name,
                f"{own['training_bits']:.3f}",
                f"{100 * (own['training_bits'] / dense['training_bits'] - 1):+.1f} %",
                f"{own['bits']:.3f}",
                f"{fewer / (method.every * method.accumulate):.0f}x",
                f"{fewer:,.0f}x",
                str(len(seeds)),
            ]
        )
    head = ["method", "bits, training", "to dense", "bits, test"]
    return results.markdown([*head, "fewer bytes, exchange", "in all", "seeds"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes the table."""
    parser = results.command_line("scripts/study local", __doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="methods whose name has this in it")
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=SEEDS, help="(default: all)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = results.load(FILE)
    if not options.draw:
        result |= {"command": "scripts/study local", "machine": results.machine(), "setting": SETTING}
        runs = result.setdefault("runs", {})
        for seed in options.seeds:
            for name, method in METHODS.items():
                label = f"{name}/seed {seed}"
                if options.only in name and (label not in runs or options.again):
                    runs[label] = measure(method, seed, SETTING, range(SETTING["num_steps"]))
                    results.save(FILE, result)
    results.write_appendix()
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
