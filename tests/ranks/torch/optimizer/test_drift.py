"""Ranks whose parameters or optimizer state come apart: found, named, and mended where that is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import DriftError
from support.linear import LinearModel, dyadic, same_on_all_ranks
from support.optimizers import wrapped

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11)}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
}


def made(name: str = "sgd", dtype: Any = torch.float32, **arguments: Any) -> tuple[LinearModel, Any]:
    model = LinearModel(SHAPES, dtype)
    arguments = {"compression": "topk:density=0.1", "check_every": 3, **arguments}
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[name](model.parameters()), model.named_parameters(), **arguments
    )
    return model, optimizer


def stepped(model: LinearModel, optimizer: Any, rank: int, steps: Any) -> None:
    for step in steps:
        model.backward({name: dyadic(shape, rank, step, name) for name, shape in SHAPES.items()})
        optimizer.step()
        optimizer.zero_grad()


def drifted(model: LinearModel, optimizer: Any, what: str) -> None:
    """Changes one thing on the rank that calls."""
    with torch.no_grad():
        if what == "parameter":
            model.second[1, 2, 3] += 1e-6
        elif what == "state":
            state = optimizer.state[model.bias]
            next(value for value in state.values() if torch.is_tensor(value) and value.dim())[3] += 1.0
        elif what == "step":
            optimizer.state[model.bias]["step"] += 1
        else:
            optimizer.param_groups[0]["lr"] *= 1.5


#: what changes, with which optimizer, what the error says; a rate changes parameters in the same step
CASES = [
    ("state", "sgd", "(momentum_buffer of )?bias differs"),
    ("state", "adam", "(exp_avg of )?bias differs"),
    ("step", "adam", "bias differs"),
    ("rate", "sgd", "differs: .*lr of group 0"),
]


@pytest.mark.parametrize(("what", "name", "words"), CASES)
def test_what_differs_is_named_with_its_ranks_or_made_what_rank_0_has(rank, size, what, name, words):
    strict, mended, twin = (made(name, on_drift=policy) for policy in ("raise", "resync", "raise"))
    for one in (strict, mended, twin):
        stepped(*one, rank, range(4))
    if rank == size - 1:
        drifted(*strict, what)
        drifted(*mended, what)
    stepped(*strict, rank, [4])
    with pytest.raises(DriftError, match=words) as caught:
        stepped(*strict, rank, [5])
    assert "after step 6" in str(caught.value)
    assert f"ranks [{size - 1}]" in str(caught.value)
    stepped(*mended, rank, range(4, 8))
    stepped(*twin, rank, range(4, 8))
    model, optimizer = mended
    assert optimizer.telemetry.num_drifts == 1
    rates = hvd.allgather_object(optimizer.param_groups[0]["lr"])
    assert len(set(rates)) == 1
    state = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    assert same_on_all_ranks(*model.parameters(), *state)
    # rank 0 had not drifted but for what the others have sent it
    if rank == 0:
        assert all(torch.equal(p, t) for p, t in zip(model.parameters(), twin[0].parameters(), strict=True))


@pytest.mark.parametrize("policy", ["raise", "resync"])
def test_behind_horovods_own_optimizer_the_environment_asks(rank, size, policy, monkeypatch):
    monkeypatch.setenv("HOROVOD_SPARSE_CHECK_EVERY", "3")
    monkeypatch.setenv("HOROVOD_SPARSE_ON_DRIFT", policy)
    model = LinearModel(SHAPES)
    optimizer = wrapped("stock", model, "topk:density=0.1")
    stepped(model, optimizer, rank, range(4))
    if rank == size - 1:
        drifted(model, optimizer, "parameter")
    stepped(model, optimizer, rank, [4])
    if policy == "raise":
        with pytest.raises(DriftError, match="after step 6 second differs"):
            stepped(model, optimizer, rank, [5])
    else:
        stepped(model, optimizer, rank, [5])
        assert same_on_all_ranks(*model.parameters())


def test_statistics_of_batches_and_frozen_layers_are_each_ranks_own(rank, size):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)]
    model = torch.nn.Sequential(*layers).to(memory_format=torch.contiguous_format)
    model[0].weight.requires_grad_(False)
    if rank:
        model[0].weight.data.add_(1.0)  # in no optimizer, and so nobody's matter
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(trained), compression="exdyna:density=0.3", check_every=1
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not same_on_all_ranks(model[1].running_mean)


def test_what_ranks_begin_or_go_on_with_is_compared_after_the_next_step(rank):
    """By default, long before `check_every` steps: a model that nobody has broadcast, a state of one rank."""
    model, optimizer = made(check_every=None)
    if rank:
        model.get_parameter("second").data.add_(1e-3)
    with pytest.raises(DriftError, match="after step 1 second differs"):
        stepped(model, optimizer, rank, [0])
    model, optimizer = made(check_every=None)
    stepped(model, optimizer, rank, range(3))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] *= 1 + rank
    optimizer.load_state_dict(saved)
    with pytest.raises(DriftError, match=r"after step 4 .*lr of group 0"):
        stepped(model, optimizer, rank, [3])


@pytest.mark.controllers
def test_some_ranks_alone_compare_among_themselves(rank, size, process_set):
    if size < 3:
        pytest.skip("needs three ranks")
    some = process_set([0, size - 1])
    model, optimizer = made(process_set=some)
    if rank == size - 1:
        drifted(model, optimizer, "parameter")
    if rank not in (0, size - 1):
        stepped(model, optimizer, rank, range(4))
        return
    with pytest.raises(DriftError, match=r"ranks \[0\] have .*, ranks \[1\]"):
        stepped(model, optimizer, rank, range(4))
