"""Models of chosen gradients in DistributedDataParallel, synchronized by our hook."""

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse import ddp
from support.linear import LinearModel, checksums
from support.optimizers import base_for, gradients_of


class _Loss(LinearModel):
    """The loss as a forward pass, as DistributedDataParallel wants it."""

    forward = LinearModel.loss


class Replica:
    """A model, its optimizer, and what synchronizes it: the hook, given `attached`, or DDP's own sums."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        compression: Any,
        *,
        lr: float = 0.5,
        bucket_bytes: int = 680,
        plan: Any = None,
        dtype: torch.dtype = torch.float32,
        attached: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.net = _Loss(shapes, dtype)
        self.optimizer = base_for(compression, self.net.parameters(), lr)
        self.model = in_small_buckets(self.net, bucket_bytes, **arguments)
        self.sync: Any = None
        if compression is not None:
            self.sync = ddp.attach(self.model, compression, self.optimizer, plan=plan, **(attached or {}))

    def step(self, gradients: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Backward, step, zero_grad; returns the synchronized gradients."""
        self.model(gradients).backward()
        found = gradients_of(self.net)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found

    def held(self) -> dict[str, torch.Tensor]:
        return self.sync.state_dict()["residuals"]


def in_small_buckets(net: torch.nn.Module, bucket_bytes: int, **arguments: Any) -> DistributedDataParallel:
    """A model in DistributedDataParallel, whose first bucket is as small as the others.

    Older versions of PyTorch (2.3) give the first one a limit of its own, 1 MiB, whatever is asked for.
    """
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", bucket_bytes):
        return DistributedDataParallel(net, bucket_cap_mb=bucket_bytes / 2**20, **arguments)


def same_on_all_replicas(*tensors: torch.Tensor) -> bool:
    """Whether the tensors have the same bits on all ranks; asked by all of them together."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, checksums(*tensors))
    return all(item == everyone[0] for item in everyone)


def common_are_equal(net: torch.nn.Module, sync: Any) -> None:
    with sync.common():
        assert same_on_all_replicas(*net.parameters())
