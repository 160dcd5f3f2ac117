"""Loops that users write: everything sent, they come to what a dense allreduce of every gradient comes to."""

from __future__ import annotations

import shutil

import horovod.torch as stock
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import horovod_sparse.torch as hvd
from support.linear import same_on_all_ranks
from support.sampling import rest_nightly

STEPS = 4


class Tied(torch.nn.Module):
    """The output layer has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = torch.nn.Embedding(11, 5), torch.nn.Linear(5, 11)
        self.output.weight = self.embedding.weight

    def forward(self, words, rank):
        return torch.log_softmax(self.output(self.embedding(words)), -1).square().mean()


class Branches(torch.nn.Module):
    """Every rank uses another one of two layers; one is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.nobody = torch.nn.Linear(3, 6), torch.nn.Linear(2, 2)
        self.branches = torch.nn.ModuleList([torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)])

    def forward(self, words, rank):
        hidden = torch.relu(self.shared(words[:, None].float() / 10 + torch.arange(3)))
        return self.branches[rank % 2](hidden).square().mean()


class Checkpointed(torch.nn.Module):
    """The hidden layers are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.reentrant = torch.nn.Linear(1, 8), reentrant
        self.hidden = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    def forward(self, words, rank):
        inputs = self.first(words[:, None].float())
        return checkpoint(self.hidden, inputs, use_reentrant=self.reentrant).square().mean()


MODELS = {
    "tied weights": Tied,
    "parameters unused on some ranks": Branches,
    "gradient checkpointing": lambda: Checkpointed(False),
    "reentrant checkpointing": lambda: Checkpointed(True),
}


def words_of(rank: int, step: int) -> torch.Tensor:
    return (torch.arange(6) * (3 + rank) + step) % 11


def trained(make, backend: str | None, rank: int, wrap) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = make()
    run = model if backend is None else torch.compile(model, backend=backend)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(STEPS):
        run(words_of(rank, step), rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def densely(optimizer, model):
    """Every gradient is averaged by Horovod's allreduce; None counts as zeros."""
    inner = optimizer.step

    def step():
        for name, parameter in model.named_parameters():
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = stock.allreduce(own, op=stock.Average, name=f"dense.{name}")
        inner()

    optimizer.step = step
    return optimizer


def sparsely(optimizer, model):
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), hvd.Compression.topk(density=1.0))


@pytest.mark.parametrize("backend", rest_nightly([None, "aot_eager", "inductor"], [None]))
@pytest.mark.parametrize("name", MODELS)
def test_it_is_dense_training(name, backend, rank):
    if backend is not None and name == "reentrant checkpointing":
        pytest.skip("torch.compile itself asks for use_reentrant=False")
    if backend == "inductor" and (name != "tied weights" or shutil.which("g++") is None):
        pytest.skip("one model is enough where it takes so long, and none where there is no compiler")
    found = trained(MODELS[name], backend, rank, sparsely)
    expected = trained(MODELS[name], None, rank, densely)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert same_on_all_ranks(*found)
