"""Ranks that do not stand alike when Horovod has started: a new worker, files that only some have loaded.

Within one launch Horovod cannot be started again reliably; what a start means to ranks that were there
before, that all agree anew, is said to them here. tests/elastic really starts it again.
"""

from __future__ import annotations

from typing import Any

import horovod.torch as stock
import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import StateMismatchError
from support.linear import LinearModel, dyadic, same_on_all_ranks

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11)}
ALGORITHMS = ["exdyna", "micro", "randomk", "cltk", "oktopk", "spardl"]


class Training:
    """A model, and an optimizer of ours or of Horovod's with our compressor."""

    def __init__(self, front: str, compression: str, **arguments: Any) -> None:
        self.model = LinearModel(SHAPES)
        self.compressor = hvd.Compression.parse(compression)
        self.own = front == "own"
        self.optimizer = (hvd if self.own else stock).DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.5),
            self.model.named_parameters(),
            compression=self.compressor,
            **arguments,
        )

    def forget_agreement(self) -> None:
        """As after a start of Horovod."""
        (self.optimizer._synchronizer if self.own else self.compressor)._agreed_under = None

    def held(self) -> np.ndarray:
        """The residual, of all parameters."""
        if self.own:
            found = self.optimizer.state_dict()["horovod_sparse"]["residuals"]
        else:
            found = {n: one["residual"] for n, one in self.compressor.state_dict()["parameters"].items()}
        zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        return np.concatenate([{**zeros, **found}[name].double().numpy().reshape(-1) for name in SHAPES])

    def steps(self) -> set[int]:
        """Of the sparsifiers' states."""
        if self.own:
            return {part.bucket.state.step for part in self.optimizer._synchronizer.sparse}
        saved = self.compressor.state_dict()["parameters"].values()
        return {one["sparsifier"]["step"] for one in saved}

    def step(self, rank: int, number: int) -> float:
        """One step; what law 1 lacks on some rank."""
        before, given = self.held(), {name: dyadic(SHAPES[name], rank, number, name) for name in SHAPES}
        self.model.backward(given)
        self.optimizer.synchronize()
        applied = np.concatenate([p.grad.double().numpy().reshape(-1) for p in self.model.parameters()])
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.optimizer.zero_grad()
        whole = before + np.concatenate([values.reshape(-1) for values in given.values()]) - self.held()
        return float(np.abs(hvd.allreduce(torch.from_numpy(whole), name="law").numpy() - applied).max())


@pytest.mark.parametrize("front", ["own", "stock"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_worker_is_replaced_by_another(rank, size, front, name):
    compression = f"{name}:density=0.1,schedule=exponential(steps=10,start=0.5)"
    training = Training(front, compression)
    for number in range(3):
        assert training.step(rank, number) < 1e-5
    if rank == size - 1:
        training = Training(front, compression)
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    training.forget_agreement()
    for number in range(3, 7):
        assert training.step(rank, number) < 1e-5
        assert same_on_all_ranks(*training.model.parameters())
        assert training.steps() == {number + 1}  # schedules go on


@pytest.mark.parametrize("front", ["own", "stock"])
def test_rank_0_alone_loads_a_checkpoint_before_the_first_step(rank, front):
    """And broadcasts model and optimizer, as Horovod's examples do."""
    saved = Training(front, "randomk:density=0.2")
    for number in range(3):
        saved.step(rank, number)
    training = Training(front, "randomk:density=0.2")
    if rank == 0:
        training.model.load_state_dict(saved.model.state_dict())
        training.optimizer.load_state_dict(saved.optimizer.state_dict())
        if front == "stock":
            training.compressor.load_state_dict(saved.compressor.state_dict())
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    for number in range(3, 6):
        assert training.step(rank, number) < 1e-5
        assert same_on_all_ranks(*training.model.parameters())
    assert training.steps() == {6}


@pytest.mark.parametrize("front", ["own", "stock"])
def test_ranks_resume_from_files_of_different_steps(rank, front):
    training = Training(front, "exdyna:density=0.1")
    kept: list[Any] = []
    for number in range(4):
        training.step(rank, number)
        source = training.optimizer if training.own else training.compressor
        kept.append(source.state_dict())
    weights = training.model.state_dict()
    training = Training(front, "exdyna:density=0.1")
    training.model.load_state_dict(weights)
    source = training.optimizer if training.own else training.compressor
    source.load_state_dict(kept[2 if rank == 0 else 3])
    for number in range(4, 7):
        assert training.step(rank, number) < 1e-5
    assert same_on_all_ranks(*training.model.parameters())
    assert training.steps() == {7}


@pytest.mark.parametrize("front", ["own", "stock"])
def test_ranks_that_sparsify_otherwise_are_refused_by_name(rank, front):
    training = Training(front, f"randomk:density=0.2,seed={rank}")
    with pytest.raises(StateMismatchError, match=r"compression differs: ranks \[0\] have randomk"):
        training.step(rank, 0)


def test_sum_on_one_rank_and_average_on_another_is_refused_by_name(rank):
    training = Training("own", "topk:density=0.2", op=hvd.Sum if rank == 0 else hvd.Average)
    with pytest.raises(StateMismatchError, match=r"op differs: ranks \[0\] have Sum"):
        training.step(rank, 0)
