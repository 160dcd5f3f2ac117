"""All ranks save to a folder and go on from it: the same bits, other plans, sizes and models."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import horovod.torch as stock
import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import (
    ArgumentError,
    CheckpointError,
    HorovodSparseError,
    StateMismatchError,
    UnsupportedError,
)
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.training.checkpoint_folder import write_checkpoint
from support.linear import LinearModel, dyadic, same_on_all_ranks
from support.optimizers import make, residuals_of, train_step

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11)}


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    return {name: dyadic(shape, rank, step, name) for name, shape in SHAPES.items()}


@pytest.fixture
def folder(rank):
    """The same on all ranks."""
    made = tempfile.mkdtemp() if rank == 0 else None
    return Path(stock.broadcast_object(made, 0, name="folder"))


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
    model = LinearModel(SHAPES, dtypes)
    optimizer = wrap(model, recipe)
    for step in range(6):
        if step == 3:
            assert hvd.save(folder, optimizer, model=model) == 3
        train_step(model, optimizer, gradients(rank, step))
    expected = everything(model, optimizer)
    model = LinearModel(SHAPES, dtypes)
    optimizer = wrap(model, recipe)
    assert hvd.load(folder, optimizer, model=model) == 3
    for step in range(3, 6):
        train_step(model, optimizer, gradients(rank, step))
    assert all(torch.equal(*pair) for pair in zip(everything(model, optimizer), expected, strict=True))
    assert optimizer.telemetry.last.step == 6


def test_the_last_ones_stay_and_one_is_chosen_by_its_step(folder, rank):
    model = LinearModel(SHAPES)
    optimizer = make(model, "exdyna:density=0.1")
    held = {}
    for step in range(4):
        train_step(model, optimizer, gradients(rank, step))
        hvd.save(folder, optimizer, keep=2)
        held[step + 1] = residuals_of(optimizer)
    assert hvd.load(folder, optimizer, step=3) == 3
    assert all(torch.equal(values, held[3][name]) for name, values in residuals_of(optimizer).items())
    with pytest.raises(CheckpointError, match="of step 1"):
        hvd.load(folder, optimizer, step=1)
    with pytest.raises(ArgumentError, match="keep=0"):
        hvd.save(folder, optimizer, keep=0)


@pytest.mark.controllers
def test_another_number_of_ranks_keeps_the_mean(folder, rank, size):
    """Of one rank more, as all of them would have written it: this rank writes every file."""
    model = LinearModel(SHAPES)
    optimizer = make(model, "exdyna:density=0.1")
    train_step(model, optimizer, gradients(rank, 0))
    hvd.save(folder / "own", optimizer, model=model)
    entry = optimizer.state_dict()["horovod_sparse"]
    old = [
        {name: dyadic(shape, other, name).astype(np.float32) for name, shape in SHAPES.items()}
        for other in range(size + 1)
    ]
    if rank == 0:
        (group,) = optimizer.state_dict()["param_groups"]
        training = {"optimizer": {"state": {}, "param_groups": [{**group, "lr": 0.25}]}}
        plain = {**entry, "buckets": [dict(one) for one in entry["buckets"]], "training": training}
        for one in plain["buckets"]:
            one["state"] = {"step": 1}
        entries = [
            {**plain, "rank": other, "size": size + 1, "residuals": old[other]} for other in range(size + 1)
        ]
        ranks = [
            write_checkpoint(folder / "other", entries[other], step=1, digest="d", rank=other, keep=1)
            for other in range(size + 1)
        ]
        run_lockstep(ranks)
    stock.barrier()
    assert hvd.load(folder / "other", optimizer) == 1
    assert optimizer.param_groups[0]["lr"] == 0.25
    for name, values in residuals_of(optimizer).items():
        mean = stock.allreduce(values, op=stock.Average, name=f"mean.{name}")
        expected = np.mean([other[name] for other in old], axis=0)
        np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-6, atol=1e-6)
    train_step(model, optimizer, gradients(rank, 1))
    assert same_on_all_ranks(*model.parameters())


def test_what_is_wrong_on_one_rank_is_an_error_on_all(folder, rank, size):
    model = LinearModel(SHAPES)
    optimizer = make(model, "exdyna:density=0.1", bucket_bytes=700)
    for step in range(2):
        train_step(model, optimizer, gradients(rank, step))
    hvd.save(folder, optimizer, model=model)
    before = everything(model, optimizer)

    other = LinearModel({**SHAPES, "bias": (8 if rank == size - 1 else 7,)})
    with pytest.raises(StateMismatchError, match="bias"):
        hvd.load(folder, make(other, "exdyna:density=0.1"), model=other)
    with pytest.raises(StateMismatchError, match="micro"):
        hvd.load(folder, make(LinearModel(SHAPES), "micro:density=0.1"))
    groups = adam if rank == 0 else make
    fresh = LinearModel(SHAPES)
    with pytest.raises(StateMismatchError, match="param_groups"):
        hvd.load(folder, groups(fresh, "exdyna:density=0.1"), model=fresh)
    assert all((p == 1).all() for p in fresh.parameters())

    optimizer._synchronizer.step += rank
    with pytest.raises(StateMismatchError, match="different states"):
        hvd.save(folder, optimizer)
    optimizer._synchronizer.step -= rank
    names = ("bias",) if rank else ("bias", "second")  # of which one bucket is under way
    model.backward({name: gradients(rank, 5)[name] for name in names})
    with pytest.raises(HorovodSparseError, match="between steps") as error:
        hvd.save(folder, optimizer)
    assert isinstance(error.value, UnsupportedError)
    hvd.load(folder, optimizer, model=model)  # gives the step up
    assert all(torch.equal(*pair) for pair in zip(everything(model, optimizer), before, strict=True))
    with pytest.raises(ArgumentError, match="sparsifier"):
        hvd.save(folder, make(LinearModel(SHAPES), hvd.Compression.none))


def test_files_of_different_steps_are_refused(folder, rank, size):
    """A file of an earlier step among the others; and a folder that a rank does not see."""
    model = LinearModel(SHAPES)
    optimizer = make(model, "exdyna:density=0.1")
    for step in range(2):
        train_step(model, optimizer, gradients(rank, step))
        hvd.save(folder, optimizer)
    before = residuals_of(optimizer)
    if rank == 0:
        older, newer = sorted(path for path in folder.iterdir() if path.name.startswith("step-"))
        mixed = newer / f"rank-{size - 1:05d}.npz"
        mixed.write_bytes((older / mixed.name).read_bytes())
        assert json.loads((newer / "manifest.json").read_text())["step"] == 2
    stock.barrier()
    with pytest.raises(CheckpointError, match=r"step-0000000002.*rank-|on rank"):
        hvd.load(folder, optimizer)
    assert all(torch.equal(values, before[name]) for name, values in residuals_of(optimizer).items())
    assert hvd.load(folder, optimizer, step=1) == 1
    with pytest.raises(CheckpointError, match="see"):
        hvd.load(folder if rank == 0 else folder / "elsewhere", optimizer, step=1)
