"""A model that changes its layout keeps residuals, and one that changes its type is refused."""

import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.merging import Plan
from support.optimizers import residuals_of


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(36, 5)
    )


def wrapped(model, compression):
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    return hvd.DistributedOptimizer(base, model.named_parameters(), compression)


def test_residuals_follow_a_model_that_changes_its_layout(rank):
    model = model_of()
    optimizer = wrapped(model, "topk:density=0.05")
    model(torch.randn(4, 3, 5, 5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {name: values.clone() for name, values in residuals_of(optimizer).items()}
    assert any(values.count_nonzero() for values in before.values())
    model.to(memory_format=torch.channels_last)
    after = residuals_of(optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    optimizer.replan(Plan((tuple(sorted(before)),)))
    assert all(torch.equal(before[name], values) for name, values in residuals_of(optimizer).items())


def test_a_model_that_becomes_double_is_refused_by_name(rank):
    model = model_of()
    optimizer = wrapped(model, "topk:density=1.0")
    model[3].double()
    with pytest.raises(UnsupportedError, match=r"3\.(weight|bias) was torch.float32 .* torch.float64"):
        model[3](torch.randn(4, 36, dtype=torch.float64)).square().mean().backward()
    model[3].float()
    model.zero_grad()
    model(torch.randn(4, 3, 5, 5)).square().mean().backward()
    optimizer.step()
