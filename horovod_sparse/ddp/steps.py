"""Own steps and local steps over torch.distributed: of DistributedDataParallel, FSDP2, and plain modules."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.ddp.distributed_engine import Communicator, DistributedEngine, sending_errors
from horovod_sparse.errors import ArgumentError, StateMismatchError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.tensors.binding import Binding
from horovod_sparse.tensors.local_steps import LocalBinding, stepping_optimizer
from horovod_sparse.tensors.models import ModelBuffers, claim, inner_module, roll_back_before_loading
from horovod_sparse.training.collective_errors import worst, worst_of_all
from horovod_sparse.training.engine import carry_out
from horovod_sparse.training.schedules import LocalOptions, LocalSchedule, Schedule
from horovod_sparse.training.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("horovod_sparse")


class OverGroup:
    """Mixin of a training whose collectives run over torch.distributed."""

    engine: DistributedEngine

    @property
    def starter(self) -> Communicator:
        return self.engine.running()

    def save(self: Any, **more: Any) -> dict[str, Any]:
        shard = {"shard": [*self.engine.shard]} if self.engine.shard else {}
        return super().save(**more, **shard)  # type: ignore[misc]

    def check_fits(self, entry: Mapping[str, Any], *facts: Any) -> None:
        own = self.engine.shard and [*self.engine.shard]
        if (saved := entry.get("shard")) != own:
            raise StateMismatchError(
                f"the saved state is of shard {saved}, this rank trains {own} ([number, of how many], or "
                "None for whole parameters): load what a rank with the same shard has saved"
            )
        super().check_fits(entry, *facts)  # type: ignore[misc]

    def failures_of_all_shards(self, failures: list[BaseException]) -> list[BaseException]:
        if self.engine.within is None:
            return failures
        failure = carry_out(worst_of_all(worst(failures) if failures else None), self.engine.within)
        return [] if failure is None else [failure]


class Synchronized(OverGroup, Binding):  # type: ignore[misc]
    """Exchanges an optimizer's own steps over torch.distributed; `attach` returns it."""

    def __init__(
        self,
        model: torch.nn.Module,
        wrappers: Sequence[DistributedDataParallel],
        recipe: Recipe,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None,
        settings: Settings,
        schedule: Schedule,
    ) -> None:
        engine = DistributedEngine(model, recipe, optimizer, group, settings.deadline_seconds, schedule.delay)
        averaged = ModelBuffers(model) if all(one.broadcast_buffers for one in wrappers) else None
        super().__init__(optimizer, engine, recipe, settings, schedule, averaged)
        #: makes each DistributedDataParallel synchronize again
        self.silenced = stop_synchronizing(wrappers)
        roll_back_before_loading([inner_module(model)], self)

    def release_optimizer(self) -> None:
        super().release_optimizer()
        self.silenced.close()

    def before_load(self) -> None:
        """Undoes this rank's moves; called before the model loads a state, which replaces the parameters."""
        if self.is_agreed and self.hidden is None:
            self.roll_back()

    def _state_dict_pre_hook(self, optimizer: Any) -> None:
        super()._state_dict_pre_hook(optimizer)
        at_once = optimizer is not None and self.size > 1 and self.schedule.moves_at_once
        if at_once and any(part.moves.moves or part.moves.ahead for part in self.parts):
            _log.warning(
                "saving an optimizer while ranks differ (every > 1 or delay > 0): save model and optimizer "
                "within `with sync.common():`, or torch.distributed.checkpoint mixes the ranks' parameters"
            )


class LocalSteps(OverGroup, LocalBinding):  # type: ignore[misc]
    """Local steps over torch.distributed: ranks train alone, and average displacements every `every` steps.

        model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters())
        local = ddp.LocalSteps(optimizer, model, every=30, compression="sparseloco")

    ``theta_r``: what H steps of the optimizer make of ``theta`` on rank r. Then
    ``theta <- theta - lr (mean + momentum v)``, the mean over ranks of ``theta - theta_r``, or of what a
    compression sends of it. See `horovod_sparse.tensors.local_steps`.

    The training loop stays as it is. Hooks count the steps that the optimizer has really taken, so
    accumulated passes, and steps that a `torch.amp.GradScaler` skips, do not count. Moments stay on their
    ranks. A DistributedDataParallel synchronizes no gradients from now on, as within ``no_sync()``. Call
    `finish` after the loop if ranks may take different numbers of steps, or if the last round has fewer than
    `every`.

    Args:
        optimizer: any optimizer of PyTorch that trains parameters of `model`.
        model: a module, or a DistributedDataParallel without a communication hook. All ranks begin with equal
            parameters. Each trained parameter belongs to an optimizer with LocalSteps. Float buffers and
            counters (integers of one element) are averaged in every exchange.
        every: H, local steps from one exchange to the next.
        compression: a sparsifier, as text ("sparseloco" is made for this) or as a recipe; None for none.
        outer: "sgd" (rate 1), "nesterov" (0.7, 0.9; without a compression alone), or an `OuterStep`.
        combine: "senders": the mean of an element is over the ranks that sent it, as in SparseLoCo's program:
            the default if sums tell the senders. "ranks": over all ranks, which makes smaller steps.
        delay: steps made while an exchange is in flight; their progress is kept.
        process_group: the ranks that exchange; that of the DistributedDataParallel, or all, if left out. Of
            a model of `fully_shard` over ``mesh["shard"]`` those that have the same shard,
            ``mesh["replicate"].get_group()``: each exchanges its shard, and saves it.
        **options: see `horovod_sparse.training.settings.Settings`: `on_nonfinite`, `check_every` (exchanges)
            and `deadline_seconds`.

    Source: Douillard et al. 2023 (DiLoCo); Sarfi et al. 2025 (SparseLoCo).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        every: int,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[LocalOptions],
    ) -> None:
        wrappers = wrappers_of(model)
        with sending_errors(wrappers, process_group):
            schedule, settings = LocalSchedule.of(every, options, "horovod_sparse.ddp.LocalSteps")
            optimizer = stepping_optimizer(optimizer, model)
            if process_group is None or not wrappers:
                process_group = group_of(model, wrappers, process_group, "process_group")
            stop_synchronizing(wrappers)
            given = model, schedule.recipe, optimizer, process_group
            engine = DistributedEngine(*given, settings.deadline_seconds)
            super().__init__(optimizer, model, engine, schedule, settings)


def wrappers_of(model: torch.nn.Module) -> list[DistributedDataParallel]:
    """Returns all DistributedDataParallel in or around a model: trainers pass the inner module."""
    if not isinstance(model, torch.nn.Module):  # which is refused later
        return []
    within = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
    if within or not dist.is_initialized():
        return within
    # a module knows nothing of its wrapper, which may have been made before this package was imported
    alive = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    own = set(map(id, model.parameters()))
    whole = [one for one in alive if "module" in one._modules]
    return [one for one in whole if not own.isdisjoint(map(id, one.parameters()))]


def raise_within_join(model: Any, *_: Any) -> None:
    """Forward hook: raises if the model runs within `join()`, since sparse sums need all ranks' messages."""
    if model._join_config.enable:
        raise UnsupportedError(
            "DistributedDataParallel.join() fills in for ranks in dense sums alone: give every rank as "
            "many batches (drop_last=True, or a sampler that pads)"
        )


def raise_if_hooked(model: DistributedDataParallel) -> None:
    """Raises if another communication hook synchronizes the model's gradients."""
    if model._comm_hooks:
        raise UnsupportedError("the model has a communication hook, which synchronizes, too: leave it out")


def stop_synchronizing(wrappers: Sequence[DistributedDataParallel]) -> contextlib.ExitStack:
    """Disables the wrappers' own exchange of gradients, until the returned stack is closed."""
    undo = contextlib.ExitStack()
    for one in wrappers:
        raise_if_hooked(one)
        claim(None, one.parameters())
        one.require_backward_grad_sync = one.require_forward_param_sync = False
        undo.callback(setattr, one, "require_backward_grad_sync", True)
        undo.callback(one.register_forward_pre_hook(raise_within_join).remove)
        if one.static_graph:
            name = "_static_graph_delay_allreduce_enqueued"
            undo.callback(setattr, one, name, getattr(one, name))
        skip_first_dense_sum(one)
    return undo


def skip_first_dense_sum(model: Any) -> None:
    """Prevents the dense sum that DistributedDataParallel makes after a static graph's first pass."""
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = True


def group_of(
    model: torch.nn.Module, wrapped: Sequence[DistributedDataParallel], replicas: Any, name: str = "replicas"
) -> dist.ProcessGroup | None:
    """Returns the ranks with the same parameters: `replicas`, or those of a DistributedDataParallel."""
    sharded = [one for one in model.parameters() if hasattr(one, "device_mesh")]
    if wrapped and replicas is not None:
        raise ArgumentError(name, replicas, "None with DistributedDataParallel: it has a group")
    group = replicas.get_group() if getattr(replicas, "ndim", 0) == 1 else replicas
    if (sharded or replicas is not None) and not isinstance(group, dist.ProcessGroup):
        allowed = 'the ranks with the same shards, as a process group or a mesh: mesh["replicate"]'
        raise ArgumentError(name, replicas, allowed)
    if sharded:
        mesh = sharded[0].device_mesh
        common = set(mesh.mesh.flatten().tolist()) & set(dist.get_process_group_ranks(group))
        if len(common) > 1 or mesh.ndim > 1:
            allowed = f'one that fully_shard has sharded over mesh["shard"], {name} of mesh["replicate"]'
            raise ArgumentError("model", f"one sharded over ranks {mesh.mesh.tolist()}", allowed)
    return wrapped[0].process_group if wrapped else group
