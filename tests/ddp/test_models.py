"""What models and loops do with DistributedDataParallel: at density 1 the hook does as its own allreduce."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from horovod_sparse import ddp
from support.replicas import in_small_buckets, same_on_all_replicas
from support.sampling import rows_by


class _Net(torch.nn.Module):
    """Layers, of which `shape` says how they are used.

    Args:
        shape: "plain", "shared": one layer twice, "some": one layer in every second pass only, "reentrant"
            and "checkpointed": computed again in backward, "nested": outputs in a dict, "norm": with buffers,
            "frozen": one layer is not trained.
    """

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape, self.passes = shape, 0
        self.first, self.middle, self.last = (
            torch.nn.Linear(*sides) for sides in ((12, 16), (16, 16), (16, 4))
        )
        self.norm = torch.nn.BatchNorm1d(16) if shape == "norm" else torch.nn.Identity()
        self.middle.requires_grad_(shape != "frozen")

    def forward(self, inputs: torch.Tensor) -> Any:
        self.passes += torch.is_grad_enabled()
        hidden = self.norm(self.first(inputs).relu())
        if self.shape in ("reentrant", "checkpointed"):
            again: Callable[[torch.Tensor], torch.Tensor] = lambda x: self.middle(x).relu()  # noqa: E731
            hidden = checkpoint(again, hidden, use_reentrant=self.shape == "reentrant")
        elif self.shape != "some" or self.passes % 2:
            hidden = self.middle(hidden).relu()
        if self.shape == "shared":
            hidden = self.middle(hidden).relu()
        out = self.last(hidden)
        return {"out": [out]} if self.shape == "nested" else out


def losses(model: torch.nn.Module, inputs: torch.Tensor, loop: str) -> Iterator[torch.Tensor]:
    """What one step goes backward from, one after the other."""

    def loss(some: torch.Tensor) -> torch.Tensor:
        out = model(some)
        return (out["out"][0] if isinstance(out, dict) else out).square().sum()

    if loop == "several forward passes":
        yield loss(inputs) + loss(inputs + 1.0)
    elif loop == "several backward passes":
        yield loss(inputs)
        yield loss(inputs + 1.0)
    elif loop == "no_sync":
        with model.no_sync():  # type: ignore[operator]
            yield loss(inputs)
        yield loss(inputs + 1.0)
    else:
        yield loss(inputs)
        with torch.no_grad():
            model(inputs)


SHAPES = {
    "plain": {},
    "shared": {},
    "some": {"find_unused_parameters": True},
    "reentrant": {"static_graph": True},
    "checkpointed": {},
    "nested": {},
    "norm": {},
    "frozen": {},
}


LOOPS = ["plain", "several forward passes", "several backward passes", "no_sync"]


@rows_by("shape,loop,views", SHAPES, LOOPS, [False, True], each=2)
def test_density_one_does_as_the_allreduce(shape, loop, views, rank):
    if shape == "norm" and loop == "several forward passes":
        pytest.skip("DistributedDataParallel broadcasts buffers between the passes, which no backward allows")
    if shape == "some" and loop == "several forward passes":
        pytest.skip("find_unused_parameters looks at the last forward pass alone")
    if shape == "reentrant" and loop != "plain":
        pytest.skip("a static graph has one forward and one backward pass in every step")
    torch.manual_seed(0)
    net = _Net(shape)
    # PyTorch 2.3's own allreduce, without views, loses what no_sync gathered of a layer that is unused later
    dense_views = views or (shape == "some" and loop == "no_sync")
    models = [
        in_small_buckets(copy.deepcopy(net), 1024, gradient_as_bucket_view=as_views, **SHAPES[shape])
        for as_views in (dense_views, views)
    ]
    optimizers = [torch.optim.SGD((p for p in m.parameters() if p.requires_grad), lr=0.01) for m in models]
    sync = ddp.attach(models[1], "topk:density=1.0", optimizers[1])
    for step in range(6):
        inputs = torch.sin(torch.arange(60.0).reshape(5, 12) * (1 + rank + 3 * step))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for loss in losses(model, inputs, loop):
                loss.backward()
            optimizer.step()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert sync.step == (12 if loop == "several backward passes" else 6)
    assert same_on_all_replicas(*models[1].parameters())
