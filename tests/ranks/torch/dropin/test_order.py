"""Ranks that fire hooks in different orders, use different parameters, or form process sets."""

from __future__ import annotations

import random

import horovod.torch as hvd
import pytest
import torch

from horovod_sparse.torch import Compression
from support.linear import LinearModel, dyadic, same_on_all_ranks

SHAPES = {f"layer{i}": (20 + 7 * i, 3) for i in range(12)}


def test_a_process_set_of_its_own_must_be_the_optimizers(rank, size, process_set):
    from horovod_sparse.errors import ArgumentError

    other = hvd.ProcessSet(list(range(size)))  # another object, unknown to Horovod
    model = LinearModel({"a": (4,)})
    with pytest.raises(ArgumentError, match="process_set"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5),
            named_parameters=model.named_parameters(),
            compression=Compression.topk(density=0.5, process_set=other),
        )


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_one_changed_line_is_enough(named, rank, size):
    """Neither the optimizer nor the compressor is told names; hooks are shuffled all the same."""
    model = LinearModel(SHAPES)
    compressor = Compression.exdyna(
        density=0.05, named_parameters=model.named_parameters() if named else None
    )
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), compression=compressor)
    shuffle = random.Random(rank)
    for step in range(10):
        order = list(SHAPES)
        shuffle.shuffle(order)
        model.backward({name: dyadic(SHAPES[name], rank, step, name) for name in SHAPES}, order)
        optimizer.step()
        optimizer.zero_grad()
    assert same_on_all_ranks(*model.parameters())
    names = set(compressor.state_dict()["residuals"])
    assert names == (set(SHAPES) if named else {f"allreduce.noname.0.{i}" for i in range(len(SHAPES))})


@pytest.mark.parametrize("as_dense", [True, False])
def test_a_layer_of_embeddings_is_sparsified_like_any_other(as_dense, rank, size):
    """Gradients in COO form, whatever Horovod's own optimizer would have made of them."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(30, 4, sparse=True)
    head = torch.nn.Linear(4, 1)
    named = [("embedding.weight", embedding.weight), *((f"head.{n}", p) for n, p in head.named_parameters())]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
        named_parameters=named,
        compression=Compression.topk(density=0.5),
        sparse_as_dense=as_dense,
    )
    before = embedding.weight.detach().clone()
    for step in range(3):
        optimizer.zero_grad()
        head(embedding(torch.tensor([rank, 5 + step]))).sum().backward()
        optimizer.step()
    assert same_on_all_ranks(*(parameter for _, parameter in named))
    assert (embedding.weight != before).any(1).nonzero().ravel().tolist() == [*range(size), 5, 6, 7]
