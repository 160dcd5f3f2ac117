"""Momentum correction, the low-pass filter, clipping and rules under real ranks, with both faces."""

from __future__ import annotations

import horovod.torch as stock
import numpy as np
import pytest
import torch

from horovod_sparse.errors import ArgumentError, StateMismatchError
from horovod_sparse.feedback import MomentumCorrection
from horovod_sparse.merging import Plan
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.torch import Compression
from support.dyadic import gradients_for
from support.linear import LinearModel, same_on_all_ranks
from support.optimizers import flat, in_bucket_order, make, residuals_of, train_step

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11), "scale": (5,)}
_TEXT = "dgc:density=0.1,feedback=momentum(momentum=0.5),dense=('bias','scale'),densities={'first':0.02}"
gradients = gradients_for(SHAPES)


def drop_in(model: LinearModel, compression):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return stock.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, op=stock.Sum
    )


def simulated(names, number: int | None, made, size: int) -> SimulatedCluster:
    """The bucket as it is in our optimizer (with its number), or in the drop-in."""
    name = names[0] if number is None else f"bucket{number}.{names[0]}"
    n = sum(int(np.prod(SHAPES[item])) for item in names)
    return SimulatedCluster(made.for_parameter(names[0], int(np.prod(SHAPES[names[0]]))), n, size, name=name)


@pytest.mark.parametrize("face", ["drop-in", "own"])
def test_both_faces_do_what_the_simulator_does(face, rank, size):
    compression = Compression.parse(_TEXT)
    model = LinearModel(SHAPES)
    if face == "own":
        optimizer = make(model, compression, op=stock.Sum)
        assert sorted(map(sorted, optimizer.plan.buckets)) == [["bias", "scale"], ["first"], ["second"]]
        buckets = [(names, number) for number, names in enumerate(optimizer.plan.buckets)]
    else:
        optimizer = drop_in(model, compression)
        buckets = [((name,), None) for name in SHAPES]
    clusters = {names: simulated(names, number, compression.recipe, size) for names, number in buckets}
    for step in range(5):
        found = train_step(model, optimizer, gradients(rank, step))
        assert same_on_all_ranks(*found.values())
        for names, cluster in clusters.items():
            inputs = [in_bucket_order(gradients(r, step), names) for r in range(size)]
            np.testing.assert_array_equal(flat(found, names), cluster.step(inputs, 0.5))
    if face == "own":
        assert not residuals_of(optimizer)["bias"].count_nonzero(), "dense ones hold nothing back"


def test_dense_parameters_train_with_momentum(rank, size):
    """A plan's dense ones and a rule's: what momentum SGD does with the sum over ranks."""
    for arguments in (
        {"plan": Plan((("second", "first"),), ("bias", "scale"))},
        {"compression": "topk:density=0.1,feedback=momentum(momentum=0.5),dense_below=10"},
    ):
        text = arguments.pop("compression", "topk:density=0.1,feedback=momentum(momentum=0.5)")
        model = LinearModel(SHAPES)
        optimizer = make(model, text, op=stock.Sum, **arguments)
        velocity = {"bias": 0.0, "scale": 0.0}
        for step in range(4):
            found = train_step(model, optimizer, gradients(rank, step))
            for name in velocity:
                total = sum(gradients(r, step)[name] for r in range(size))
                velocity[name] = 0.5 * velocity[name] + total
                np.testing.assert_array_equal(found[name].numpy(), np.asarray(velocity[name], np.float32))


@pytest.mark.parametrize("face", ["drop-in", "own"])
def test_momentum_twice_is_refused(face, rank):
    import horovod_sparse.torch as hvd

    model, library = LinearModel(SHAPES), hvd if face == "own" else stock
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    compression = Compression.dgc(density=0.1, feedback=MomentumCorrection(momentum=0.9))
    with pytest.raises(ArgumentError, match=r"momentum=0.9.*momentum=0 to the optimizer"):
        library.DistributedOptimizer(optimizer, model.named_parameters(), compression)


@pytest.mark.parametrize("how", ["a loaded checkpoint", "a schedule"])
@pytest.mark.parametrize("face", ["drop-in", "own"])
def test_momentum_that_comes_later_is_refused_too(face, how, rank):
    model, text = LinearModel(SHAPES), "dgc:density=0.1,feedback=momentum"
    optimizer = (
        make(model, text, bucket_bytes=700) if face == "own" else drop_in(model, Compression.parse(text))
    )
    train_step(model, optimizer, gradients(rank, 0))
    if how == "a schedule":
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10)
    else:
        optimizer.load_state_dict(torch.optim.SGD(LinearModel(SHAPES).parameters(), 0.5, 0.9).state_dict())
    with pytest.raises(ArgumentError, match="momentum=0 to the optimizer"):
        model.backward(gradients(rank, 1))
        optimizer.step()
    if face == "drop-in":
        return  # stock Horovod takes nothing back of a backward pass that has failed
    optimizer.param_groups[0]["momentum"] = 0
    train_step(model, optimizer, gradients(rank, 2))
    assert same_on_all_ranks(*model.parameters())


def test_a_checkpoint_of_another_feedback_is_refused(rank):
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1,feedback=momentum")
    train_step(model, optimizer, gradients(rank, 0))
    saved = optimizer.state_dict()
    other = make(LinearModel(SHAPES), "topk:density=0.1")
    with pytest.raises(StateMismatchError, match="feedback"):
        other.load_state_dict(saved)
