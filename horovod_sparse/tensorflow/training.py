"""The training of variables in TensorFlow's graphs, which become known with their first gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import ArgumentError, UnsupportedError, warn_once
from horovod_sparse.feedback import ParameterRules, Recipe
from horovod_sparse.planning import described_request, first_plan, plan_request
from horovod_sparse.plans import ParameterFacts, Plan, make_plan
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.tensorflow._horovod import hvd, is_elastic, present_start
from horovod_sparse.tensorflow.collectives import carry_out_agreement, carry_out_together, label_of, ranks_of
from horovod_sparse.tensorflow.parts import Part, Task
from horovod_sparse.tensorflow.tensors import as_variable, dtype_name, unique_names
from horovod_sparse.topology import ClusterFacts, Placement, Topology
from horovod_sparse.training.agreement import common_names, compare, plan_of_first_rank
from horovod_sparse.training.collective_errors import raise_together
from horovod_sparse.training.engine import Facts, PartSpec
from horovod_sparse.training.settings import TRANSPORT_VARIABLE, Settings, requested_transport
from horovod_sparse.training.training import Training

if TYPE_CHECKING:
    from horovod_sparse.planning.request import Decision, PlanRequest


class VariablesEngine:
    """The `Engine` (framework and collectives) for the variables of one tape or optimizer."""

    start_token = staticmethod(present_start)

    def __init__(self, process_set: Any, **arguments: object) -> None:
        self.name, self.process_set = "horovod_sparse.tensorflow", process_set
        #: arguments that change the sums; and further ones of the tape or optimizer, compared by ranks, too
        self.arguments: Mapping[str, object] = arguments
        self.given: Mapping[str, object] = {}
        #: with which names of collectives begin; empty before the first gradients
        self.label = ""
        #: the `Watch` with the deadline for collectives in which ranks agree
        self.watch: Any = None

    def rank_and_size(self) -> tuple[int, int]:
        return int(self.process_set.rank()), int(self.process_set.size())

    def placement(self) -> Placement:
        return Placement.of_horovod(hvd, self.process_set)

    def facts(self, known: Facts) -> Facts:
        """Returns no facts, since variables become known with their first gradients."""
        return {}

    def begin(self, training: Training) -> None:
        """Does nothing when ranks have new hosts: parts know them, and are made anew."""

    def carry_out(self, coroutine: Synchronization[Any], topology: Topology | None) -> Any:
        given = self.process_set, f"{self.label}.start", topology
        return carry_out_together(coroutine, *given, looks=True, watch=self.watch)

    def to_array(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def declared(self) -> dict[str, object]:
        return {"process_set": ranks_of(self.process_set), **self.arguments, **self.given}


class VariablesTraining(Training):
    """A training in TensorFlow, which makes buckets for variables when they have their first gradient."""

    engine: VariablesEngine
    parts: list[Part]

    def __init__(self, engine: VariablesEngine, recipe: Recipe, settings: Settings, groups: Any) -> None:
        super().__init__(engine, recipe, settings)
        if requested_transport() == "pairs":
            raise UnsupportedError(
                f"{TRANSPORT_VARIABLE}=pairs is for PyTorch: in a graph of TensorFlow all rounds are "
                "operations of Horovod's. Unset it"
            )
        if isinstance(groups, list):
            groups = [[as_variable(variable) for variable in group] for group in groups]
        self.request: PlanRequest | None
        self.request, plan = plan_request(**settings.planning, groups=groups)
        self._plan_arguments = {"groups": groups, "bucket_bytes": settings.bucket_bytes, "plan": plan}
        self.decision: Decision | None = None
        #: why variables stay dense, see `FirstPlan.selection`
        self.selection = ""
        #: tasks of the present plan; graphs traced for another plan raise
        self._by_task: dict[Task, Part] = {}
        self._names: dict[Any, str] = {}
        #: the last step's error on the host; in a graph TensorFlow raises another one, which quotes it
        self.last_error: BaseException | None = None

    def make_parts(self, specs: Sequence[PartSpec], facts: Facts) -> list[Part]:
        levels, label = self.settings.levels, self.engine.label
        if is_elastic():
            for spec in specs:
                sparsifier = spec.recipe.sparsifier
                with contextlib.suppress(ArgumentError):  # teams=3 takes neither number of ranks
                    if levels == "flat" and sparsifier.rounds(2) == sparsifier.rounds(4):
                        continue
                raise UnsupportedError(
                    f"{sparsifier.describe()} with levels={levels!r} has other collectives at each "
                    "number of ranks, and an elastic graph of TensorFlow is traced once: give topk or "
                    "exdyna, say, and levels='flat'"
                )
        scale = None if self.engine.arguments["op"] == "Average" else 1.0
        # a variable that stays dense is summed alone: Horovod joins the messages of a graph's operations
        single = [
            dataclasses.replace(spec, label=f"dense.{name}", names=(name,)) if spec.dense else spec
            for spec in specs
            for name in (spec.names if spec.dense else spec.names[:1])
        ]
        return [
            Part(spec, facts, self.made_for, None if spec.whole else self.topology, label=label, scale=scale)
            for spec in single
        ]

    @property
    def process_set(self) -> Any:
        return self.engine.process_set

    @property
    def tasks(self) -> list[Task]:
        return [part.task for part in self.parts]

    @property
    def under_way(self) -> bool:
        """True between the begin and the end of a step."""
        return any(part.task.under_way for part in self.parts)

    def name_of(self, variable: Any) -> str | None:
        return self._names.get(variable.ref())

    def checked_parts_of(self, names: Collection[str], slices: Collection[str]) -> list[Part]:
        """Returns the parts that contain variables `names`; raises if one contains any of `slices`, too."""
        parts = [part for part in self.parts if any(name in names for name in part.names)]
        for part in parts:
            if sparse := sorted(set(part.names).intersection(slices)):
                raise UnsupportedError(
                    f"{sparse[0]} shares a bucket with {next(n for n in part.names if n in names)}, but its "
                    "gradient is tf.IndexedSlices now: give sparse_as_dense=True"
                )
        return parts

    def part_of(self, task: Task) -> Part:
        """Returns a task's part; raises in a graph that was traced for an earlier plan."""
        part = self._by_task.get(task)
        if part is None:
            raise UnsupportedError(
                "this function was traced before ranks took another plan: trace it again, by "
                "step = tf.function(step.python_function), or by model.make_train_function(force=True) "
                "where Keras has made it"
            )
        return part

    # new variables

    def add_new_variables(self, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
        """Makes buckets for variables that have their first gradient; returns True if there are any."""
        if not self.engine.label:
            self.engine.label = label_of("horovod_sparse", self.process_set, variables)
        new = [
            variable
            for gradient, variable in zip(gradients, variables, strict=True)
            if is_sparsifiable(gradient, variable) and variable.ref() not in self._names
        ]
        if not new:
            return False
        facts, plan = carry_out_agreement(self._agree_on_plan(new), self.process_set, self.engine.watch)
        self._names.update({variable.ref(): name for name, variable in zip(facts, new, strict=True)})
        if not self.facts:
            self.begin(facts, plan)
            _warn_of_compressor_per_step(new[0], self.telemetry)
            return True
        self._append_parts(facts, plan)
        return True

    def _connect_parts(self, parts: Sequence[Any]) -> None:
        self._by_task |= {part.task: part for part in parts}

    def _agree_on_plan(self, new: Sequence[Any]) -> Synchronization[tuple[Facts, Plan]]:
        """Compares ranks' models; returns the facts of new variables by rank 0's names, and rank 0's plan."""
        rules, request = self.recipe.rules, self.request
        if not self.facts:
            yield from compare(self.declared())
        found = facts_of(unique_names(new, list(self.facts)), new, rules)
        label, names = yield from common_names(self.engine.label, [fact for fact, _ in found.values()])
        facts = {
            names[name]: (dataclasses.replace(fact, name=names[name]), variable)
            for name, (fact, variable) in found.items()
        }
        rules.warn_of_unmatched(facts)
        parameters = [fact for fact, _ in facts.values()]
        if self.facts:  # the other requests were about the earlier variables
            plan = make_plan(facts, bucket_bytes=self._plan_arguments["bucket_bytes"])
        else:
            yield from compare(described_request(request))
            cluster = functools.partial(ClusterFacts.of, self.process_set, "tensorflow", hvd)
            first = first_plan(request, facts, self.recipe.sparsifier, cluster, **self._arguments_for(new))
            if request is not None:
                yield from raise_together(first.failure)
            plan, self.decision, self.request = first.plan, first.decision, first.request
            self.selection, self.engine.label = first.selection, label
        return facts, (yield from plan_of_first_rank(plan, parameters))

    def _arguments_for(self, new: Sequence[Any]) -> dict[str, Any]:
        """Returns the arguments of `make_plan` for new variables, without groups of other variables."""
        groups = self._plan_arguments["groups"]
        if not isinstance(groups, list):
            return self._plan_arguments
        known = {id(variable) for variable in new}
        present = [[variable for variable in group if id(variable) in known] for group in groups]
        return {**self._plan_arguments, "groups": [group for group in present if group]}

    # new plans

    def build(self, plan: Plan) -> None:
        """Makes the parts of a plan; graphs traced for other collectives become invalid, which raise."""
        former, known = self.parts, plan == self.plan and bool(self._by_task)
        super().build(plan)
        goes_on = known and [one.task.kinds for one in former] == [one.task.kinds for one in self.parts]
        if goes_on:
            for before, part in zip(former, self.parts, strict=True):
                part.task = before.task
        self._by_task = {part.task: part for part in self.parts}
        if former and not goes_on:
            self._on_invalid_traces()

    def _on_invalid_traces(self) -> None:
        """Called when a new plan makes traced functions invalid; `GradientSynchronizer` drops its own."""


#: attribute of a variable: telemetries of the last two trainings that it was in
_LIVES = "_horovod_sparse_telemetries"


def _warn_of_compressor_per_step(variable: Any, telemetry: Telemetry) -> None:
    """Logs a warning if each step makes a new compressor, which loses the residual."""
    lives = getattr(variable, _LIVES, ())
    if [life.num_steps for life in lives] == [1, 1]:
        warn_once(
            "each step made a new compressor for %s, which loses the residual: "
            "make it once, outside of the training loop",
            variable.name,
        )
    setattr(variable, _LIVES, (*lives[-1:], telemetry))


def facts_of(names: Sequence[str], variables: Sequence[Any], rules: ParameterRules) -> Facts:
    """Returns each variable with its facts (size, dtype, density, shape), by name."""
    facts = {}
    for name, variable in zip(names, variables, strict=True):
        num_elements, dtype = tf.TensorShape(variable.shape).num_elements(), dtype_name(variable.dtype)
        if num_elements is None or dtype is None:
            raise UnsupportedError(
                f"{name} is {tf.as_dtype(variable.dtype).name} of shape {variable.shape}: a "
                "sparsifier takes float32, float64, float16 or bfloat16 of known shape; build the model first"
            )
        density = rules.density_of(name, num_elements) or 0.0
        shape = tuple(tf.TensorShape(variable.shape).as_list())
        facts[name] = ParameterFacts(name, num_elements, dtype, density=density, shape=shape), variable
    return facts


def is_sparsifiable(gradient: Any, variable: Any) -> bool:
    """True if a gradient can be sparsified: a dense, non-empty float tensor of a variable."""
    return (
        gradient is not None
        and not isinstance(gradient, tf.IndexedSlices)
        and not isinstance(variable, tf.Tensor)
        and dtype_name(variable.dtype) is not None
        and tf.TensorShape(variable.shape).num_elements() != 0
    )
