"""Local steps on a small GPT: dense AdamW in every step, DiLoCo, sparseloco.

Ranks are simulated in one process, each with a model and an AdamW of its own; `SimulatedCluster` carries out
the exchanges and counts what is sent.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.studies import adamw
from benchmarks.studies.adamw import rate_at, trained
from benchmarks.studies.study import Result, Study, at_best_rate, markdown, parsed, rounded
from benchmarks.studies.tasks import Task, gpt_task
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.training.schedules import mean_over_senders

SETTING: dict[str, Any] = {"num_steps": 3000, "size": 4, "length": 64, "width": 128, "warmup": 0.1}
SETTING |= {"weight_decay": 0.1, "clip_norm": 1.0, "beta2": 0.99}
SEEDS = (0, 1, 2)
#: of the inner optimizer
RATES = (7.5e-4, 1.5e-3, 3e-3)
#: steps at the end whose loss is the training score: text that the model has not seen before
LAST = 300
KEYS = "training_bits", "bits", "bytes_per_step"


@dataclass(frozen=True)
class Method:
    """A row of the table: local steps between exchanges, what they send ("" for all), and the outer step.

    With `delay` an exchange arrives so many steps later, and what ranks have learned meanwhile stays.
    """

    every: int = 1
    text: str = ""
    lr: float = 1.0
    momentum: float = 0.0
    combine: str = "ranks"
    delay: int = 0


METHODS = {
    "AdamW in every step, dense": Method(),
    "DiLoCo, H = 30, dense": Method(30, lr=0.7, momentum=0.9),
    "sparseloco, H = 30": Method(30, "sparseloco"),
    "sparseloco, H = 30, by senders": Method(30, "sparseloco", combine="senders"),
    "sparseloco, H = 30, by senders, outer rate 1.5": Method(30, "sparseloco", lr=1.5, combine="senders"),
    "the same, 5 steps late": Method(30, "sparseloco", lr=1.5, combine="senders", delay=5),
    "the same, 15 steps late": Method(30, "sparseloco", lr=1.5, combine="senders", delay=15),
}


def measure(method: Method, rate: float, seed: int, setting: dict[str, Any] = SETTING) -> Result:
    """Trains once."""
    task = gpt_task(width=setting["width"], batch_size=2, length=setting["length"])
    if method.every == 1:
        return trained(task, adamw.Method(setting["size"], "dense"), setting, rate, seed)
    torch.manual_seed(seed)
    model = task.make_model()
    losses, sent = _apart(method, task, model, {**setting, "rate": rate}, seed)
    return {
        "bits": round(task.score(model), 4),
        "training_bits": round(float(np.mean(losses[-LAST:])) / math.log(2), 4),
        "bytes_per_step": round(sent / setting["num_steps"], 1),
        "num_elements": sum(parameter.numel() for parameter in model.parameters()),
        "losses": rounded(losses),
    }


def _apart(
    method: Method, task: Task, model: torch.nn.Module, setting: dict[str, Any], seed: int
) -> tuple[list[float], float]:
    """Trains a model per rank; after some steps, all begin again from the mean displacement."""
    size, num_steps = setting["size"], setting["num_steps"]
    models = [copy.deepcopy(model) for _ in range(size)]
    optimizers = [adamw.adamw([*one.parameters()], setting["rate"], setting) for one in models]
    streams = [task.batches(rank, size, num_steps, seed) for rank in range(size)]
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    velocity, n = torch.zeros_like(start), start.numel()
    cluster = None if not method.text else SimulatedCluster(parse_recipe(method.text), n, len(models))
    losses, sent = [], 0.0
    for step in range(num_steps):
        found, rate = [], rate_at(step, setting["rate"], setting)
        for one, optimizer, stream in zip(models, optimizers, streams, strict=True):
            loss = task.loss(one, *next(stream))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), setting["clip_norm"])
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
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


def table(result: Result) -> str:
    """Returns a table with a row per method at its best rate, beside dense training with the same seeds."""
    rows, runs = [], result["runs"]
    for name, method in METHODS.items():
        found = at_best_rate(runs, name)
        if found is None:
            continue
        rate, own = found
        dense = at_best_rate(runs, next(iter(METHODS)))
        assert dense is not None
        bits, test, sent = ([run[key] for run in own.values()] for key in KEYS)
        dense_bits, _, dense_sent = ([dense[1][seed][key] for seed in own] for key in KEYS)
        fewer = np.mean(dense_sent) / np.mean(sent)
        scores = f"{100 * (np.mean(bits) / np.mean(dense_bits) - 1):+.1f} %", f"{np.mean(test):.3f}"
        times = f"{fewer / method.every:.0f}x", f"{fewer:,.0f}x"
        rows.append([name, f"{rate:g}", f"{np.mean(bits):.3f}", *scores, *times, str(len(own))])
    head = ["method", "rate", "bits, training", "to dense", "bits, test"]
    return markdown([*head, "fewer bytes, exchange", "in all", "seeds"], rows)


def _by_name(run: str) -> Result:
    name, rate, seed = parsed(run)
    return measure(METHODS[name], rate, seed)


STUDY = Study(
    "local",
    lambda: [
        f"{name}/rate {rate:g}/seed {seed}" for seed, rate, name in itertools.product(SEEDS, RATES, METHODS)
    ],
    _by_name,
    table,
    stem="local_steps",
    facts={"setting": SETTING},
)
