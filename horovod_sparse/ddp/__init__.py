"""Front end for torch.distributed: DistributedDataParallel, FSDP2 and plain modules.

Needs no Horovod. `attach` and `LocalSteps` are its entry points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.ddp.distributed_engine import sending_errors
from horovod_sparse.ddp.gradients import GradientSynchronizer
from horovod_sparse.ddp.steps import LocalSteps as LocalSteps
from horovod_sparse.ddp.steps import Synchronized, group_of, raise_if_hooked, wrappers_of
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import Recipe, recipe_for
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.tensors.binding import inner_optimizer
from horovod_sparse.tensors.checkpoint import load as load
from horovod_sparse.tensors.checkpoint import save as save
from horovod_sparse.tensors.layout import redistribute as redistribute
from horovod_sparse.tensors.models import claim, trained_by
from horovod_sparse.training.compression import check_momentum, recipe_of
from horovod_sparse.training.schedules import OuterStep as OuterStep
from horovod_sparse.training.schedules import Schedule
from horovod_sparse.training.settings import Settings, WaitingOptions

if TYPE_CHECKING:  # only a model of FSDP2 has use for a mesh
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack


def attach(
    model: torch.nn.Module,
    compression: str | Recipe | Sparsifier | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    every: int = 1,
    delay: int = 0,
    replicas: DeviceMesh | dist.ProcessGroup | None = None,
    **options: Unpack[WaitingOptions],
) -> GradientSynchronizer | Synchronized:
    """Makes a model train with sparse exchanges from now on; returns the training. All ranks call it.

    With "best", or the feedback "adam", "rmsprop" or "sgd", ranks exchange their own steps in
    ``optimizer.step()``, and gradients stay as they are: see `horovod_sparse.training.steps`. With any other
    feedback gradients are exchanged: those of a DistributedDataParallel during its backward pass, at whose
    end they are means over ranks; those of any other module in ``optimizer.step()``.

    Args:
        model: a `DistributedDataParallel` without a communication hook; any module; or, with `replicas`, what
            `fully_shard` has sharded over the ranks of a host alone.
        compression: a sparsifier, also of your own; its text (``"exdyna:density=0.001"``); or a recipe.
        optimizer: the optimizer of all the model's parameters. It may be left out if gradients of a
            DistributedDataParallel are exchanged: then parameters of all groups share buckets.
        every: steps from one exchange to the next, 1 or more; with "best" alone, like `delay`.
        delay: exchanges after which a mean is applied; 1 hides an exchange behind the next pass.
        replicas: the ranks that have the same shards as this one, one on each host: a mesh of one dimension,
            or a process group.
        **options: settings of the training, see `horovod_sparse.training.settings.Settings`: `plan` (buckets
            of DistributedDataParallel's ``bucket_cap_mb``, if left out), `on_nonfinite`, `check_every`,
            `levels` (with whole parameters) and `deadline_seconds`.

    Returns:
        The training, with its `telemetry`; `save` and `load` take it.
    """
    wrappers = wrappers_of(model)
    # ranks that wait in their first step read errors published here
    with sending_errors(wrappers, replicas):
        schedule = Schedule(every, delay)
        recipe = recipe_of(compression) if isinstance(compression, str) else compression
        if isinstance(recipe, Sparsifier):
            recipe = Recipe(recipe)
        if not isinstance(recipe, Recipe):
            allowed = "a sparsifier, its text or a recipe; for dense training attach nothing"
            if isinstance(compression, (torch.nn.Module, torch.optim.Optimizer)):
                allowed = 'a sparsifier, as in attach(model, "best", optimizer): are arguments swapped?'
            raise ArgumentError("compression", compression, allowed)
        settings = Settings.of(options, "ddp.attach", WaitingOptions, ("every", "delay", "replicas"))
        if not isinstance(model, torch.nn.Module):
            allowed = "the torch.nn.Module whose parameters the optimizer trains"
            raise ArgumentError("model", type(model).__name__, allowed)
        optimizer = inner_optimizer(optimizer)
        if hasattr(optimizer, "_local_hooks"):  # both would step it
            raise ArgumentError("optimizer", "one of LocalSteps", "a new one, without LocalSteps")
        schedule.check(recipe, settings)
        if not recipe.feedback.applies_rate:
            return _make_gradient_synchronizer(model, wrappers, recipe, optimizer, replicas, settings)
        if not isinstance(optimizer, torch.optim.Optimizer):
            allowed = 'the one that trains the model: attach(model, "best", optimizer)'
            raise ArgumentError("optimizer", optimizer, allowed)
        recipe, group = recipe_for(optimizer, recipe), group_of(model, wrappers, replicas)
        return Synchronized(model, wrappers, recipe, optimizer, group, settings, schedule)


def _make_gradient_synchronizer(
    model: torch.nn.Module,
    wrappers: Sequence[DistributedDataParallel],
    recipe: Recipe,
    optimizer: Any,
    replicas: DeviceMesh | dist.ProcessGroup | None,
    settings: Settings,
) -> GradientSynchronizer:
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        allowed = "the DistributedDataParallel that was compiled: attach to model._orig_mod"
        raise ArgumentError("model", type(model).__name__, allowed)
    if len({one.module for one in wrappers}) > 1:
        allowed = 'one per attach(model, text), without optimizer=; or all of them with compression="best"'
        raise ArgumentError("model", f"a module with {len(wrappers)} DistributedDataParallel", allowed)
    model = wrappers[0] if wrappers else model
    if not isinstance(optimizer, torch.optim.Optimizer) and not (wrappers and optimizer is None):
        allowed = "the one that trains the model; None with a DistributedDataParallel alone"
        raise ArgumentError("optimizer", optimizer, allowed)
    if isinstance(optimizer, (torch.optim.SparseAdam, torch.optim.LBFGS)):
        allowed = "another: SparseAdam takes no dense gradients; LBFGS searches along a line by a rank's loss"
        raise ArgumentError("optimizer", type(optimizer).__name__, allowed)
    if optimizer is not None:
        check_momentum(recipe, lambda: optimizer.param_groups, adopts=True)
        given = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for name, one in trained_by(None, model).items():
            if one.requires_grad and id(one) not in given:  # nobody would exchange its gradients
                raise ArgumentError("optimizer", f"one without {name}", "one of all the model's parameters")
    group = group_of(model, wrappers, replicas)
    if isinstance(model, DistributedDataParallel):
        if model.mixed_precision is not None:
            raise UnsupportedError(
                "DistributedDataParallel(mixed_precision=...) has a communication hook of its own: leave "
                "it out and use torch.autocast, or a wire format (values=float16) for smaller messages"
            )
        if not model.require_backward_grad_sync:
            raise UnsupportedError(
                "the model does not synchronize gradients: end LocalSteps, another attach or no_sync() first"
            )
        raise_if_hooked(model)
    if settings.levels != "flat" and any(hasattr(one, "device_mesh") for one in model.parameters()):
        raise ArgumentError("levels", settings.levels, "'flat' with shards: FSDP sums within hosts already")
    made = GradientSynchronizer(model, recipe, optimizer, group, settings)
    claim(made, model.parameters())
    return made
