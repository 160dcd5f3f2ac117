"""A training on P simulated ranks in one process: real gradients, and a record of every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.studies.baselines import Exchange
from benchmarks.studies.tasks import Task
from horovod_sparse.feedback import Recipe, kind_of, recipe_for
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import SparseSum
from horovod_sparse.telemetry import BucketStep


@dataclass
class Trace:
    """Records every step of a training.

    Attributes:
        counts: elements of the union.
        imbalance: f(t), ExDyna Eq. (5); NaN where the algorithm does not tell.
        thresholds: of rank 0; NaN where the algorithm does not tell.
        global_error: ExDyna Eq. (1), of what the ranks held back when the step began.
        losses: mean over ranks, of the training batches.
        num_elements: n.
        bytes_per_step: sent by rank 0, on average.
        score: of the trained model on the test data (see `Task.score`).
        steps: done before a score was taken on the way.
        scores: as many.
    """

    num_elements: int
    counts: list[int] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    thresholds: list[float] = field(default_factory=list)
    global_error: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bytes_per_step: float = math.nan
    score: float = math.nan
    steps: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


def train(
    task: Task,
    recipe: Recipe,
    *,
    size: int,
    num_steps: int,
    learning_rate_at: Callable[[int], float],
    seed: int = 0,
    score_every: int = 0,
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    edit: Callable[[torch.Tensor], None] | None = None,
    exchange: Callable[[list[torch.Size]], Exchange] | None = None,
) -> Trace:
    """Trains with sparsified gradients.

    All ranks hold the same model, so one model computes their gradients, one after the other, each from
    its own share of the data. The synchronized sum is applied by plain or momentum SGD, as the task says,
    or by another optimizer; or subtracted as it is, where ranks' own steps are synchronized.

    Args:
        task: model and data.
        recipe: what every rank does with its gradient.
        size: P.
        num_steps: steps.
        learning_rate_at: rate of every step (from 0); error feedback is told, too.
        seed: of the model's start and of the order of the data.
        score_every: steps from one score on the way to the next; 0 for none.
        make_optimizer: makes another optimizer than the task's SGD; its rate is set in every step.
        edit: called with the averaged gradient, [n], which it may change, before a step.
        exchange: made for the parameters' shapes, in place of the recipe; a trace then has losses, bytes
            and the score alone.
    """
    torch.manual_seed(seed)
    model = task.make_model()
    # backward order, as the buckets of the PyTorch front end
    parameters = list(model.parameters())[::-1]
    trace = Trace(sum(parameter.numel() for parameter in parameters))
    if make_optimizer is None:
        make_optimizer = partial(torch.optim.SGD, lr=1.0, momentum=task.momentum)
    optimizer = make_optimizer(parameters)
    if makes_steps := recipe.feedback.applies_rate:
        recipe = recipe_for(optimizer, recipe)
    cluster = SimulatedCluster(recipe, trace.num_elements, size)
    flat = torch.zeros(trace.num_elements)
    views = [
        part.view_as(parameter)
        for part, parameter in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)
    ]
    swap = None if exchange is None else exchange([parameter.shape for parameter in parameters])
    streams = [task.batches(rank, size, num_steps, seed) for rank in range(size)]
    num_bytes = 0.0

    def note_score(step: int) -> None:
        trace.steps.append(step)
        trace.scores.append(round(task.score(model), 4))

    for step in range(num_steps):
        if score_every and step % score_every == 0:
            note_score(step)
        rate = learning_rate_at(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if makes_steps:
            rule: Any = recipe.feedback
            steps = [rule.own_step(kind_of(optimizer), group, step) for group in optimizer.param_groups]
            now = steps[0]
            for bucket in cluster.buckets:
                bucket.feedback = now.feedback
        gradients, losses = [], []
        for stream in streams:
            loss = task.loss(model, *next(stream))
            parts = torch.autograd.grad(loss, parameters)
            gradient = torch.cat([part.reshape(-1) for part in parts])
            if makes_steps:
                own, decay = now.weights
                gradient = own * gradient + decay * torch.cat(
                    [one.detach().reshape(-1) for one in parameters]
                )
            gradients.append(gradient.numpy())
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
            edit(flat)
        if makes_steps:
            for own_step, group in zip(steps, optimizer.param_groups, strict=True):
                for parameter in group["params"]:
                    parameter.data.mul_(own_step.shrink)
        for parameter, view in zip(parameters, views, strict=True):
            if makes_steps:
                parameter.data.sub_(view)
            else:
                parameter.grad = view
        if not makes_steps:
            optimizer.step()
        trace.losses.append(float(np.mean(losses)))
    if score_every:
        note_score(num_steps)
    num_bytes += sum(sent[0] for sent in cluster.recorder.bytes_sent)
    trace.bytes_per_step = num_bytes / num_steps
    trace.score = task.score(model)
    return trace


def _note(trace: Trace, last: BucketStep, sum_: SparseSum) -> None:
    is_sent = np.zeros(trace.num_elements, bool)
    is_sent[sum_.indices] = True
    trace.counts.append(int(np.count_nonzero(is_sent)))
    trace.imbalance.append(last.facts.get("imbalance", math.nan))
    trace.thresholds.append(last.facts.get("threshold", math.nan))
    trace.global_error.append(last.global_error)
