"""How a model of DistributedDataParallel comes to be synchronized sparsely."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.ddp.synchronizer import State
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.merging import Plan


def hook(state: Any, bucket: Any) -> Any:
    """The communication hook: ``model.register_comm_hook(horovod_sparse.ddp.State(...), hook)``.

    Args:
        state: a `State`.
        bucket: of DistributedDataParallel, with this rank's gradients.

    Returns:
        A future of the bucket's mean over ranks.

    Raises:
        UnsupportedError: for what is no bucket: a compiled DistributedDataParallel calls hooks with single
            gradients; or for a bucket that cannot be sparsified.
        ArgumentError: if `state` is something else.
    """
    if not isinstance(state, State):
        raise ArgumentError("state", state, "a horovod_sparse.ddp.State(...)")
    if not isinstance(bucket, dist.GradBucket):
        raise UnsupportedError(
            "the hook was called with something that is no bucket: DistributedDataParallel compiled by its "
            "'python_reducer' gives hooks single gradients. Set torch._dynamo.config.optimize_ddp to "
            "'ddp_optimizer', or compile the module inside: DistributedDataParallel(torch.compile(module))"
        )
    return state.on_bucket(bucket)


# DistributedDataParallel compares them with these very classes, not with their names
hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})


def attach(
    model: DistributedDataParallel,
    compression: str | Recipe,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    plan: Plan | None = None,
) -> State:
    """Synchronizes a model's gradients sparsely from now on. All ranks do it, in the same way.

    Args:
        model: a `DistributedDataParallel` without a communication hook.
        compression: a sparsifier, as text (``"exdyna:density=0.001"``) or as a recipe.
        optimizer: of all its parameters; tells learning rates, which a hook does not see. Without it,
            parameters of all groups share buckets, and a residual does not follow the learning rate
            (``scale_residual``).
        plan: which parameters form which bucket; DistributedDataParallel's own buckets if left out.

    Returns:
        What has the telemetry, and is saved and loaded.

    Raises:
        ArgumentError: for an argument that is not allowed.
        UnsupportedError: for a model that cannot be synchronized this way.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ArgumentError("model", type(model).__name__, "a DistributedDataParallel")
    if model.mixed_precision is not None:
        raise UnsupportedError(
            "DistributedDataParallel(mixed_precision=...) registers a communication hook of its own: leave "
            "it out and use torch.autocast, or a wire format (values=float16) for smaller messages"
        )
    if model._comm_hooks:
        raise UnsupportedError("the model has a communication hook already, and can have only one")
    state = State(
        compression,
        optimizer,
        named_parameters=model.module.named_parameters(),
        process_group=model.process_group,
        plan=plan,
    )
    state.finds_unused = model.find_unused_parameters or model.static_graph
    model.register_comm_hook(state, hook)
    return state
