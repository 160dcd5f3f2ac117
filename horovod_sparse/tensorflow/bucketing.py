"""Which variable is in which bucket: known by identity, from the first gradient on."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.feedback.state import shared_digest
from horovod_sparse.frontend.agreement import Standing, Start, agreed_start, compared
from horovod_sparse.frontend.decision import Decision
from horovod_sparse.frontend.levels import (
    Choose,
    agreed_topology,
    assumed_topology,
    by_cost,
    gathered_shards,
    hold_elsewhere,
    own_place,
)
from horovod_sparse.frontend.parts import assign_residuals, held_residuals, needs_bucket
from horovod_sparse.frontend.plan_request import make_plan, plan_request
from horovod_sparse.frontend.shared_memory import agreed_memory
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.tensorflow import planning
from horovod_sparse.tensorflow._horovod import hvd, is_elastic
from horovod_sparse.tensorflow.calibration import carry_out_together
from horovod_sparse.tensorflow.parts import DenseVariable, Part, Place, SparseBucket
from horovod_sparse.tensorflow.tensors import as_variable, dtype_name, unique_names
from horovod_sparse.topology import Topology


class Bucketing:
    """The buckets and dense variables of a tape or optimizer, made when gradients are seen.

    Args:
        recipe: what to do with a bucket.
        process_set: the ranks that take part, which agree about a plan.
        prefix: of the collectives' names.
        place: tells (rank, size) within the process set, at any time.
        levels: see `horovod_sparse.frontend.levels`.
        **asked: how buckets are made: see `plan_request`.

    Attributes:
        request: what `merging` and `tensor_selection` ask for, None without them.
        decision: why the plan was taken, where times decided about it.
        selection: see `FirstPlan.selection`.
        label: of the collectives, known with the first gradients; part i communicates as ``{label}.{i}``.
        parts: buckets and dense variables, in the order in which they were planned.
        place: tells (rank, size) within the process set.
        version: number of the plan: graphs that were traced for another one are refused.
    """

    def __init__(
        self,
        recipe: Recipe,
        process_set: Any,
        prefix: str,
        place: Place,
        levels: str = "flat",
        **asked: Any,
    ) -> None:
        self._levels = levels
        #: which ranks share a host, as buckets are made for; None for one level
        self.topology: Topology | None = None
        self._recipe, self._process_set, self._prefix, self.place = recipe, process_set, prefix, place
        self.label = ""
        if isinstance(asked.get("groups"), list):
            asked["groups"] = [[as_variable(variable) for variable in group] for group in asked["groups"]]
        self.request, given = plan_request(**asked, density=recipe.auto)
        self._given: dict[str, Any] = {key: asked.get(key) for key in ("groups", "bucket_bytes")}
        self._given["plan"] = given
        self.decision: Decision | None = None
        self.selection = ""
        self.parts: list[Part] = []
        self.version = 0
        self._facts: planning.Facts = {}
        self._names: dict[Any, str] = {}
        self._num_plans = 0
        self._num_parts = 0
        #: that the plan says, if it does
        self._density: float | None = None

    @property
    def parameters(self) -> list[ParameterFacts]:
        """Of the variables that have their bucket, what a plan looks at."""
        return [fact for fact, _ in self._facts.values()]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the variables that have their bucket, in the order in which they were seen."""
        return tuple(self._names.values())

    @property
    def sparse(self) -> list[SparseBucket]:
        """The parts that are sparsified."""
        return [part for part in self.parts if isinstance(part, SparseBucket) and not part.dense]

    @property
    def plan(self) -> Plan:
        """Which variables form which bucket."""
        dense = [part.names[0] for part in self.parts if part.dense]
        return Plan(tuple(part.names for part in self.sparse), tuple(dense), self._density)

    def name_of(self, variable: Any) -> str | None:
        """The name of a variable that has its bucket."""
        return self._names.get(variable.ref())

    def beside(self, variables: Collection[Any]) -> list[SparseBucket]:
        """The sparsified buckets that these variables have, those that have one."""
        names = {self.name_of(variable) for variable in variables} - {None}
        return [part for part in self.sparse if names & set(part.names)]

    def absent(self, variables: Sequence[Any]) -> dict[str, Any]:
        """By name, the variables that share a bucket with some of these and are not among them."""
        given = {self._names[variable.ref()] for variable in variables if variable.ref() in self._names}
        return {
            name: self._facts[name][1]
            for part in self.parts
            if given.intersection(part.names)
            for name in part.names
            if name not in given
        }

    def of(self, names: Collection[str]) -> list[Part]:
        """The parts of these variables.

        Raises:
            UnsupportedError: if another variable of one of them has `tf.IndexedSlices` for once.
        """
        parts = [part for part in self.parts if any(name in names for name in part.names)]
        for part in parts:
            if absent := sorted(set(part.names) - set(names)):
                raise UnsupportedError(
                    f"{absent[0]} shares a bucket with {next(n for n in part.names if n in names)}, but its "
                    "gradient is tf.IndexedSlices now: give sparse_as_dense=True"
                )
        return parts

    def add(self, gradients: Sequence[Any], variables: Sequence[Any], settings: Mapping[str, str]) -> bool:
        """Gives variables whose first gradient this is their buckets. A collective, if there are any.

        Args:
            gradients: see `GradientSynchronizer.start`.
            variables: see there.
            settings: what has to be equal on all ranks, in words, by argument.

        Returns:
            Whether there were any.
        """
        if not self.label:
            self.label = planning.label_of(self._prefix, self._process_set, variables)
        new = [
            variable
            for gradient, variable in zip(gradients, variables, strict=True)
            if is_sparsifiable(gradient, variable) and variable.ref() not in self._names
        ]
        if not new:
            return False
        if self._num_plans == 0:
            planning.together(compared(settings), self._process_set)
        facts = planning.facts_of(unique_names(new, list(self._facts)), new, self._recipe.rules)
        label, facts = planning.renamed(facts, self.label, self._process_set)
        names = list(facts)
        self._recipe.rules.hint(facts)
        if self._num_plans == 0:
            arguments, sparsifier = self._given_for(new), self._recipe.sparsifier
            parameters, request = [fact for fact, _ in facts.values()], self.request
            first = planning.planned(
                *(facts, sparsifier, self._process_set, request, arguments),
                lambda: self._assumed(by_cost(sparsifier, parameters, request)),
            )
            plan, self.decision, self.request = first.plan, first.decision, first.request
            self.selection = first.selection
            self.label = label
        else:  # what else was asked for concerned the variables that were there
            plan = make_plan(facts, bucket_bytes=self._given["bucket_bytes"])
            plan = dataclasses.replace(plan, density=self._density)
            plan = planning.agree(plan, facts, self._process_set)
        self._facts = {**self._facts, **facts}
        if not self.parts:
            self.topology = self._assumed(self._choose_levels)
        self._names.update({variable.ref(): name for name, variable in zip(names, new, strict=True)})
        self._make_parts(plan)
        self._num_plans += 1
        return True

    def replan(self, plan: Plan, decision: Decision | None = None) -> None:
        """Other buckets, the residuals kept; the state of the sparsifiers starts anew.

        Args:
            plan: of all variables that have their bucket, the same on all ranks.
            decision: why it is taken.

        Raises:
            ArgumentError: if it does not fit. Nothing has changed then.
        """
        plan.check(self.parameters)
        if plan.density is None:  # one by hand says of buckets alone
            plan = dataclasses.replace(plan, density=self._density)
        kept = held_residuals(self.parts, self._recipe.feedback.num_companions)
        progress = {
            name: part.bucket.progress
            for part in self.parts
            if isinstance(part, SparseBucket)
            for name in part.names
        }
        self.parts, self.decision = [], decision
        self.version += 1
        self._make_parts(plan)
        assign_residuals(self.parts, kept, progress)

    def agreed_start(self, step: int, settings: Mapping[str, str]) -> Start:
        """Exchanges where all ranks stand; sparsifiers start anew where that differs. A collective.

        Args:
            step: of the training.
            settings: what has to be equal on all ranks, in words, by argument.

        Raises:
            StateMismatchError: on every rank alike: they do not train the same.
        """
        for part in self.parts:
            part.close()

        def agreement() -> Synchronization[Start]:
            yield from compared(settings, self.parameters)
            made_for = self.sparse[0].made_for if self.sparse else self.place()
            told = agreed_topology(self._levels, own_place(hvd), self._choose_levels)
            self._move_to(self._hosts((yield from told)))
            standing = Standing(
                step,
                shared_digest({part.names[0]: part.bucket.state for part in self.sparse}),
                made_for,
                self.plan,
                self.parameters,
                column=0 if self.topology is None else self.topology.place(self.place()[0])[1],
                elsewhere=hold_elsewhere(self.parts),
            )
            return (yield from agreed_start(standing))

        start: Start = self._together(agreement())
        if start.anew:
            if start.plan != self.plan:
                self.replan(start.plan)
            for part in self.parts:
                part.start_anew(start.step)
        if self.topology is not None and start.elsewhere:
            self._together(gathered_shards(self.parts))
        if self.topology is not None:
            self._together(agreed_memory(self.sparse, self.place()[0], self.topology))
        return start

    @property
    def mates(self) -> tuple[int, ...]:
        """The ranks whose gradients are summed before they are sparsified: with one level this one alone."""
        rank = self.place()[0]
        return (rank,) if self.topology is None else self.topology.group("host", rank)

    def _together(self, coroutine: Synchronization[Any]) -> Any:
        # a graph that is being traced, or none in a host function's thread
        with tf.init_scope(), tf.device("/cpu:0"):
            looking = planning.building.looking(self._process_set)
            name = f"{self.label}.start"
            return carry_out_together(coroutine, self._process_set, name, looking, self.topology)

    @property
    def _choose_levels(self) -> Choose:
        return by_cost(self._recipe.sparsifier, self.parameters, self.request)

    def _assumed(self, choose: Choose) -> Topology | None:
        return self._hosts(assumed_topology(self._levels, hvd, self._process_set, choose))

    def _hosts(self, topology: Topology | None) -> Topology | None:
        """As buckets are made for it: in elastic training graphs are traced once, with two levels or one."""
        if topology is None and self._levels != "flat" and is_elastic():
            return Topology.regular(self.place()[1], 1)
        return topology

    def _move_to(self, topology: Topology | None) -> None:
        """Buckets for other hosts; residuals are kept, states start anew."""
        if topology != self.topology:
            self.topology = topology
            for part in self.sparse:
                part.start_anew(part.bucket.progress.step)

    def at(self, version: int, positions: Sequence[int]) -> list[Part]:
        """Parts by their positions in `parts`.

        Raises:
            UnsupportedError: if the plan has changed meanwhile.
        """
        if version != self.version:
            raise UnsupportedError(
                "this function was traced before the plan changed: trace it again, by "
                "step = tf.function(step.python_function), or by model.make_train_function(force=True) "
                "where Keras has made it (hvd.callbacks.ReplanCallback does so)"
            )
        return [self.parts[position] for position in positions]

    def _given_for(self, new: Sequence[Any]) -> dict[str, Any]:
        """The arguments of `make_plan`; of groups, the variables that are there."""
        groups = self._given["groups"]
        if not isinstance(groups, list):
            return self._given
        known = {id(variable) for variable in new}
        present = [[variable for variable in group if id(variable) in known] for group in groups]
        return {**self._given, "groups": [group for group in present if group]}

    def _make_parts(self, plan: Plan) -> None:
        chosen, self._density = self._recipe.at(plan.density), plan.density
        for names in plan.buckets:
            first = self._facts[names[0]][0]
            recipe = chosen.for_parameter(first.name, first.num_elements)
            self.parts.append(self._bucket(f"bucket{len(self.parts)}", names, recipe))
        for name in plan.dense:
            self.parts.append(self._dense(name))

    def _bucket(
        self, label: str, names: Sequence[str], recipe: Recipe, *, dense: bool = False
    ) -> SparseBucket:
        shapes, dtype = [tuple(self._facts[name][1].shape) for name in names], self._facts[names[0]][0].dtype
        label = f"{label}.{names[0]}"
        return SparseBucket(
            *(label, self._collective(), names, shapes, dtype, recipe, self.place),
            dense=dense,
            hosts=lambda: self.topology,
        )

    def _dense(self, name: str) -> Part:
        """A variable that the plan leaves dense, with the feedback's share that a dense one has."""
        recipe = self._recipe.for_dense()
        if needs_bucket(recipe):
            return self._bucket("dense", [name], recipe, dense=True)
        fact, variable = self._facts[name]
        return DenseVariable(name, self._collective(), tuple(variable.shape), fact.dtype, self.place)

    def _collective(self) -> str:
        """A name that no part has had before: another plan's requests are of other kinds."""
        self._num_parts += 1
        return f"{self.label}.{self._num_parts - 1}"


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
