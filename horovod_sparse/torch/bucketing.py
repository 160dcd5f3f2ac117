"""Which buckets the gradients of an optimizer are in, as its plan, its parameters and the ranks change."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import DeadlineError, HorovodSparseError, UnsupportedError
from horovod_sparse.feedback import Recipe, resumed
from horovod_sparse.feedback.state import shared_digest
from horovod_sparse.frontend.agreement import Standing, Start, agreed_start, compared, kept_share
from horovod_sparse.frontend.collective_errors import raise_together
from horovod_sparse.frontend.decision import FirstPlan, check_agreement
from horovod_sparse.frontend.drift import DriftCheck
from horovod_sparse.frontend.levels import (
    Choose,
    agreed_topology,
    assumed_topology,
    by_cost,
    gathered_shards,
    hold_elsewhere,
    own_place,
)
from horovod_sparse.frontend.parts import assign_residuals, held_residuals
from horovod_sparse.frontend.plan_request import make_plan
from horovod_sparse.frontend.shared_memory import Arena, agreed_memory, may_share
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.pytorch.flat_gradient import FlatGradient
from horovod_sparse.pytorch.layout import dtype_name
from horovod_sparse.pytorch.memory import HOST_DEVICES
from horovod_sparse.pytorch.parts import Lay, Part, SparseBucket, parts_of
from horovod_sparse.topology import Topology
from horovod_sparse.torch import planning
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.driver import HorovodDriver
from horovod_sparse.torch.handles import present_start
from horovod_sparse.torch.stock import compare_with_ranks, refuse_whole_gradients, settings_of
from horovod_sparse.torch.warmup import WarmUp

_log = logging.getLogger("horovod_sparse")

_numbers = itertools.count()


def _next_label() -> str:
    """Goes before the names of an optimizer's collectives; the first one's have nothing before them.

    Two optimizers may have parameters of the same names (two networks that are trained in turn). The
    number need not be the same on all ranks: all take the first rank's.
    """
    number = next(_numbers)
    return f"optimizer{number}." if number else ""


class Bucketing:
    """The parts that the gradients of one optimizer are synchronized in.

    They change with the plan, with the types and devices of parameters, with parameters that join the
    optimizer, and with the ranks: residuals are kept, and sparsifiers start anew.

    Args:
        optimizer: that has the parameters.
        facts: as made by `planning.facts_of`.
        recipe: what to do with a bucket.
        first: plan to begin with, of this rank; that of the first rank is taken when all have agreed,
            which they do in the first synchronization after every start of Horovod.
        process_set: the ranks that take part.
        average: whether sums are divided by the number of ranks.
        deadline_seconds: of waiting; see `HorovodDriver`.
        levels: see `horovod_sparse.frontend.levels`.
    """

    def __init__(
        self,
        optimizer: Any,
        facts: Mapping[str, tuple[ParameterFacts, torch.Tensor]],
        recipe: Recipe,
        first: FirstPlan,
        process_set: Any,
        average: bool,
        deadline_seconds: float | None = None,
        levels: str = "flat",
    ) -> None:
        self.optimizer, self.facts, self.recipe = optimizer, dict(facts), recipe
        self.process_set, self.average = process_set, average
        #: which ranks share a host, as buckets are made for; None for one level
        self._first = first
        self.topology = assumed_topology(levels, hvd, process_set, self._choose_levels)
        self.driver = HorovodDriver(process_set, deadline_seconds, topology=self.topology)
        self._levels, self._deadline_seconds = levels, deadline_seconds
        self.drift: DriftCheck
        self.warmup: WarmUp | None = None
        if first.request is not None:
            parameters = [fact for fact, _ in self.facts.values()]
            given = first.request, parameters, recipe.sparsifier, process_set, lambda: self.topology
            self.warmup = WarmUp(*given, first.decision)
        self._label = _next_label()
        #: the start of Horovod in which the ranks agreed last
        self._agreed_under: Any = present_start() if self.size == 1 else None
        #: names of parameters that have joined since the optimizer was made
        self.joined: set[str] = set()
        #: synchronizations done, those that were given up not counted
        self.step = 0
        #: why gradients do not lie where the other ranks of the host see them
        self._why_not = ""
        self.parts: list[Part] = []
        self._part_of: dict[torch.Tensor, Part] = {}
        self._name_of = {parameter: name for name, (_, parameter) in self.facts.items()}
        self._kinds: list[tuple[torch.Tensor, torch.dtype, torch.device]] = []
        #: (rank, size) that states are made for, and all sizes there have been
        self._place = (self.rank, self.size)
        self.sizes = {self.size}
        self.build(first.plan)

    @property
    def rank(self) -> int:
        """Of this process, within the process set."""
        return int(self.process_set.rank())

    @property
    def size(self) -> int:
        """Ranks in the process set."""
        return int(self.process_set.size())

    @property
    def place(self) -> tuple[int, int]:
        """Rank and size of this process within the process set."""
        return self.rank, self.size

    @property
    def mates(self) -> tuple[int, ...]:
        """The ranks whose gradients are summed before they are sparsified: with one level this one alone."""
        return (self.rank,) if self.topology is None else self.topology.group("host", self.rank)

    @property
    def sparse(self) -> list[SparseBucket]:
        """The parts that are sparsified, in the plan's order."""
        return [part for part in self.parts if isinstance(part, SparseBucket) and not part.dense]

    def build(self, plan: Plan) -> None:
        """Fresh buckets for a plan. Gradients stay what they are."""
        parts = self._parts_of(plan, self.facts)
        for part in parts:
            part.gradient.gather_existing()
        self.plan, self.parts, self._part_of, self._kinds = plan, [], {}, []
        self._enter(parts)

    def _parts_of(
        self, plan: Plan, facts: Mapping[str, tuple[ParameterFacts, torch.Tensor]], first: int = 0
    ) -> list[Part]:
        given = plan, facts, self.recipe, self.optimizer, self._place, first
        return parts_of(*given, lay=self._lay(plan, facts), topology=self.topology)

    def _lay(self, plan: Plan, facts: Mapping[str, tuple[ParameterFacts, torch.Tensor]]) -> Lay:
        """What makes the memory of gradients: of buckets, where the other ranks of the host see it."""
        self._why_not = ""
        if self.topology is None or self.topology.per_host == 1 or not may_share():
            return FlatGradient
        buckets = [[facts[name][1] for name in names] for names in plan.buckets]
        sizes = [
            sum(parameter.numel() * parameter.element_size() for parameter in bucket)
            for bucket in buckets
            if bucket[0].device.type in HOST_DEVICES
        ]
        if not sizes:
            return FlatGradient
        try:
            arena = Arena(sizes)
        except OSError as error:
            self._why_not = f"no memory: {error}"
            return FlatGradient
        left = len(sizes)

        def lay(parameters: Sequence[torch.Tensor], name: str) -> FlatGradient:
            nonlocal left
            left -= (lends := left > 0 and parameters[0].device.type in HOST_DEVICES)
            return FlatGradient(parameters, name, arena if lends else None)

        return lay

    def _enter(self, parts: Sequence[Part]) -> None:
        """Further parts."""
        self.parts += parts
        for part in parts:
            if isinstance(part, SparseBucket) and not self.average:
                part.scale = 1.0
        entered = {parameter: part for part in parts for parameter in part.gradient.parameters}
        self._part_of |= entered
        self._kinds += [(p, p.dtype, p.device) for p in entered]

    def replan(self, plan: Plan) -> None:
        """Another plan, the residuals kept; the state of the sparsifiers starts anew."""
        plan.check([fact for fact, _ in self.facts.values()])
        if plan.density is None:  # one by hand says of buckets alone
            plan = dataclasses.replace(plan, density=self.plan.density)
        held = held_residuals(self.parts, self.recipe.feedback.num_companions)
        progress = {name: part.bucket.progress for part in self.sparse for name in part.names}
        self.build(plan)
        assign_residuals(self.parts, held, progress)
        if self.topology is not None:  # other buckets have other shards: ranks bring each other theirs
            self._agreed_under = None

    def follow(self) -> None:
        """Buckets of the types and on the devices that parameters have now; residuals are converted.

        Raises:
            UnsupportedError: where only some parameters of a bucket have changed, or to an unknown type.
        """
        before, told = self.facts, ""
        self.facts = {}
        for name, (fact, parameter) in before.items():
            dtype, device = dtype_name(parameter) or str(parameter.dtype), str(parameter.device)
            self.facts[name] = dataclasses.replace(fact, dtype=dtype, device=device), parameter
            if self.facts[name][0] != fact and (not told or dtype_name(parameter) is None):
                told = f"{name} was {fact.dtype} on {fact.device} and is {dtype} on {device} now"
        try:
            self.replan(self.plan)
        except HorovodSparseError as error:
            self.facts = before
            raise UnsupportedError(
                f"{told}, which its bucket cannot follow ({error}). Convert and move a model as a whole, or "
                "before it is wrapped"
            ) from error

    @property
    def _is_agreed(self) -> bool:
        return self._agreed_under is present_start()

    def agree(self) -> None:
        """All ranks together, before their first bucket after a start of Horovod: what they go on with."""
        if self._is_agreed:
            return
        under = present_start()
        try:
            start = self._together(self._agreement())
        except DeadlineError:
            refuse_whole_gradients(sorted(self.facts), self.process_set)
            raise
        self.driver.label, self._agreed_under = start.label, under
        if start.anew:
            self._start_anew(start)
        if self.topology is not None and start.elsewhere:
            self._together(gathered_shards(self.parts))
        self._together(agreed_memory(self.parts, self.rank, self.topology, self._why_not))
        self.drift.restart(self.step)
        if self.warmup is not None and not start.measures:
            self.warmup.stop_measuring()

    def _together(self, agreement: Synchronization[Any]) -> Any:
        return compare_with_ranks(
            agreement,
            self.process_set,
            deadline_seconds=self._deadline_seconds,
            topology=self.topology,
        )

    @property
    def _choose_levels(self) -> Choose:
        return by_cost(self.recipe.sparsifier, (fact for fact, _ in self.facts.values()), self._first.request)

    def _move_to(self, topology: Topology | None) -> None:
        """Buckets for other hosts; residuals are kept, states start anew."""
        if topology != self.topology:
            self.topology = topology
            self.driver.move_to(topology)
            # a rank that was another one has buckets of its old place: then all start anew, with other ones
            if self._place == self.place:
                self.replan(self.plan)

    def _agreement(self) -> Synchronization[Start]:
        parameters = [fact for fact, _ in self.facts.values()]
        yield from compared(settings_of(self.optimizer, self.recipe, "horovod_sparse.torch"), parameters)
        yield from check_agreement(self._first.request)
        yield from raise_together(self._first.failure)
        choose = self._choose_levels
        self._move_to((yield from agreed_topology(self._levels, own_place(hvd), choose)))
        buckets = {part.name: part.bucket for part in self.sparse}
        standing = Standing(
            self.step,
            shared_digest({name: bucket.state for name, bucket in buckets.items()}),
            self._place,
            self.plan,
            parameters,
            measuring="" if self.warmup is None else self.warmup.position,
            label=self._label,
            told={name: part.bucket.progress.to_plain() for part in self.sparse for name in part.names},
            column=0 if self.topology is None else self.topology.place(self.rank)[1],
            elsewhere=hold_elsewhere(self.parts),
        )
        return (yield from agreed_start(standing))

    def _start_anew(self, start: Start) -> None:
        """Fresh states, as all ranks have agreed; residuals are kept, and so is their mean."""
        old_size, self._place, self.step = self._place[1], (self.rank, self.size), start.step
        self.sizes.add(self.size)
        factor = kept_share(old_size, self.size)
        if self.rank == 0 and start.step > 0:
            _log.warning(
                "sparsifier states start anew at step %d, residuals are kept: %s", start.step, start.reason
            )
        held = held_residuals(self.parts, self.recipe.feedback.num_companions)
        progress = {
            name: resumed(part.bucket.progress, start.told.get(name), start.step)
            for part in self.sparse
            for name in part.names
        }
        self.build(start.plan)
        if factor != 1.0:
            held = [{name: values * factor for name, values in by_name.items()} for by_name in held]
        assign_residuals(self.parts, held, progress)
        for part in self.parts:
            if part.streams is not None:
                part.streams.note()

    def take_place(self) -> None:
        """Fresh buckets for the place that this rank has now, of which the residuals are not kept.

        For what is about to be loaded. In the next step all ranks compare what they have.
        """
        if self._place != (self.rank, self.size):
            self._place = (self.rank, self.size)
            self.sizes.add(self.size)
            self.topology = assumed_topology(self._levels, hvd, self.process_set, self._choose_levels)
            self.driver.move_to(self.topology)
            self.build(self.plan)
        self._agreed_under = None

    def joining(self) -> dict[str, tuple[ParameterFacts, torch.Tensor]]:
        """Parameters that the optimizer has come to train, and that have no bucket yet."""
        return planning.joining(self.optimizer, self._part_of, self.recipe.rules)

    def claim(self, facts: Mapping[str, tuple[ParameterFacts, torch.Tensor]]) -> None:
        """Takes parameters from whoever synchronized them before."""
        raise NotImplementedError

    def take_in(self) -> None:
        """Buckets of their own for parameters that the optimizer has come to train; all ranks alike.

        A gradient that they have already is a part of this step.
        """
        new = self.joining()
        if not new:
            return
        parameters = [fact for fact, _ in new.values()]
        request = self._first.request
        plan = make_plan(new) if request is None else request.first_plan(parameters)
        plan = dataclasses.replace(plan, density=self.plan.density)
        if self._is_agreed and self.size > 1:
            _log.warning(
                "%s joined the optimizer: waiting for all ranks to have the same parameters join",
                ", ".join(new),
            )
            standing = Standing(self.step, "", self._place, plan, parameters, label=self.driver.label)
            plan = self._together(agreed_start(standing)).plan
        parts = self._parts_of(plan, new, first=len(self.plan.buckets))
        for part in parts:
            part.gradient.gather_existing()
        if self._is_agreed:
            self._together(agreed_memory(parts, self.rank, self.topology, self._why_not))
        before = self.plan
        self.plan = Plan(before.buckets + plan.buckets, before.dense + plan.dense, before.density)
        self._enter(parts)
        self.joined |= set(new)
        for name, (fact, parameter) in new.items():
            self.facts[name] = fact, parameter
            self._name_of[parameter] = name
            self.optimizer._parameter_names[parameter] = name
            self.optimizer._requires_update.add(parameter)
            self.optimizer._allreduce_delay[parameter] = 0
        self.claim(new)
        if self.warmup is not None:
            self.warmup.joined([fact for fact, _ in self.facts.values()])
