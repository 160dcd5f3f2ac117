"""The engine over torch.distributed: parameters' facts, messages, and errors of other ranks."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.collectives import Synchronization
from horovod_sparse.ddp.collectives import Carrier, Communicator
from horovod_sparse.errors import DeadlineError
from horovod_sparse.feedback import Recipe
from horovod_sparse.tensors.models import new_facts, trained_by
from horovod_sparse.topology import Placement, Topology
from horovod_sparse.training.collective_errors import ConstructionErrors
from horovod_sparse.training.deadline import Deadline
from horovod_sparse.training.engine import Facts

_log = logging.getLogger("horovod_sparse")

#: seconds until the log says which ranks are missing, and between checks
_QUIET_SECONDS, _LOOK_SECONDS = 5.0, 0.05
_ABSENT = "have not begun their first step: all ranks call attach, or make LocalSteps, and train"

#: by a group's name: number of models at their first step
_begun: Counter[str] = Counter()
#: by group: one that is made when another was destroyed may have its name, and other ranks
_errors: MutableMapping[dist.ProcessGroup, ConstructionErrors] = weakref.WeakKeyDictionary()


class GroupStore:
    """Writes and reads values in a process group's store, like `deadline.launcher_store`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        store = dist.distributed_c10d._get_process_group_store(group)
        self._store = dist.PrefixStore("horovod_sparse.notes", store)

    def __call__(self, scope: str, key: str, value: bytes | None = None) -> bytes | None:
        name = f"{scope}/{key}"
        with contextlib.suppress(RuntimeError):  # the process with the store has ended
            if value is not None:
                self._store.set(name, value)
                self._store.add(f"{name}/there", 1)
            elif self._store.add(f"{name}/there", 0):  # `get` waits for what is not there
                found: bytes = self._store.get(name)
                return found
        return None


def _construction_errors(group: dist.ProcessGroup) -> ConstructionErrors:
    place = dist.get_rank(group), list(range(dist.get_world_size(group)))
    made = ConstructionErrors(lambda _: place, GroupStore(group))
    return _errors.setdefault(group, made)


@contextlib.contextmanager
def sending_errors(wrappers: Sequence[DistributedDataParallel], given: Any) -> Iterator[None]:
    """Returns a context that publishes an error raised in it to the model's other ranks."""
    if getattr(given, "ndim", 0) == 1:  # a mesh
        given = given.get_group()
    group = given if isinstance(given, dist.ProcessGroup) else None
    group = group or (wrappers[0].process_group if wrappers else dist.group.WORLD)
    try:
        yield
    except Exception as error:
        if group is not None:
            _construction_errors(group).publish(error, None)
        raise
    if group is not None:
        _construction_errors(group).withdraw_error()


def await_first_step(group: dist.ProcessGroup, deadline_seconds: float | None) -> Deadline:
    """Waits until all ranks begin their first step; returns the deadline for later collectives.

    An error of a rank that could not attach is raised; the deadline's says which ranks have not come.
    """
    rank, size, store = dist.get_rank(group), dist.get_world_size(group), GroupStore(group)
    number, look = _begun[group.group_name], _construction_errors(group).watcher(None)
    deadline = Deadline(deadline_seconds, lambda: (rank, list(range(size))), store)
    store("came", f"{number}.{rank}", b"yes")
    missing, since, said = list(range(size)), time.monotonic(), False
    while missing := [one for one in missing if store("came", f"{number}.{one}") is None]:
        look()
        waited = time.monotonic() - since
        if waited > min(_QUIET_SECONDS, deadline.seconds) and not said:
            said = True
            _log.warning("waiting for ranks %s %s", missing, _ABSENT)
        if waited > deadline.seconds:
            what = f"the first step (ranks {missing} {_ABSENT})"
            raise DeadlineError(what, 0, deadline.seconds, dict.fromkeys(missing, ""))
        time.sleep(_LOOK_SECONDS)
    _begun[group.group_name] += 1
    return deadline


#: a group of torch.distributed has one start
_START = object()


class DistributedEngine:
    """The `Engine` for a model's trained parameters over torch.distributed."""

    name = "horovod_sparse.ddp"

    def __init__(
        self,
        model: torch.nn.Module,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer | None,
        group: dist.ProcessGroup | None,
        deadline_seconds: float | None,
    ) -> None:
        self.model, self._recipe, self.optimizer, self._group = model, recipe, optimizer, group
        shards: list[Any] = [
            one for one in trained_by(optimizer, model).values() if hasattr(one, "device_mesh")
        ]
        mesh = shards[0].device_mesh if shards else None
        #: number of this rank's shard, and number of shards; equal on all ranks that synchronize
        self.shard: tuple[int, int] | None = mesh and (mesh.get_local_rank(), mesh.size())
        #: group of ranks with the other shards of the same parameters, which skip or apply the same steps
        self.within = Carrier(mesh.get_group()) if mesh else None
        #: made with the first step
        self.communicator: Communicator | None = None
        self._deadline_seconds = deadline_seconds

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that exchange; raises before torch.distributed is initialized."""
        return dist.group.WORLD if self._group is None else self._group

    def running(self) -> Communicator:
        """The communicator; made at first use, which waits for all ranks' first step."""
        if self.communicator is None:
            deadline = await_first_step(self.group, self._deadline_seconds)
            self.communicator = Communicator(Carrier(self.group), deadline)
        return self.communicator

    def rank_and_size(self) -> tuple[int, int]:
        return dist.get_rank(self.group), dist.get_world_size(self.group)

    def placement(self) -> Placement:
        return Placement.of_torchrun(*self.rank_and_size(), dist.get_rank())

    def start_token(self) -> object:
        return _START

    def facts(self, known: Facts) -> Facts:
        have, groups = {id(one) for _, one in known.values()}, getattr(self.optimizer, "param_groups", ())
        if groups and all(id(one) in have for group in groups for one in group["params"]):
            return {}
        names = {one: name for name, one in trained_by(self.optimizer, self.model).items()}
        return new_facts(self.optimizer, known, names, self._recipe.rules)

    def carry_out(
        self, coroutine: Synchronization[Any], topology: Topology | None, name: str = "agreement"
    ) -> Any:
        communicator = self.running()
        communicator.set_topology(topology)
        return communicator.run(name, coroutine)

    def begin(self, training: Any) -> None:
        communicator = self.running()
        communicator.label = training.label
        communicator.set_topology(training.topology)

    def declared(self) -> Mapping[str, object]:
        return {"shard": self.shard, "optimizer": type(self.optimizer).__name__}

    def to_array(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())
