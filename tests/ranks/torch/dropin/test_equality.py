"""Stock DistributedOptimizer with a sparsifier equals the simulator and, at density 1, dense training."""

from __future__ import annotations

import dataclasses

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.torch import Compression, SparseCompressor
from support.dyadic import gradients_for
from support.linear import LinearModel

pytestmark = pytest.mark.filterwarnings("ignore:Parameter `num_groups`:DeprecationWarning")

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11), "one": (1,)}
gradients = gradients_for(SHAPES)


def wrapped(model: LinearModel, compression, **arguments):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, **arguments
    )


def synchronized(model: LinearModel, optimizer) -> dict[str, torch.Tensor]:
    """The synchronized gradients; steps the optimizer."""
    optimizer.synchronize()
    result = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    return result


GROUPS = {
    "alone": lambda model: {},
    "num_groups": lambda model: {"num_groups": 2},
    "lists": lambda model: {"groups": [[model.first, model.bias], [model.second]]},
}


@pytest.mark.parametrize("grouped", GROUPS)
def test_density_one_equals_dense(grouped, rank):
    """Bit for bit, since these sums are exact in any order and averages round once."""
    for op, factor in [(hvd.Sum, 1.0), (hvd.Average, 1.0), (hvd.Average, 4.0)]:
        if grouped != "alone" and factor != 1.0:
            continue  # Horovod's grouped path ignores the factor
        results = []
        for compression in (Compression.none, Compression.parse("exdyna:density=1.0")):
            model = LinearModel(SHAPES)
            arguments = {"op": op, **GROUPS[grouped](model)}
            if factor != 1.0:
                arguments["gradient_predivide_factor"] = factor
            optimizer = wrapped(model, compression, **arguments)
            steps = []
            for step in range(3):
                model.backward(gradients(rank, step))
                steps.append(synchronized(model, optimizer))
            results.append(steps)
        for dense, sparse in zip(*results, strict=True):
            for name in SHAPES:
                assert torch.equal(sparse[name], dense[name]), (name, op, factor)


@pytest.mark.parametrize("grouped", ["alone", "num_groups"])
def test_backward_passes_per_step_accumulate_first(grouped, rank, size):
    """Two passes are one gradient: what a single pass with their sum gives."""
    results = []
    for passes in (1, 2):
        model = LinearModel(SHAPES)
        optimizer = wrapped(
            model,
            Compression.exdyna(density=0.1),
            op=hvd.Sum,
            backward_passes_per_step=passes,
            **GROUPS[grouped](model),
        )
        steps = []
        for step in range(4):
            one, two = gradients(rank, 2 * step), gradients(rank, 2 * step + 1)
            if passes == 2:
                model.backward(one)
                model.backward(two)
            else:
                model.backward({name: one[name] + two[name] for name in one})
            steps.append(synchronized(model, optimizer))
        results.append(steps)
    for single, double in zip(*results, strict=True):
        for name in SHAPES:
            assert torch.equal(single[name], double[name]), name
    assert any(tensor.count_nonzero() for tensor in results[0][0].values())


def test_the_learning_rate_of_the_group_reaches_the_feedback(rank, size):
    """When the rate halves, residuals double (the papers' form); the simulator is told the same rate."""
    unscaled = Compression.topk(density=0.1).recipe
    scaled = dataclasses.replace(
        unscaled, feedback=dataclasses.replace(unscaled.feedback, scale_residual=True)
    )
    sums = {}
    for key, one in (("scaled", scaled), ("unscaled", unscaled)):
        model = LinearModel(SHAPES)
        optimizer = wrapped(model, SparseCompressor(one), op=hvd.Sum)
        cluster = SimulatedCluster(one, 1200, size, name="first")
        for step, rate in enumerate([0.5, 0.25, 0.25]):
            optimizer.param_groups[0]["lr"] = rate
            model.backward(gradients(rank, step))
            sums[key] = synchronized(model, optimizer)["first"].reshape(-1)
            inputs = [gradients(r, step)["first"].reshape(-1).astype(np.float32) for r in range(size)]
            np.testing.assert_array_equal(sums[key].numpy(), cluster.step(inputs, rate))
    assert not torch.equal(sums["scaled"], sums["unscaled"])
