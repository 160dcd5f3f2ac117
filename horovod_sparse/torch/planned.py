"""A training whose plan may go by times: measured in its first steps, if no profile has them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from horovod_sparse.collectives import Synchronization
from horovod_sparse.feedback import Recipe
from horovod_sparse.planning import asked_of, first_plan, plan_request
from horovod_sparse.plans import ParameterFacts, Plan
from horovod_sparse.tensors.backward import GradientTraining
from horovod_sparse.topology import ClusterFacts, launched_hosts
from horovod_sparse.torch.driver import carry_out_together
from horovod_sparse.torch.horovod_engine import HorovodEngine, most_of, where_of
from horovod_sparse.training.collective_errors import raise_together
from horovod_sparse.training.engine import Facts
from horovod_sparse.training.settings import Settings

if TYPE_CHECKING:
    from horovod_sparse.planning.request import Decision
    from horovod_sparse.planning.warmup import Decide, WarmUp


class PlannedTraining(GradientTraining):
    """A `Training` over Horovod whose `warmup` measures and decides, where times were asked for."""

    engine: HorovodEngine

    def __init__(
        self, engine: HorovodEngine, recipe: Recipe, settings: Settings, groups: Any, optimizer: Any
    ) -> None:
        super().__init__(engine, recipe, settings, optimizer)
        self.process_set, self.driver = engine.process_set, engine.driver
        facts = dict(engine.facts({}))
        recipe.rules.hint(facts)
        request, plan = plan_request(**settings.planning, groups=groups)
        arguments = {"plan": plan, "groups": groups, "bucket_bytes": settings.bucket_bytes}
        parameters = [fact for fact, _ in facts.values()]

        def where() -> ClusterFacts:
            hosts = launched_hosts(settings.levels, engine.ranks())
            return dataclasses.replace(where_of(engine.process_set, most_of(parameters)[0]), topology=hosts)

        self._first = first_plan(request, facts, recipe.sparsifier, where, **arguments)
        if self._first.failure is not None and engine.rank_and_size()[1] == 1:
            raise self._first.failure
        self.telemetry.selection = self._first.selection
        self.warmup: WarmUp | None = None
        if self._first.request is not None:
            # most trainings measure nothing
            from horovod_sparse.planning.warmup import WarmUp
            from horovod_sparse.tensors.measuring import stamps_for

            stamps, decision = stamps_for(parameter.device for parameter in parameters), self._first.decision
            self.warmup = WarmUp(
                self._first.request, parameters, recipe.sparsifier, self._decided, stamps, decision
            )
        self.facts = facts

    def _decided(self, decide: Decide) -> Decision:
        """Carries out what makes a plan by times, with all ranks."""
        from horovod_sparse.tensors.measuring import bucket_memory

        device, dtype = most_of(self.parameters)
        cluster = dataclasses.replace(where_of(self.process_set, device), topology=self.topology)
        starts, name = [0.0], "horovod_sparse.planning"
        more = {"memory": bucket_memory(device), "dtype": dtype, "starting_seconds": lambda: starts[-1]}
        with torch.no_grad():
            decision: Decision = carry_out_together(
                decide(cluster, **more), self.process_set, name, starts.append, topology=self.topology
            )
        return decision

    def first_plan_of(self, facts: Facts) -> Plan:
        """As `merging` and `tensor_selection` ask for, as far as that needs no times."""
        if self._first.request is None:
            return super().first_plan_of(facts)
        return self._first.request.first_plan([fact for fact, _ in facts.values()])

    def declared(self) -> dict[str, str]:
        return {**super().declared(), **asked_of(self._first.request)}

    def _compare_plans(self) -> Synchronization[None]:
        yield from raise_together(self._first.failure)

    @property
    def _measured(self) -> str:
        return "" if self.warmup is None else self.warmup.position

    def _stop_measuring(self) -> None:
        if self.warmup is not None:
            self.warmup.stop_measuring()

    def take_in(self) -> dict[str, tuple[ParameterFacts, Any]]:
        """See `Training.take_in`; what was measured without them decides nothing."""
        new = super().take_in()
        if new and self.warmup is not None:
            self.warmup.joined(self.parameters)
        return new
