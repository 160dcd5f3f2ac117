"""What torch.distributed gives to a training: facts of parameters, parts, and messages between ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from horovod_sparse.collectives import Synchronization
from horovod_sparse.ddp.collectives import Carrier
from horovod_sparse.ddp.communicator import Communicator
from horovod_sparse.ddp.roll_call import call_roll, say_attached
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe
from horovod_sparse.plans.plan import Plan, same_kind
from horovod_sparse.tensors.flat_gradient import BucketGradient
from horovod_sparse.tensors.parts import Part, facts_of, make_parts
from horovod_sparse.topology import Topology
from horovod_sparse.training.engine import Facts, PartSpec
from horovod_sparse.training.host_topology import Ranks

#: the parameters of every bucket, in the order in which the buckets come
BucketParameters: TypeAlias = Sequence[Sequence[torch.Tensor]]

#: a group of torch.distributed has one start
_START = object()


class DistributedEngine:
    """An `Engine` for the parameters of one model."""

    name = "horovod_sparse.ddp"

    def __init__(
        self,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer | None,
        named: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None,
        deadline_seconds: float | None,
    ) -> None:
        self._recipe, self._optimizer, self._named, self._group = recipe, optimizer, named, group
        #: names by parameter; gets those of parameters that nobody has named
        self._name_of = {parameter: name for name, parameter in named.items()}
        #: the buckets of this step
        self.layout: BucketParameters = ()
        #: the number of every parameter's group in the optimizer; None without one
        self.group_of: Mapping[torch.Tensor, int] | None = None
        #: number of this rank's shard, and of how many, where parameters are sharded; the same for all ranks
        #: that synchronize with each other
        self.shard: tuple[int, int] | None = None
        #: made with the first step
        self.communicator: Communicator | None = None
        self._deadline_seconds = deadline_seconds
        say_attached(group)

    def running(self) -> Communicator:
        """Carries out coroutines; made when it is asked for first."""
        if self.communicator is None:
            group = dist.group.WORLD if self._group is None else self._group
            deadline = call_roll(group, self._deadline_seconds)
            self.communicator = Communicator(Carrier(group), deadline)
        return self.communicator

    def rank_and_size(self) -> tuple[int, int]:
        group = dist.group.WORLD if self._group is None else self._group
        return dist.get_rank(group), dist.get_world_size(group)

    def ranks(self) -> Ranks:
        """As torchrun tells."""
        rank, size = dist.get_rank(), dist.get_world_size()
        host = os.environ.get("GROUP_RANK", socket.gethostname())
        local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return Ranks(*self.rank_and_size(), rank, size, host, *local)

    def start_token(self) -> object:
        return _START

    def facts(self, known: Facts) -> Facts:
        """Those of the buckets of this step."""
        named = []
        for parameter in (p for bucket in self.layout for p in bucket if p.numel()):
            if parameter not in self._name_of:
                if self._named:
                    allowed = "those of the very module that DistributedDataParallel has"
                    raise ArgumentError("named_parameters", list(self._named)[:4], allowed)
                # as Horovod calls parameters without names
                self._name_of[parameter] = f"allreduce.noname.0.{len(self._name_of)}"
            name = self._name_of[parameter]
            if self.group_of is not None and parameter not in self.group_of:
                raise ArgumentError("optimizer", f"one without {name}", "one of all the model's parameters")
            named.append((name, parameter))
        return facts_of(named, self.group_of, self._recipe.rules)

    def make_parts(
        self, specs: Sequence[PartSpec], facts: Facts, place: tuple[int, int], topology: Topology | None
    ) -> list[Part]:
        return make_parts(specs, facts, place, topology, self._optimizer, BucketGradient)

    def carry_out(self, coroutine: Synchronization[Any], topology: Topology | None) -> Any:
        communicator = self.running()
        communicator.move_to(topology)
        return communicator.run("agreement", coroutine)

    def move_to(self, topology: Topology | None) -> None:
        if self.communicator is not None:
            self.communicator.move_to(topology)

    def declared(self) -> Mapping[str, object]:
        return {"shard": self.shard}

    def to_array(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())


def plan_of(layout: BucketParameters, facts: Facts) -> Plan:
    """The buckets of a step, parameters of other groups and densities apart."""
    fact_of = {parameter: fact for fact, parameter in facts.values()}
    buckets: list[tuple[str, ...]] = []
    dense: list[str] = []
    for bucket in layout:
        kinds: dict[Any, list[str]] = {}
        for fact in (fact_of[parameter] for parameter in bucket if parameter.numel()):
            (dense if fact.density == 1.0 else kinds.setdefault(same_kind(fact), [])).append(fact.name)
        buckets += map(tuple, kinds.values())
    return Plan(tuple(buckets), tuple(dense))
