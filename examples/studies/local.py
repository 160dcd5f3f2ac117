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
import itertools
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
SETTING: dict[str, Any] = {"num_steps": 3000, "size": 4, "length": 64, "width": 128, "warmup": 0.1}
SETTING |= {"weight_decay": 0.1, "clip_norm": 1.0, "beta2": 0.99}
SEEDS = (0, 1, 2)
#: of the inner optimizer
RATES = (7.5e-4, 1.5e-3, 3e-3)
#: bytes of text, by a rank's pieces of 64 bytes in a step, so that little or nothing comes twice
TEXT = {2: 2_000_000, 8: 5_000_000}
#: steps at the end whose loss is the training score: text that the model has not seen before
LAST = 300
KEYS = "training_bits", "bits", "bytes_per_step"


@dataclass(frozen=True)
class Method:
    """A row: local steps between exchanges, what they send ("" for everything), and the outer step.

    With `accumulate` gradients of so many steps are added up for one step of AdamW instead. With `delay` an
    exchange arrives so many steps later, and what ranks have learned meanwhile stays. `batch` is a rank's
    pieces of text in a step.
    """

    every: int = 1
    text: str = ""
    lr: float = 1.0
    momentum: float = 0.0
    accumulate: int = 1
    combine: str = "ranks"
    delay: int = 0
    batch: int = 2


METHODS = {
    "AdamW in every step, dense": Method(),
    "gradients of 30 steps, dense": Method(accumulate=30),
    "DiLoCo, H = 30, dense": Method(30, lr=0.7, momentum=0.9),
    "sparseloco, H = 30": Method(30, "sparseloco"),
    "sparseloco, H = 30, by senders": Method(30, "sparseloco", combine="senders"),
    "sparseloco, H = 30, by senders, outer rate 1.5": Method(30, "sparseloco", lr=1.5, combine="senders"),
    "the same, 5 steps late": Method(30, "sparseloco", lr=1.5, combine="senders", delay=5),
    "the same, 15 steps late": Method(30, "sparseloco", lr=1.5, combine="senders", delay=15),
    "AdamW in every step, dense, 8 pieces": Method(batch=8),
    "DiLoCo, H = 30, dense, 8 pieces": Method(30, lr=0.7, momentum=0.9, batch=8),
    "sparseloco, H = 30, by senders, outer rate 1.5, 8 pieces": Method(
        30, "sparseloco", lr=1.5, combine="senders", batch=8
    ),
}


def measure(
    method: Method, rate: float, seed: int, setting: dict[str, Any], steps: Iterable[int]
) -> dict[str, Any]:
    """One training."""
    setting = setting | {"rate": rate}
    torch.manual_seed(seed)
    size, length = setting["size"], setting["length"]
    task = gpt_task(
        width=setting["width"], batch_size=method.batch, length=length, num_bytes=TEXT[method.batch]
    )
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
        if (step + 1) % method.every == 0:
            ends = [torch.nn.utils.parameters_to_vector(one.parameters()).detach() for one in models]
        if step + 1 < method.every or (step + 1) % method.every != method.delay:
            continue
        moved = [start - end for end in ends]
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
        for one, end in zip(models, ends, strict=True):
            since = torch.nn.utils.parameters_to_vector(one.parameters()).detach() - end
            # a sum of each model's own: parameters become views of what they are given
            torch.nn.utils.vector_to_parameters(start + since, one.parameters())
    torch.nn.utils.vector_to_parameters(start, model.parameters())
    if cluster is not None:
        sent = sum(each[0] for each in cluster.recorder.bytes_sent)
    return losses, sent


def best(runs: dict[str, Any], name: str, seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Means over seeds at the rate that was best with the first one; empty where that was not run."""
    found = {
        rate: {seed: run for seed in seeds if (run := runs.get(f"{name}/rate {rate:g}/seed {seed}"))}
        for rate in RATES
    }
    tried = [rate for rate in RATES if SEEDS[0] in found[rate]]
    if not tried:
        return {}
    rate = min(tried, key=lambda one: found[one][SEEDS[0]]["training_bits"])
    means = {key: float(np.mean([run[key] for run in found[rate].values()])) for key in KEYS}
    return {**means, "rate": rate, "seeds": list(found[rate])}


def table(result: dict[str, Any]) -> str:
    """A row per method, beside dense training with the same seeds."""
    rows, runs = [], result["runs"]
    for name, method in METHODS.items():
        own = best(runs, name)
        if not own:
            continue
        beside = next(other for other, one in METHODS.items() if one == Method(batch=method.batch))
        dense = best(runs, beside, own["seeds"])
        fewer = dense["bytes_per_step"] / own["bytes_per_step"]
        rows.append(
            [
                name,
                f"{own['rate']:g}",
                f"{own['training_bits']:.3f}",
                f"{100 * (own['training_bits'] / dense['training_bits'] - 1):+.1f} %",
                f"{own['bits']:.3f}",
                f"{fewer / (method.every * method.accumulate):.0f}x",
                f"{fewer:,.0f}x",
                str(len(own["seeds"])),
            ]
        )
    head = ["method", "rate", "bits, training", "to dense", "bits, test"]
    return results.markdown([*head, "fewer bytes, exchange", "in all", "seeds"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes the table."""
    parser = results.command_line("scripts/study local", __doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="methods whose name has this in it")
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=SEEDS, help="(default: all)")
    parser.add_argument("--rates", type=float, nargs="+", choices=RATES, default=RATES, help="(default: all)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = results.load(FILE)
    if not options.draw:
        result |= {"command": "scripts/study local", "machine": results.machine(), "setting": SETTING}
        runs = result.setdefault("runs", {})
        for seed, rate, name in itertools.product(options.seeds, options.rates, METHODS):
            label = f"{name}/rate {rate:g}/seed {seed}"
            if options.only in name and (label not in runs or options.again):
                runs[label] = measure(METHODS[name], rate, seed, SETTING, range(SETTING["num_steps"]))
                results.save(FILE, result)
    results.write_appendix()
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
