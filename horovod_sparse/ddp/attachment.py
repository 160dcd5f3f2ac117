"""How a model of DistributedDataParallel, or of FSDP2, comes to be synchronized sparsely."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.ddp.roll_call import told_to_others
from horovod_sparse.ddp.step import Synchronizer
from horovod_sparse.ddp.synchronizer import State
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.plans.plan import Plan
from horovod_sparse.training.settings import Settings, WaitingOptions

if TYPE_CHECKING:  # only a model of FSDP2 has use for it
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack


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
    replicas: None = ...,
    **options: Unpack[WaitingOptions],
) -> State: ...
@overload
def attach(
    model: torch.nn.Module,
    compression: str | Recipe,
    optimizer: torch.optim.Optimizer | None = ...,
    *,
    replicas: DeviceMesh | dist.ProcessGroup,
    plan: Plan | None = ...,
    deadline_seconds: float | None = ...,
) -> Synchronizer: ...
def attach(
    model: torch.nn.Module,
    compression: str | Recipe,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    replicas: DeviceMesh | dist.ProcessGroup | None = None,
    **options: Unpack[WaitingOptions],
) -> Synchronizer:
    """Synchronizes a model's gradients sparsely from now on. All ranks do it, in the same way.

    Args:
        model: a `DistributedDataParallel` without a communication hook; or, with `replicas`, what
            `fully_shard` has sharded over the ranks of a host alone.
        compression: a sparsifier, as text (``"exdyna:density=0.001"``) or as a recipe.
        optimizer: of all its parameters; tells learning rates, which a hook does not see. Without it,
            parameters of all groups share buckets, and a residual does not follow the learning rate
            (``scale_residual``).
        replicas: the ranks that have the same shards as this one, one on each host: a mesh of one dimension,
            or a process group.
        **options: settings of the training, see `horovod_sparse.training.settings.Settings`: `plan` (that of
            DistributedDataParallel's buckets, or of FSDP's, if left out), `on_nonfinite`, `check_every`,
            `on_drift`, `levels` and `deadline_seconds`; with `replicas` `plan` and `deadline_seconds` alone,
            and ranks never compare their parameters.

    Returns:
        What has the telemetry, and is saved and loaded.

    Raises:
        ArgumentError: for an argument that is not allowed.
        UnsupportedError: for a model that cannot be synchronized this way.
    """
    # those that wait in the first step hear of errors of other ranks here
    with told_to_others(getattr(model, "process_group", None)):
        return _attached(model, compression, optimizer, replicas, options)


def _attached(
    model: torch.nn.Module,
    compression: str | Recipe,
    optimizer: torch.optim.Optimizer | None,
    replicas: DeviceMesh | dist.ProcessGroup | None,
    options: WaitingOptions,
) -> Synchronizer:
    if isinstance(model, DistributedDataParallel):
        if replicas is not None:
            raise ArgumentError("replicas", replicas, "none with DistributedDataParallel: it has a group")
        return _attach_buckets(model, compression, optimizer, options)
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        allowed = "the DistributedDataParallel that was compiled: attach to model._orig_mod"
        raise ArgumentError("model", type(model).__name__, allowed)
    settings = Settings.of(options, "horovod_sparse.ddp.attach", WaitingOptions)
    for name, value in options.items():
        if name not in ("plan", "deadline_seconds") and value not in (None, "raise", "flat"):
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
    return ShardedState(model, compression, optimizer, group, settings)


def _attach_buckets(
    model: DistributedDataParallel,
    compression: str | Recipe,
    optimizer: torch.optim.Optimizer | None,
    options: WaitingOptions,
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
        **options,
    )
    state.finds_unused = model.find_unused_parameters or model.static_graph
    state.counts_joined = partial(_counts_joined, weakref.ref(model))
    model.register_comm_hook(state, hook)
    return state


def _counts_joined(model: Callable[[], DistributedDataParallel | None]) -> bool:
    """Whether a model is within `join(divide_by_initial_world_size=False)`."""
    found = model()
    return found is not None and found._join_config.enable and not found._divide_by_initial_world_size
