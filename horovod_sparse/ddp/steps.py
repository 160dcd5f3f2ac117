"""Passes of `Steps` over torch.distributed: for DistributedDataParallel, FSDP2, and plain modules."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_sparse.ddp.collectives import Carrier, Communicator
from horovod_sparse.ddp.distributed_engine import DistributedEngine
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.tensors.binding import Binding, new_facts
from horovod_sparse.tensors.parts import ModelBuffers, facts_of, inner_of, trained_by
from horovod_sparse.topology import Topology
from horovod_sparse.training.collective_errors import worst_of_all
from horovod_sparse.training.engine import Facts, PartSpec, carry_out
from horovod_sparse.training.outcome import worst
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.steps import Schedule

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


class Engine(DistributedEngine):
    """Facts of the parameters that are trained, by their names in a model."""

    binding: Any
    model: torch.nn.Module

    def facts(self, known: Facts) -> Facts:
        if self.optimizer is None:
            named = trained_by(None, self.model).items()
            new = [(name, one) for name, one in named if name not in known and one.requires_grad]
            return facts_of(new, None, self._recipe.rules)
        have = {id(one) for _, one in known.values()}
        if all(id(one) in have for group in self.optimizer.param_groups for one in group["params"]):
            return {}
        names = {one: name for name, one in trained_by(self.optimizer, self.model).items()}
        return new_facts(self.optimizer, known, names, self._recipe.rules)

    def make_parts(
        self, specs: Sequence[PartSpec], facts: Facts, place: tuple[int, int], topology: Topology | None
    ) -> list[Any]:
        return self.binding.make_parts(specs, facts, place, topology)

    def declared(self) -> Mapping[str, object]:
        return {**super().declared(), "optimizer": type(self.optimizer).__name__}


class OverGroup:
    """Gives a training its engine over torch.distributed, and its driver."""

    engine: Engine

    def engine_of(
        self,
        model: torch.nn.Module,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer | None,
        group: dist.ProcessGroup | None,
        seconds: float | None,
    ) -> Engine:
        """Returns a new engine for the parameters of a model that are trained."""
        named = trained_by(optimizer, model)
        engine = Engine(recipe, optimizer, named, group, seconds)
        engine.binding, engine.model = self, model
        shards: list[Any] = [one for one in named.values() if hasattr(one, "device_mesh")]
        #: ranks that have the other shards of the same parameters: they step alike
        self._within = Carrier(shards[0].device_mesh.get_group()) if shards else None
        if shards:
            mesh = shards[0].device_mesh
            engine.shard = mesh.get_local_rank(), mesh.size()
        return engine

    @property
    def starter(self) -> Communicator:
        return self.engine.running()

    def of_all(self, failures: list[BaseException]) -> list[BaseException]:
        if self._within is None:
            return failures
        failure = carry_out(worst_of_all(worst(failures) if failures else None), self._within)
        return [] if failure is None else [failure]


class Synchronized(OverGroup, Binding):
    """Binds an optimizer to passes over torch.distributed; `attach` returns it."""

    engine: Engine

    def __init__(
        self,
        model: torch.nn.Module,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None,
        settings: Settings,
        schedule: Schedule,
    ) -> None:
        engine = self.engine_of(model, recipe, optimizer, group, settings.deadline_seconds)
        super().__init__(optimizer, engine, recipe, settings, schedule, ModelBuffers(model))
        inner = inner_of(model)
        if inner not in _attached:
            _attached[inner] = weakref.WeakSet()
            inner._register_load_state_dict_pre_hook(_before_loading, with_module=True)
        _attached[inner].add(self)

    def agree(self) -> None:
        super().agree()
        self.starter.label = self.label

    def _before_saving(self, optimizer: Any) -> None:
        super()._before_saving(optimizer)
        moved = self.size > 1 and any(part.moves.moves for part in self.parts)
        if optimizer is not None and self._hidden is None and moved:
            _log.warning(
                "saving an optimizer while ranks differ (every > 1 or delay > 0): save model and optimizer "
                "within `with sync.common():`, or torch.distributed.checkpoint makes a patchwork of ranks"
            )


def wrappers_of(model: torch.nn.Module) -> list[DistributedDataParallel]:
    """Every DistributedDataParallel in a model, or around it: trainers give their callbacks the inner one."""
    within = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
    if within or not dist.is_initialized():
        return within
    alive = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    own = set(map(id, model.parameters()))
    whole = [one for one in alive if "module" in one._modules]
    return [one for one in whole if not own.isdisjoint(map(id, one.parameters()))]


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
    """The ranks that have the same parameters: given, or those of the model's DistributedDataParallel."""
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
