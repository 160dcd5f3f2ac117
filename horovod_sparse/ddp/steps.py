"""Passes of `Steps` over torch.distributed: for DistributedDataParallel, FSDP2, and plain modules."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_sparse.ddp.collectives import Communicator
from horovod_sparse.ddp.distributed_engine import DistributedEngine
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.tensors.binding import Binding
from horovod_sparse.tensors.parts import ModelBuffers, inner_of
from horovod_sparse.training.collective_errors import worst, worst_of_all
from horovod_sparse.training.engine import carry_out
from horovod_sparse.training.schedules import Schedule
from horovod_sparse.training.settings import Settings

_log = logging.getLogger("horovod_sparse")

#: by parameter, what exchanges its gradients
_owners: Any = WeakTensorKeyDictionary()
#: by model; a hook of the model that held them would go into its copies
_attached: MutableMapping[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def _before_loading(model: torch.nn.Module, *_: Any) -> None:
    """Takes moves back before parameters are replaced; moves of a checkpoint belong to the new ones."""
    for sync in _attached.get(model, ()):
        if sync.is_agreed:
            sync.roll_back()


class OverGroup:
    """Gives a training its driver over torch.distributed."""

    engine: DistributedEngine

    @property
    def starter(self) -> Communicator:
        return self.engine.running()

    def agree(self: Any, **how: Any) -> None:
        super().agree(**how)  # type: ignore[misc]
        self.starter.label = self.label

    def of_all(self, failures: list[BaseException]) -> list[BaseException]:
        if self.engine.within is None:
            return failures
        failure = carry_out(worst_of_all(worst(failures) if failures else None), self.engine.within)
        return [] if failure is None else [failure]


class Synchronized(OverGroup, Binding):  # type: ignore[misc]
    """Binds an optimizer to passes over torch.distributed; `attach` returns it."""

    def __init__(
        self,
        model: torch.nn.Module,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None,
        settings: Settings,
        schedule: Schedule,
    ) -> None:
        engine = DistributedEngine(self, model, recipe, optimizer, group, settings.deadline_seconds)
        super().__init__(optimizer, engine, recipe, settings, schedule, ModelBuffers(model))
        inner = inner_of(model)
        if inner not in _attached:
            _attached[inner] = weakref.WeakSet()
            inner._register_load_state_dict_pre_hook(_before_loading, with_module=True)
        _attached[inner].add(self)

    def _before_saving(self, optimizer: Any) -> None:
        super()._before_saving(optimizer)
        moved = self.size > 1 and any(part.moves.moves for part in self.parts)
        if optimizer is not None and self._hidden is None and moved:
            _log.warning(
                "saving an optimizer while ranks differ (every > 1 or delay > 0): save model and optimizer "
                "within `with sync.common():`, or torch.distributed.checkpoint makes a patchwork of ranks"
            )


def wrappers_of(model: torch.nn.Module) -> list[DistributedDataParallel]:
    """Finds each DistributedDataParallel in a model, or around it: trainers hand out the inner module."""
    within = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
    if within or not dist.is_initialized():
        return within
    alive = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    own = set(map(id, model.parameters()))
    whole = [one for one in alive if "module" in one._modules]
    return [one for one in whole if not own.isdisjoint(map(id, one.parameters()))]


def refuse_join(model: Any, *_: Any) -> None:
    """Before a forward pass: nobody fills in for ranks that have no batch."""
    if model._join_config.enable:
        raise UnsupportedError(
            "DistributedDataParallel.join() fills in for ranks in dense sums alone: give every rank as "
            "many batches (drop_last=True, or a sampler that pads)"
        )


def silence(wrappers: Sequence[DistributedDataParallel]) -> None:
    """Leaves gradients on their ranks: none of these synchronizes any more."""
    for one in wrappers:
        if one._comm_hooks:
            raise UnsupportedError(
                "the model has a communication hook, which synchronizes gradients: attach to a "
                "DistributedDataParallel without one"
            )
        retire_former(one)
        one.require_backward_grad_sync = one.require_forward_param_sync = False
        one.register_forward_pre_hook(refuse_join)
        end_first_pass(one)


def retire_former(model: torch.nn.Module, now: Any = None) -> None:
    """Ends former exchanges of a model's gradients: what is attached last has its parameters."""
    for one in model.parameters():
        former = _owners.pop(one, lambda: None)()
        if former is not None:
            former.retire()
        if now is not None:
            _owners[one] = weakref.ref(now)


def end_first_pass(model: Any) -> None:
    """Keeps a static graph from the dense sum at the end of its first backward pass."""
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = True


def group_of(
    model: torch.nn.Module, wrapped: Sequence[DistributedDataParallel], replicas: Any
) -> dist.ProcessGroup | None:
    """Returns the ranks with the same parameters: those given, or those of a DistributedDataParallel."""
    sharded = [one for one in model.parameters() if hasattr(one, "device_mesh")]
    if wrapped and replicas is not None:
        raise ArgumentError("replicas", replicas, "none with DistributedDataParallel: it has a group")
    group = replicas if isinstance(replicas, dist.ProcessGroup) else None
    if replicas is not None and group is None and getattr(replicas, "ndim", 0) == 1:
        group = replicas.get_group()
    if (sharded and group is None) or (replicas is not None and group is None):
        allowed = 'the ranks with the same shards, as a process group or a mesh: mesh["replicate"]'
        raise ArgumentError("replicas", replicas, allowed)
    if sharded:
        mesh = sharded[0].device_mesh
        common = set(mesh.mesh.flatten().tolist()) & set(dist.get_process_group_ranks(group))
        if len(common) > 1 or mesh.ndim > 1:
            allowed = 'one that fully_shard has sharded over mesh["shard"], and replicas=mesh["replicate"]'
            raise ArgumentError("model", f"one sharded over ranks {mesh.mesh.tolist()}", allowed)
    return wrapped[0].process_group if wrapped else group
