"""How a model of DistributedDataParallel, or of FSDP2, comes to be synchronized sparsely."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.ddp.step import Synchronizer
from horovod_sparse.ddp.synchronizer import State
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.merging import Plan

if TYPE_CHECKING:  # only a model of FSDP2 has use for it
    from torch.distributed.device_mesh import DeviceMesh


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


@overload
def attach(
    model: DistributedDataParallel,
    compression: str | Recipe,
    optimizer: torch.optim.Optimizer | None = ...,
    *,
    plan: Plan | None = ...,
    replicas: None = ...,
    on_nonfinite: str = ...,
    check_every: int | None = ...,
    on_drift: str | None = ...,
    levels: str = ...,
) -> State: ...
@overload
def attach(
    model: torch.nn.Module,
    compression: str | Recipe,
    optimizer: torch.optim.Optimizer | None = ...,
    *,
    plan: Plan | None = ...,
    replicas: DeviceMesh | dist.ProcessGroup,
    on_nonfinite: str = ...,
    check_every: int | None = ...,
    on_drift: str | None = ...,
    levels: str = ...,
) -> Synchronizer: ...
def attach(
    model: torch.nn.Module,
    compression: str | Recipe,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    plan: Plan | None = None,
    replicas: DeviceMesh | dist.ProcessGroup | None = None,
    on_nonfinite: str = "raise",
    check_every: int | None = None,
    on_drift: str | None = None,
    levels: str = "flat",
) -> Synchronizer:
    """Synchronizes a model's gradients sparsely from now on. All ranks do it, in the same way.

    Args:
        model: a `DistributedDataParallel` without a communication hook; or, with `replicas`, what
            `fully_shard` has sharded over the ranks of a host alone.
        compression: a sparsifier, as text (``"exdyna:density=0.001"``) or as a recipe.
        optimizer: of all its parameters; tells learning rates, which a hook does not see. Without it,
            parameters of all groups share buckets, and a residual does not follow the learning rate
            (``scale_residual``).
        plan: which parameters form which bucket; DistributedDataParallel's or FSDP's own if left out.
        replicas: the ranks that have the same shards as this one, one on each host: a mesh of one dimension,
            or a process group.
        on_nonfinite: see `State`; "raise" with `replicas`.
        check_every: see there; never with `replicas`.
        on_drift: see there.
        levels: see there; "flat" with `replicas`, which are on different hosts already.

    Returns:
        What has the telemetry, and is saved and loaded.

    Raises:
        ArgumentError: for an argument that is not allowed.
        UnsupportedError: for a model that cannot be synchronized this way.
    """
    if isinstance(model, DistributedDataParallel):
        if replicas is not None:
            raise ArgumentError("replicas", replicas, "none with DistributedDataParallel: it has a group")
        kept = {"on_nonfinite": on_nonfinite, "check_every": check_every, "on_drift": on_drift}
        kept["levels"] = levels
        return _attach_buckets(model, compression, optimizer, plan, **kept)
    given = {
        "on_nonfinite": None if on_nonfinite == "raise" else on_nonfinite,
        "check_every": check_every,
        "on_drift": on_drift,
        "levels": None if levels == "flat" else levels,
    }
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(name, value, "nothing with replicas: it is for DistributedDataParallel")
    try:
        from torch.distributed.device_mesh import DeviceMesh

        from horovod_sparse.ddp.shards import FSDPModule, ShardedState
    except ImportError as error:
        raise ArgumentError(
            "model", type(model).__name__, "a DistributedDataParallel; fully_shard takes PyTorch 2.13"
        ) from error
    if not isinstance(model, FSDPModule):
        allowed = "a DistributedDataParallel, or a module after fully_shard"
        raise ArgumentError("model", type(model).__name__, allowed)
    group = replicas if isinstance(replicas, dist.ProcessGroup) else None
    if isinstance(replicas, DeviceMesh) and replicas.ndim == 1:
        group = replicas.get_group()
    if group is None:
        allowed = 'the ranks with the same shards, as a process group or a mesh: mesh["replicate"]'
        raise ArgumentError("replicas", replicas, allowed)
    return ShardedState(model, compression, optimizer, group, plan)


def _attach_buckets(
    model: DistributedDataParallel,
    compression: str | Recipe,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan | None,
    **kept: Any,
) -> State:
    if model.mixed_precision is not None:
        raise UnsupportedError(
            "DistributedDataParallel(mixed_precision=...) registers a communication hook of its own: leave "
            "it out and use torch.autocast, or a wire format (values=float16) for smaller messages"
        )
    # a copy lists those of its model, without a state, and has none of them
    if any(one is not hook or state is not None for one, state in model._comm_hooks):
        raise UnsupportedError("the model has a communication hook already, and can have only one")
    state = State(
        compression,
        optimizer,
        named_parameters=model.module.named_parameters(),
        process_group=model.process_group,
        plan=plan,
        **kept,
    )
    state.finds_unused = model.find_unused_parameters or model.static_graph
    state.counts_joined = partial(_counts_joined, weakref.ref(model))
    model.register_comm_hook(state, hook)
    return state


def _counts_joined(model: Callable[[], DistributedDataParallel | None]) -> bool:
    """Whether a model is within `join(divide_by_initial_world_size=False)`."""
    found = model()
    return found is not None and found._join_config.enable and not found._divide_by_initial_world_size
