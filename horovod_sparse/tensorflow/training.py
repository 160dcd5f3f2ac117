"""The training of variables that graphs synchronize: known by identity, from the first gradient on."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import ParameterRules, Recipe
from horovod_sparse.planning import by_cost, plan_request
from horovod_sparse.plans.dense import ClusterFacts
from horovod_sparse.plans.fixed import make_plan
from horovod_sparse.plans.plan import ParameterFacts, Plan
from horovod_sparse.tensorflow._horovod import hvd, is_elastic, present_start
from horovod_sparse.tensorflow.agreement import carry_out_together, label_of, ranks_of, together
from horovod_sparse.tensorflow.parts import DenseVariable, Part, SparseBucket
from horovod_sparse.tensorflow.tensors import as_variable, dtype_name, unique_names
from horovod_sparse.topology import Topology
from horovod_sparse.training.agreement import (
    AgreedStatus,
    RankStatus,
    common_names,
    compared,
    kept_share,
    plan_of_first_rank,
)
from horovod_sparse.training.collective_errors import raise_together
from horovod_sparse.training.engine import Facts, PartSpec
from horovod_sparse.training.first_plan import Planner, check_agreement, first_plan
from horovod_sparse.training.host_topology import ChosenLevels, Ranks, assumed_topology
from horovod_sparse.training.parts import assign_residuals
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.state import load_entry, share_factor
from horovod_sparse.training.training import Training

if TYPE_CHECKING:
    from horovod_sparse.planning.request import Decision


class VariablesEngine:
    """An `Engine` for the variables of one tape or optimizer."""

    start_token = staticmethod(present_start)

    def __init__(self, process_set: Any, levels: str, **arguments: object) -> None:
        self.name, self.process_set, self._levels = "horovod_sparse.tensorflow", process_set, levels
        #: that change what is applied; and those of the tape or optimizer, which may say more of the same
        self._arguments: Mapping[str, object] = arguments
        self.given: Mapping[str, object] = {}
        #: of collectives, known with the first gradients; part i communicates as ``{label}.{i}``
        self.label, self._num_parts = "", 0
        self._topology: Topology | None = None

    def rank_and_size(self) -> tuple[int, int]:
        return int(self.process_set.rank()), int(self.process_set.size())

    def ranks(self) -> Ranks:
        return Ranks.of_horovod(hvd, self.process_set)

    def facts(self, known: Facts) -> Facts:
        """None: variables come with their first gradients."""
        return {}

    def make_parts(
        self, specs: Sequence[PartSpec], facts: Facts, place: tuple[int, int], topology: Topology | None
    ) -> list[Part]:
        """Parts that go on at any place: a graph refers to them as long as their plan is the same."""
        parts: list[Part] = []
        for spec in specs:
            if spec.recipe is not None and not spec.dense:
                parts.append(self._bucket(spec.label, spec.names, facts, spec.recipe))
                continue
            for name in spec.names:
                fact, variable = facts[name]
                if spec.recipe is not None:
                    parts.append(self._bucket(f"dense.{name}", [name], facts, spec.recipe, dense=True))
                else:
                    shape, collective = tuple(variable.shape), self._collective()
                    parts.append(DenseVariable(name, collective, shape, fact.dtype, self.rank_and_size))
        return parts

    def _bucket(
        self, label: str, names: Sequence[str], facts: Facts, recipe: Recipe, *, dense: bool = False
    ) -> SparseBucket:
        shapes, dtype = [tuple(facts[name][1].shape) for name in names], facts[names[0]][0].dtype
        own = label, self._collective(), names, shapes, dtype, recipe, self.rank_and_size
        return SparseBucket(*own, dense=dense, hosts=lambda: self.hosts)

    def _collective(self) -> str:
        """A name that no part has had before: another plan's requests are of other kinds."""
        self._num_parts += 1
        return f"{self.label}.{self._num_parts - 1}"

    @property
    def hosts(self) -> Topology | None:
        """As parts are made for it: in elastic training graphs are traced once, with two levels or one."""
        if self._topology is None and self._levels != "flat" and is_elastic():
            return Topology.regular(self.rank_and_size()[1], 1)
        return self._topology

    def move_to(self, topology: Topology | None) -> None:
        self._topology = topology

    def carry_out(self, coroutine: Synchronization[Any], topology: Topology | None) -> Any:
        return carry_out_together(coroutine, self.process_set, f"{self.label}.start", topology, looks=True)

    def to_array(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def declared(self) -> dict[str, object]:
        return {"process_set": ranks_of(self.process_set), **self._arguments, **self.given}


_log = logging.getLogger("horovod_sparse")


class VariablesTraining(Training):
    """Variables get their bucket with their first gradient, and keep it.

    A graph refers to parts by version of the plan and position. So a start, a load and other ranks leave the
    parts where they are, and have them go on; only another plan makes others, and functions be traced again.
    """

    engine: VariablesEngine
    parts: list[Part]

    def __init__(
        self, engine: VariablesEngine, recipe: Recipe, settings: Settings, prefix: str, groups: Any
    ) -> None:
        super().__init__(engine, recipe, settings)
        if isinstance(groups, list):
            groups = [[as_variable(variable) for variable in group] for group in groups]
        self.request: Planner | None
        self.request, plan = plan_request(**settings.planning, groups=groups, density=recipe.auto)
        self._given = {"groups": groups, "bucket_bytes": settings.bucket_bytes, "plan": plan}
        self._prefix = prefix
        self.decision: Decision | None = None
        #: why variables stay dense, see `FirstPlan.selection`
        self.selection = ""
        #: of the plan: graphs that were traced for another one are refused
        self.version = 0
        self._names: dict[Any, str] = {}
        #: of the last step, raised on the host; in a graph TensorFlow raises one of its own, which quotes it
        self.last_error: BaseException | None = None

    @property
    def process_set(self) -> Any:
        """The ranks that take part."""
        return self.engine.process_set

    @property
    def names(self) -> tuple[str, ...]:
        """Of the variables that have their bucket, in the order in which they were seen."""
        return tuple(self._names.values())

    @property
    def under_way(self) -> bool:
        """Whether a step has begun that has not come to its end."""
        return any(part.task.under_way for part in self.parts)

    def name_of(self, variable: Any) -> str | None:
        """The name of a variable that has its bucket."""
        return self._names.get(variable.ref())

    def absent(self, variables: Sequence[Any]) -> dict[str, Any]:
        """By name, the variables that share a bucket with some of these and are not among them."""
        given = {self.name_of(variable) for variable in variables} - {None}
        return {
            name: self.facts[name][1]
            for part in self.parts
            if given.intersection(part.names)
            for name in part.names
            if name not in given
        }

    def parts_of(self, names: Collection[str]) -> list[Part]:
        """The parts of these variables."""
        parts = [part for part in self.parts if any(name in names for name in part.names)]
        for part in parts:
            if absent := sorted(set(part.names) - set(names)):
                raise UnsupportedError(
                    f"{absent[0]} shares a bucket with {next(n for n in part.names if n in names)}, but its "
                    "gradient is tf.IndexedSlices now: give sparse_as_dense=True"
                )
        return parts

    def at(self, version: int, positions: Sequence[int]) -> list[Part]:
        """Parts by their positions in `parts`."""
        if version != self.version:
            raise UnsupportedError(
                "this function was traced before the plan changed: trace it again, by "
                "step = tf.function(step.python_function), or by model.make_train_function(force=True) "
                "where Keras has made it (hvd.callbacks.ReplanCallback does so)"
            )
        return [self.parts[position] for position in positions]

    # variables that come

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
        """Gives variables whose first gradient this is their buckets; a collective, if there are any."""
        if not self.engine.label:
            self.engine.label = label_of(self._prefix, self.process_set, variables)
        new = [
            variable
            for gradient, variable in zip(gradients, variables, strict=True)
            if is_sparsifiable(gradient, variable) and variable.ref() not in self._names
        ]
        if not new:
            return False
        facts, plan = together(self._agreed(new), self.process_set)
        self._names.update({variable.ref(): name for name, variable in zip(facts, new, strict=True)})
        if not self.facts:
            self.facts = dict(facts)
            self._assume_place()
            self.build(plan)
            return True
        before, self.facts = self.plan, {**self.facts, **facts}
        self.parts += self._made(plan, facts, first=len(before.buckets))
        self.plan = Plan(before.buckets + plan.buckets, before.dense + plan.dense, before.density)
        return True

    def _agreed(self, new: Sequence[Any]) -> Synchronization[tuple[Facts, Plan]]:
        """Variables by the first rank's names, and its plan for them; ranks compare their models."""
        rules, request = self.recipe.rules, self.request
        if not self.facts:
            yield from compared(self.declared())
        found = _facts_of(unique_names(new, list(self.facts)), new, rules)
        label, names = yield from common_names(self.engine.label, [fact for fact, _ in found.values()])
        facts = {
            names[name]: (dataclasses.replace(fact, name=names[name]), variable)
            for name, (fact, variable) in found.items()
        }
        rules.hint(facts)
        parameters = [fact for fact, _ in facts.values()]
        if self.facts:  # what else was asked for concerned the variables that were there
            plan = make_plan(facts, bucket_bytes=self._given["bucket_bytes"])
            plan = dataclasses.replace(plan, density=self.plan.density)
        else:
            yield from check_agreement(request)

            def cluster() -> ClusterFacts:
                choose = by_cost(self.recipe.sparsifier, parameters, request)
                topology = assumed_topology(self.settings.levels, self.engine.ranks, choose)
                here = ClusterFacts.of(self.process_set, "tensorflow", hvd)
                return dataclasses.replace(here, topology=topology)

            first = first_plan(request, facts, self.recipe.sparsifier, cluster, **self._given_for(new))
            if request is not None:
                yield from raise_together(first.failure)
            plan, self.decision, self.request = first.plan, first.decision, first.request
            self.selection, self.engine.label = first.selection, label
        return facts, (yield from plan_of_first_rank(plan, parameters))

    def _given_for(self, new: Sequence[Any]) -> dict[str, Any]:
        """The arguments of `make_plan`; of groups, the variables that are there."""
        groups = self._given["groups"]
        if not isinstance(groups, list):
            return self._given
        known = {id(variable) for variable in new}
        present = [[variable for variable in group if id(variable) in known] for group in groups]
        return {**self._given, "groups": [group for group in present if group]}

    def choose_levels(self, num_hosts: int, per_host: int) -> ChosenLevels:
        return by_cost(self.recipe.sparsifier, self.parameters, self.request)(num_hosts, per_host)

    # other plans, starts and states

    def change_plan(self, plan: Plan, decision: Decision | None = None) -> None:
        """Other buckets, the residuals kept; functions have to be traced again, also for an equal plan."""
        super().replan(plan)
        self.version += 1
        self.decision = decision

    def replan(self, plan: Plan) -> None:
        """What all ranks agree upon: with the same plan the parts of graphs go on, on other hosts, too."""
        if plan != self.plan:
            self.change_plan(plan)
            return
        for part in self.sparse:
            part.start_anew(part.bucket.progress.step)

    def _status(self) -> RankStatus:
        made_for = self.sparse[0].made_for if self.sparse else self.rank_and_size
        return dataclasses.replace(super()._status(), made_for=made_for)

    def start_anew(self, start: AgreedStatus) -> None:
        self.made_for, self.step = self.rank_and_size, start.step
        self.sizes.add(self.size)
        if start.plan != self.plan:
            self.change_plan(start.plan)
        for part in self.parts:
            part.start_anew(start.step)
        _log.info("Horovod has started: sparsifiers start anew at step %d: %s", start.step, start.reason)

    def load(self, entry: Mapping[str, Any] | None, names: Mapping[str, str] | None = None) -> None:
        """Continues from an entry, by what its names are called here; from nothing, if it is None."""
        if entry is None:
            self.step = 0
            assign_residuals(self.parts, (), {})
            return
        for part in self.parts:  # those that were made for another place start anew here
            if not isinstance(part, SparseBucket) or part.made_for != self.rank_and_size:
                part.start_anew(self.step)
        # in elastic training what this worker saved at another size is its own: no other has a share in it
        old_size, own = entry["size"], entry["size"] in self.sizes
        factor = kept_share(old_size, self.size) if own else share_factor(entry["rank"], old_size, self.size)
        load_entry(self, entry, factor, names)
        self.moved()

    def moved(self) -> None:
        """Residuals have been put into buckets: those of others' shards go there in the next step."""
        if self.topology is not None:
            self._agreed_under = None


def _facts_of(names: Sequence[str], variables: Sequence[Any], rules: ParameterRules) -> Facts:
    """Facts and variable, by name, in the model's order."""
    facts = {}
    for name, variable in zip(names, variables, strict=True):
        num_elements, dtype = tf.TensorShape(variable.shape).num_elements(), dtype_name(variable.dtype)
        if num_elements is None or dtype is None:
            raise UnsupportedError(
                f"{name} is {tf.as_dtype(variable.dtype).name} of shape {variable.shape}: gradients of "
                "float32, float64, float16 and bfloat16 and of known shape can be synchronized sparsely"
            )
        density = rules.density_of(name, num_elements) or 0.0
        shape = tuple(tf.TensorShape(variable.shape).as_list())
        facts[name] = ParameterFacts(name, num_elements, dtype, density=density, shape=shape), variable
    return facts


def is_sparsifiable(gradient: Any, variable: Any) -> bool:
    """Whether a bucket can take a gradient: floating point, not None, no slices, not empty.

    And not that of a tensor, which is another one in every step: it has no residual.
    """
    return (
        gradient is not None
        and not isinstance(gradient, tf.IndexedSlices)
        and not isinstance(variable, tf.Tensor)
        and dtype_name(variable.dtype) is not None
        and tf.TensorShape(variable.shape).num_elements() != 0
    )
