"""A training on P simulated ranks in one process: real gradients, and a record of every step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from horovod_sparse.feedback import Recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import SparseSum
from horovod_sparse.telemetry import BucketStep
from horovod_sparse.tensors.adoption import adopt, feedback_of
from studies.baselines import Exchange
from studies.tasks import Task

__all__ = ["Trace", "train"]


@dataclass
class Trace:
    """What happened in every step of a training.

    Attributes:
        targets: k, what was asked for.
        counts: elements of the union.
        imbalance: f(t), ExDyna Eq. (5); NaN where the algorithm does not tell.
        thresholds: of rank 0; NaN where the algorithm does not tell.
        global_error: ExDyna Eq. (1), of what the ranks held back when the step began.
        losses: mean over ranks, of the training batches.
        applied_norms: L2 norms of the gradients that the optimizer got.
        facts: what the algorithm tells of a step on rank 0, all of it.
        num_elements: n.
        bytes_per_step: what rank 0 sent in a step, on average.
        score: of the trained model on the test data (see `Task.score`).
        seconds: of the whole training.
    """

    num_elements: int
    targets: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    thresholds: list[float] = field(default_factory=list)
    global_error: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    applied_norms: list[float] = field(default_factory=list)
    facts: list[dict[str, float]] = field(default_factory=list)
    bytes_per_step: float = math.nan
    score: float = math.nan
    seconds: float = 0.0


def train(
    task: Task,
    recipe: Recipe,
    *,
    size: int,
    num_steps: int,
    learning_rate_at: Callable[[int], float],
    seed: int = 0,
    progress: Callable[[Iterator[int]], Iterator[int]] = iter,
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    edit: Callable[[torch.optim.Optimizer, torch.Tensor], None] | None = None,
    exchange: Callable[[list[torch.Size]], Exchange] | None = None,
) -> Trace:
    """Trains with sparsified gradients.

    All ranks hold the same model, so one model computes their gradients, one after the other, each from
    its own share of the data. The synchronized sum is applied by plain or momentum SGD, as the task says,
    or by another optimizer, which is adopted where the feedback makes its steps.

    Args:
        task: model and data.
        recipe: what every rank does with its gradient.
        size: P.
        num_steps: steps.
        learning_rate_at: rate of every step (from 0); error feedback is told, too.
        seed: of the model's start and of the order of the data.
        progress: wraps the steps, for a progress bar.
        make_optimizer: makes another optimizer than the task's SGD; its rate is set in every step.
        edit: called with the optimizer and the averaged gradient, [n], which it may change, before a step.
        exchange: made for the parameters' shapes, in place of the recipe; a trace then has losses, norms,
            bytes and the score alone.
    """
    torch.manual_seed(seed)
    model = task.make_model()
    # backward order, as the buckets of the PyTorch front end
    parameters = list(model.parameters())[::-1]
    trace = Trace(sum(parameter.numel() for parameter in parameters))
    if make_optimizer is None:
        make_optimizer = partial(torch.optim.SGD, lr=1.0, momentum=task.momentum)
    optimizer = make_optimizer(parameters)
    recipe = adopt(optimizer, recipe)
    recipe = replace(recipe, feedback=feedback_of(recipe.feedback, optimizer.param_groups[0]))
    cluster = SimulatedCluster(recipe, trace.num_elements, size)
    flat = torch.zeros(trace.num_elements)
    views = [
        part.view_as(parameter)
        for part, parameter in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)
    ]
    swap = None if exchange is None else exchange([parameter.shape for parameter in parameters])
    streams = [task.batches(rank, size, num_steps, seed) for rank in range(size)]
    started, num_bytes = time.perf_counter(), 0.0
    for step in progress(iter(range(num_steps))):
        rate = learning_rate_at(step)
        gradients, losses = [], []
        for stream in streams:
            inputs, targets = next(stream)
            loss = task.loss(model, torch.from_numpy(inputs), torch.from_numpy(targets))
            parts = torch.autograd.grad(loss, parameters)
            gradients.append(torch.cat([part.reshape(-1) for part in parts]).numpy())
            losses.append(float(loss.detach()))
        if swap is None:
            sum_ = cluster.synchronize(gradients, rate)[0]
            flat.zero_()
            flat.index_add_(
                0, torch.from_numpy(sum_.indices.astype(np.int64)), torch.from_numpy(sum_.values.copy())
            )
            flat *= 1.0 / size  # as the optimizers do it
            _note(trace, cluster.buckets[0].last, sum_)
        else:
            found, sent = swap([torch.from_numpy(gradient) for gradient in gradients], step, rate)
            flat.copy_(found)
            num_bytes += sent
        if edit is not None:
            edit(optimizer, flat)
        trace.applied_norms.append(float(flat.norm()))
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        trace.losses.append(float(np.mean(losses)))
    trace.seconds = time.perf_counter() - started
    num_bytes += sum(sent[0] for sent in cluster.recorder.bytes_sent)
    trace.bytes_per_step = num_bytes / num_steps
    trace.score = task.score(model)
    return trace


def _note(trace: Trace, last: BucketStep, sum_: SparseSum) -> None:
    trace.targets.append(last.num_target)
    trace.facts.append(dict(last.facts))
    is_sent = np.zeros(trace.num_elements, bool)
    is_sent[sum_.indices] = True
    trace.counts.append(int(np.count_nonzero(is_sent)))
    trace.imbalance.append(last.facts.get("imbalance", math.nan))
    trace.thresholds.append(last.facts.get("threshold", math.nan))
    trace.global_error.append(last.global_error)
