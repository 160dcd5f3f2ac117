"""A training with any engine: its parts and plan, the agreement between ranks, checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse.collectives import Synchronization, gather_values
from horovod_sparse.errors import StateMismatchError
from horovod_sparse.feedback import Progress, Recipe
from horovod_sparse.plans import ParameterFacts, Plan, fixed_bytes
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.topology import Topology, own_position
from horovod_sparse.training import agreement
from horovod_sparse.training.collective_errors import NonFinitePolicy
from horovod_sparse.training.encoding import shared_digest
from horovod_sparse.training.engine import Engine, Facts, PartSpec
from horovod_sparse.training.parts import (
    assign_residuals,
    dense_groups,
    gather_shards,
    progress_after_agreement,
    rescaled,
    residuals_by_parameter,
)
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.state import check_shapes, load_entry, residual_factor, saved_entry, topology_of

_log = logging.getLogger("horovod_sparse")


class Training:
    """Base of a front end's training: its parts, plan, step number and topology, agreed between ranks.

    A front end derives from it, and decides when to start the parts and when to wait for them.
    """

    #: the `Starter` of the parts' coroutines: the engine, unless a front end overrides it
    starter: Any = property(operator.attrgetter("engine"))

    def __init__(self, engine: Engine, recipe: Recipe, settings: Settings, label: str = "") -> None:
        self.engine, self.recipe, self.settings = engine, recipe, settings
        self.telemetry = Telemetry()
        self.policy = NonFinitePolicy(settings.on_nonfinite, self.telemetry)
        self.drift = agreement.DriftCheck(settings)
        #: number of synchronizations, without cancelled ones
        self.step, self.plan = 0, Plan(())
        self.facts: dict[str, tuple[ParameterFacts, Any]] = {}
        #: buckets and dense parameters, in the order of the plan
        self.parts: list[Any] = []
        #: which ranks share a host, where gradients are summed within hosts first; else None
        self.topology: Topology | None = None
        #: prefix of the names of collectives: rank 0's, once all ranks have agreed
        self.label, self._own_label = "", label
        #: rank and number of ranks for which states were made, and all numbers of ranks so far
        self.made_for, self.sizes = (0, 1), set[int]()
        #: names of parameters added since the training began
        self.joined: set[str] = set()
        #: the `start_token` under which ranks have agreed; None if they have to agree
        self._agreed_under: object = None
        #: with two levels, residuals and progress of whole parameters, until ranks agree on their hosts
        self._whole_residuals: tuple[Sequence[Mapping[str, Any]], Mapping[str, Progress]] | None = None

    @property
    def rank_and_size(self) -> tuple[int, int]:
        return self.engine.rank_and_size()

    @property
    def rank(self) -> int:
        return self.rank_and_size[0]

    @property
    def size(self) -> int:
        return self.rank_and_size[1]

    @property
    def sparse(self) -> list[Any]:
        """The parts that are buckets of the plan, in the plan's order, without the dense parameters."""
        return [part for part in self.parts if not part.dense]

    @property
    def parameters(self) -> list[ParameterFacts]:
        return [fact for fact, _ in self.facts.values()]

    @property
    def is_agreed(self) -> bool:
        """True if ranks have agreed since Horovod (or the process group) started, and since the last load."""
        return self._agreed_under is not None and self._agreed_under is self.engine.start_token()

    # what a front end may add

    def plan_for_new(self, facts: Facts) -> Plan:
        """Returns a plan for all parameters when a training begins, or for those that join it later."""
        return fixed_bytes([fact for fact, _ in facts.values()])

    def _raise_plan_failures(self) -> Synchronization[None]:
        """Raises on all ranks if one could not make its first plan, for front ends whose plans can fail."""
        yield from ()

    #: returns this rank's failures; a sharded training adds those of ranks with other shards
    failures_of_all_shards: Any = staticmethod(list)

    def _connect_parts(self, parts: Sequence[Any]) -> None:
        """Called with new parts: a front end registers hooks, or adds them to the optimizer's state."""

    # parts and plans

    def begin(self, facts: Facts, plan: Plan) -> None:
        """Makes a training's first parts, by a plan, without communication: ranks agree in the first step."""
        self.facts = dict(facts)
        self._adopt_rank_and_size(None)
        self.build(plan)
        if self.size == 1:
            self._agreed_under = self.engine.start_token()

    def _adopt_rank_and_size(self, topology: Topology | None) -> None:
        self.made_for = self.rank_and_size
        self.sizes.add(self.made_for[1])
        self.topology = topology

    def topology_for(self, entry: Mapping[str, Any] | None) -> Topology | None:
        """Returns the topology on which ranks agreed, else that of this rank's saved entry, else None."""
        if self.settings.levels == "flat" or (self.topology is not None and self.topology.size == self.size):
            return self.topology
        fits = entry is not None and (entry["rank"], entry["size"]) == self.rank_and_size
        return topology_of(entry) if entry is not None and fits else None

    def build(self, plan: Plan) -> None:
        """Makes new parts for a plan of all parameters; leaves gradients as they are."""
        plan.check(self.parameters)
        parts = self._make_plan_parts(plan, self.facts)
        self.plan, self.parts = plan, list(parts)
        self._connect_parts(parts)

    def _make_plan_parts(self, plan: Plan, facts: Facts, first: int = 0) -> list[Any]:
        """Returns the parts of a plan: buckets, numbered from `first` on, then groups of dense parameters."""
        recipe, specs = self.recipe, []
        for number, names in enumerate(plan.buckets, first):
            chosen = recipe.for_parameter(names[0], facts[names[0]][0].num_elements)
            specs.append(PartSpec(f"bucket{number}.{names[0]}", tuple(names), chosen, number=number))
        dense = recipe.for_dense()
        groups = dense_groups([facts[name][0] for name in plan.dense])
        specs += [
            PartSpec(f"dense.{names[0]}", names, dense, dense=True, number=number)
            for number, names in enumerate(groups, first + len(plan.buckets))
        ]
        return self.make_parts(specs, facts)

    def make_parts(self, specs: Sequence[PartSpec], facts: Facts) -> list[Any]:
        """Returns new parts with residuals of zeros, for the rank and number of ranks of `made_for`."""
        raise NotImplementedError

    def residuals_and_progress(self) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Progress]]:
        """Returns residuals and companions by parameter, and each parameter's progress."""
        if self._whole_residuals is not None:
            return self._whole_residuals
        progress = {name: part.bucket.progress for part in self.parts for name in part.names}
        return residuals_by_parameter(self.parts, self.recipe.feedback.num_companions), progress

    def load_residuals(self, arrays: Sequence[Mapping[str, Any]], progress: Mapping[str, Progress]) -> None:
        """Copies residuals and companions, dicts by parameter, into the parts; resets sparsifiers' states."""
        assign_residuals(self.parts, arrays, progress)
        if self.settings.levels == "host" and self.size > 1:
            is_any = any(np.any(np.asarray(values)) for by_name in arrays for values in by_name.values())
            self._whole_residuals, self._agreed_under = (arrays, progress) if is_any else None, None

    def replan(self, plan: Plan) -> None:
        """Changes the plan between two steps, on all ranks; keeps residuals, resets sparsifiers' states."""
        plan.check(self.parameters)
        kept = self.residuals_and_progress()
        self.build(plan)
        self.load_residuals(*kept)

    def join_new_parameters(self) -> dict[str, tuple[ParameterFacts, Any]]:
        """Makes parts for parameters added to the optimizer, by rank 0's plan; returns these parameters."""
        new = dict(self.engine.facts(self.facts))
        if not new:
            return new
        parameters = [fact for fact, _ in new.values()]
        plan = self.plan_for_new(new)
        together = self.is_agreed
        if together and self.size > 1:
            words = "%s joined the optimizer: waiting for all ranks to have the same parameters join"
            _log.warning(words, ", ".join(new))
            plan = self._carry_out(agreement.plan_of_first_rank(plan, parameters))
        self._append_parts(new, plan)
        self.joined |= set(new)
        return new

    def _append_parts(self, new: Facts, plan: Plan) -> None:
        """Appends the parts of new parameters, by the plan on which ranks have agreed."""
        parts, before = self._make_plan_parts(plan, new, first=len(self.plan.buckets)), self.plan
        buckets, dense = before.buckets + plan.buckets, before.dense + plan.dense
        self.plan = dataclasses.replace(before, buckets=buckets, dense=dense)
        self.facts |= new
        self.parts += parts
        self._connect_parts(parts)

    # what ranks agree upon

    def agree(self) -> None:
        """Makes all ranks agree on step, plan and states, before the first step after a start or a load."""
        if self.is_agreed:
            return
        under = self.engine.start_token()
        start = self._carry_out(self._agreement())
        self.label = start.label
        if start.resets:
            self.reset_states(start)
        if self.topology is not None and start.has_foreign_shards:
            self._carry_out(gather_shards(self.parts, *self.residuals_and_progress()))
        self._whole_residuals, self._agreed_under = None, under
        self.engine.begin(self)
        self.drift.compare_next(self.step)

    def _carry_out(self, coroutine: Synchronization[Any]) -> Any:
        return self.engine.carry_out(coroutine, self.topology)

    def declared(self) -> dict[str, str]:
        """Returns a text for each argument that has to be equal on all ranks."""
        given = {**self.engine.declared(), **self.settings.describe()}
        return agreement.declaration(self.recipe, self.engine.name, **given)

    def _agreement(self) -> Synchronization[agreement.AgreedStatus]:
        yield from agreement.compare(self.declared(), self.parameters)
        yield from self._raise_plan_failures()
        if self.settings.levels == "host":
            before, position = self.topology, own_position(self.engine.placement())
            self.topology = Topology.of((yield from gather_values(position))) if self.size > 1 else None
            # a rank whose number has changed has parts for its old number: then all ranks reset their states
            if self.topology != before and self.made_for == self.rank_and_size:
                self.replan(self.plan)
        return (yield from agreement.agreed_status(self._own_status()))

    def _own_status(self) -> agreement.RankStatus:
        return agreement.RankStatus(
            self.step,
            shared_digest({part.name: part.bucket.state for part in self.sparse}),
            self.made_for,
            self.plan,
            label=self._own_label,
            column=0 if self.topology is None else self.topology.position(self.rank)[1],
            has_foreign_shards=self._whole_residuals is not None,
        )

    def reset_states(self, start: agreement.AgreedStatus) -> None:
        """Resets sparsifiers' states to the agreed step and plan; multiplies residuals by new / old size."""
        old_size, self.made_for, self.step = self.made_for[1], self.rank_and_size, start.step
        self.sizes.add(self.size)
        if self.rank == 0 and start.step > 0:
            words = "sparsifier states are reset at step %d, residuals are kept: %s"
            _log.warning(words, start.step, start.reason)
        arrays, known = self.residuals_and_progress()
        progress = {name: progress_after_agreement(one, start.step) for name, one in known.items()}
        self.build(start.plan)
        self.load_residuals(rescaled(arrays, self.size / old_size, self.recipe.feedback), progress)

    # checkpoints

    def save(self, **more: Any) -> dict[str, Any]:
        """Returns this rank's checkpoint entry, with the fields `more` added; called between two steps."""
        return saved_entry(self, self.engine.to_array, **more)

    def check_fits(self, entry: Mapping[str, Any], needed: Iterable[str], known: Mapping[str, Any]) -> None:
        """Raises if a checked entry lacks a `needed` parameter, or has one that is not `known`."""
        saved = set(Plan.from_dict(entry["plan"]).names())
        unknown, lacking = saved - set(known or saved), set(needed) - saved
        if unknown or lacking:
            raise StateMismatchError(
                f"the saved state is of another model: in it alone {sorted(unknown) or 'nothing'}, "
                f"in this model alone {sorted(lacking) or 'nothing'}{_advice_if_compiled(unknown | lacking)}"
            )
        if known:
            check_shapes(entry, {name: tuple(parameter.shape) for name, parameter in known.items()})

    def load(self, entry: Mapping[str, Any] | None) -> None:
        """Loads a checkpoint entry, or resets with None; ranks agree before the next step."""
        topology = self.topology_for(entry)
        if (self.made_for, self.topology) != (self.rank_and_size, topology):
            self._adopt_rank_and_size(topology)
            self.build(self.plan)
        self._agreed_under = None
        if entry is None:
            self.load_residuals((), {})
            self.step = 0
            return
        if not set(Plan.from_dict(entry["plan"]).names()) <= set(self.facts):
            self.join_new_parameters()
        load_entry(self, entry, self.factor_for(entry))

    def factor_for(self, entry: Mapping[str, Any]) -> float:
        """Returns the factor for a loaded entry's residuals at the present number of ranks."""
        # in elastic training a worker reloads its own entry, whatever the number of ranks was then
        if entry["size"] in self.sizes:
            return self.size / int(entry["size"])
        return residual_factor(entry["rank"], entry["size"], self.size)


def _advice_if_compiled(names: Iterable[str]) -> str:
    """Returns an advice if the names differ because one of two models was compiled; else ""."""
    found = any(name.startswith("_orig_mod.") for name in names)
    remedy = "named_parameters of the module that it was given (model._orig_mod.named_parameters())"
    return f". torch.compile puts _orig_mod. before every name: give {remedy}" if found else ""
