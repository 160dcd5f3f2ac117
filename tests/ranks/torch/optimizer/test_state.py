"""Checkpoints of our DistributedOptimizer: exact resume, other plans, sizes and models."""

from __future__ import annotations

import io

import pytest
import torch

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.merging import Plan
from horovod_sparse.sparsifiers.schedule import Exponential
from horovod_sparse.torch import Compression
from support.dyadic import gradients_for
from support.linear import LinearModel, same_on_all_ranks
from support.optimizers import make, residuals_of, train_step

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11)}
gradients = gradients_for(SHAPES)


def through_a_file(saved):
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("how", ["replan", "plan", "size"])
def test_schedules_go_on_where_sparsifiers_start_anew(how, rank):
    """Steps count the training, not the plan; random-k's positions hang on them, and agree on all ranks."""
    schedule = Exponential(steps=8, start=0.5)
    made = Compression.randomk(density=0.01, schedule=schedule, feedback="error(scale_residual=true)")
    model, other = LinearModel(SHAPES), Plan((("first", "second"),), ("bias",))
    optimizer = make(model, made, bucket_bytes=700)
    for step in range(5):
        optimizer.param_groups[0]["lr"] = 0.5 ** (1 + step // 3)
        train_step(model, optimizer, gradients(rank, step))
    if how == "replan":
        optimizer.replan(other)
    else:
        saved = through_a_file(optimizer.state_dict())
        plan = {"plan": other} if how == "plan" else {"bucket_bytes": 700}
        weights, model = model.state_dict(), LinearModel(SHAPES)
        model.load_state_dict(weights)
        optimizer = make(model, made, **plan)
        optimizer.load_state_dict(saved if how == "plan" else changed(saved, resized=True))
    assert optimizer.state_dict()["horovod_sparse"]["buckets"][0]["scale"] == 2.0
    optimizer.param_groups[0]["lr"] = 0.125
    for step in (5, 6):
        train_step(model, optimizer, gradients(rank, step))
        asked = [
            (report.step.num_elements, report.step.num_target)
            for report in optimizer.telemetry.last.buckets
            if report.step.num_target < report.step.num_elements
        ]
        assert asked == [(n, max(1, round(schedule.density_at(step, 0.01) * n))) for n, _ in asked]
    assert asked
    assert same_on_all_ranks(*[parameter.detach() for parameter in model.parameters()])
    buckets = optimizer.state_dict()["horovod_sparse"]["buckets"]
    assert [(bucket["state"]["step"], bucket["scale"]) for bucket in buckets] == [(7, 4.0)] * len(buckets)


def test_a_plain_optimizer_loads_it_and_passes_over_the_entry(rank):
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1")
    train_step(model, optimizer, gradients(rank, 0))
    saved = optimizer.state_dict()
    plain = torch.optim.SGD(model.parameters(), lr=9.0)
    plain.load_state_dict(saved)
    assert plain.param_groups[0]["lr"] == 0.5
    optimizer.load_state_dict(plain.state_dict())  # of a dense run: nothing is held back
    assert not any(values.count_nonzero() for values in residuals_of(optimizer).values())
    assert optimizer.telemetry.last.step == 1


def test_in_the_middle_of_a_step_loading_gives_it_up(rank):
    model = LinearModel(SHAPES)
    optimizer = make(model, "exdyna:density=0.1", bucket_bytes=700)
    train_step(model, optimizer, gradients(rank, 0))
    saved = through_a_file(optimizer.state_dict())
    expected = train_step(model, optimizer, gradients(rank, 1))
    # on one rank a bucket is under way, on the others none
    names = ("bias", "second") if rank == 0 else ("bias",)
    model.backward({name: gradients(rank, 5)[name] for name in names})
    if rank == 0:
        with pytest.raises(UnsupportedError, match="between steps"):
            optimizer.state_dict()
    optimizer.load_state_dict(saved)
    found = train_step(model, optimizer, gradients(rank, 1))
    assert all(torch.equal(found[name], expected[name]) for name in SHAPES)


def changed(saved, **entry):
    return saved | {"horovod_sparse": saved["horovod_sparse"] | entry}
