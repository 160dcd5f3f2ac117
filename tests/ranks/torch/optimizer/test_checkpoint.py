"""All ranks save to a folder and go on from it: the same bits, other plans, sizes and models."""

import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import ArgumentError, HorovodSparseError, StateMismatchError, UnsupportedError
from support.dyadic import gradients_for
from support.linear import LinearModel
from support.optimizers import make, residuals_of, train_step

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11)}
gradients = gradients_for(SHAPES)


def adam(model, compression):
    optimizer = torch.optim.Adam([{"params": [p]} for p in model.parameters()], lr=0.5)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)


def everything(model, optimizer):
    return [p.detach().clone() for p in model.parameters()] + list(residuals_of(optimizer).values())


@pytest.mark.parametrize(
    ("recipe", "wrap"),
    [("exdyna:density=0.1", adam), ("topk:density=0.1,feedback=momentum(momentum=0.9)", make)],
)
def test_it_goes_on_bit_for_bit(recipe, wrap, folder, rank):
    dtypes = {"first": torch.float32, "bias": torch.bfloat16, "second": torch.float64}
    ends = []
    for first in (0, 3):
        model = LinearModel(SHAPES, dtypes)
        optimizer = wrap(model, recipe)
        assert first == 0 or hvd.load(folder, optimizer, model=model) == 3
        for step in range(first, 6):
            if step == 3 > first:
                assert hvd.save(folder, optimizer, model=model) == 3
            train_step(model, optimizer, gradients(rank, step))
        ends.append(everything(model, optimizer))
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))
    assert optimizer.telemetry.last.step == 6


def test_what_is_wrong_on_one_rank_is_an_error_on_all(folder, rank, size):
    model = LinearModel(SHAPES)
    optimizer = make(model, "exdyna:density=0.1", bucket_bytes=700)
    for step in range(2):
        train_step(model, optimizer, gradients(rank, step))
    hvd.save(folder, optimizer, model=model)
    before = everything(model, optimizer)
    fresh = LinearModel(SHAPES)
    base = torch.optim.Adam(fresh.parameters(), lr=0.5)
    with pytest.raises(StateMismatchError, match="another optimizer than Adam: it has no betas"):
        hvd.load(folder, hvd.DistributedOptimizer(base, fresh.named_parameters(), "exdyna:density=0.1"))
    other = LinearModel({**SHAPES, "bias": (8 if rank == size - 1 else 7,)})
    with pytest.raises(StateMismatchError, match="bias"):
        hvd.load(folder, make(other, "exdyna:density=0.1"), model=other)
    groups = adam if rank == 0 else make
    fresh = LinearModel(SHAPES)
    with pytest.raises(StateMismatchError, match="param_groups"):
        hvd.load(folder, groups(fresh, "exdyna:density=0.1"), model=fresh)
    assert all((p == 1).all() for p in fresh.parameters())

    names = ("bias",) if rank else ("bias", "second")  # of which one bucket is under way
    model.backward({name: gradients(rank, 5)[name] for name in names})
    with pytest.raises(HorovodSparseError, match="between steps") as error:
        hvd.save(folder, optimizer)
    assert isinstance(error.value, UnsupportedError)
    hvd.load(folder, optimizer, model=model)  # gives the step up
    assert all(torch.equal(*pair) for pair in zip(everything(model, optimizer), before, strict=True))
    with pytest.raises(ArgumentError, match="sparsifier"):
        hvd.save(folder, make(LinearModel(SHAPES), hvd.Compression.none))


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
