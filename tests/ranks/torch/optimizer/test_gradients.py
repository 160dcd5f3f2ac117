"""What stands in a parameter's gradient is what is synchronized, wherever its memory is."""

import horovod.torch as stock
import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.merging import Plan
from support.linear import same_on_all_ranks
from support.optimizers import residuals_of
from support.sampling import rows_by


def model_of(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(36, 5)
    )


def by_half(model):
    model.half()
    model.float()


def replace_parameters(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


#: what users do to a model between steps, or between the passes of one
MOVES = {
    "half and float": by_half,
    "shared memory": lambda model: model.share_memory(),
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
    "p.data": replace_parameters,
    "no gradients": lambda model: model.zero_grad(set_to_none=True),
}


def reference(move: str):
    """The same for stock Horovod, which takes contiguous gradients alone; an order changes no sum."""
    return (lambda model: None) if move == "channels last" else MOVES[move]


def _wrapped(model, compression, wrap=hvd, **more):
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    return wrap.DistributedOptimizer(base, model.named_parameters(), compression=compression, **more)


TOPK = "topk:density=1.0"
SPLIT = Plan((("0.weight", "0.bias"),), ("3.weight", "3.bias"))
#: each gives an optimizer for a model
OURS = {
    "stock": lambda model: _wrapped(model, stock.Compression.none, stock),
    "own": lambda model: _wrapped(model, TOPK),
    "own, small buckets": lambda model: _wrapped(model, TOPK, bucket_bytes=500),
    "own, dense": lambda model: _wrapped(model, TOPK, plan=SPLIT),
    "drop-in": lambda model: _wrapped(model, hvd.Compression.parse(TOPK), stock),
    "drop-in, groups": lambda model: _wrapped(model, hvd.Compression.parse(TOPK), stock, groups=2),
}


def train(name: str, move, rank: int, within: bool = False) -> list[torch.Tensor]:
    """Weights after 6 steps: between which, or within which, the model moves."""
    model = model_of()
    optimizer = OURS[name](model)
    data = torch.randn(6, 4, 3, 5, 5, generator=torch.Generator().manual_seed(rank))
    for step in range(6):
        optimizer.zero_grad()
        model(data[step]).square().mean().backward()
        if within:
            move(model)
        optimizer.step()
        if not within and step % 2 == 0:
            move(model)
    return [parameter.detach().clone().contiguous() for parameter in model.parameters()]


def check(found, expected) -> None:
    assert same_on_all_ranks(*found)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@rows_by("move,name", MOVES, list(OURS)[1:], each=2)
def test_gradients_are_found_wherever_their_memory_is(move, name, rank):
    check(train(name, MOVES[move], rank), train("stock", reference(move), rank))


@pytest.mark.parametrize("name", ["own", "own, small buckets", "own, dense"])
@pytest.mark.parametrize("move", ["shared memory", "channels last", "p.data"])
def test_the_sum_arrives_though_gradients_move_before_the_step(move, name, rank):
    # stock Horovod is summing up in the gradients' own memory by then: it must stay
    check(train(name, MOVES[move], rank, within=True), train("stock", lambda model: None, rank))


def test_residuals_follow_a_model_that_changes_its_layout(rank):
    model = model_of()
    optimizer = _wrapped(model, "topk:density=0.05")
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
    optimizer = _wrapped(model, TOPK)
    model[3].double()
    with pytest.raises(UnsupportedError, match=r"3\.(weight|bias) was torch.float32 .* torch.float64"):
        model[3](torch.randn(4, 36, dtype=torch.float64)).square().mean().backward()
    model[3].float()
    model.zero_grad()
    model(torch.randn(4, 3, 5, 5)).square().mean().backward()
    optimizer.step()
