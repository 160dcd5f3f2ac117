"""Which variable is in which bucket: known by identity, from the first gradient on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.frontend import make_plan
from horovod_sparse.merging import Plan
from horovod_sparse.tensorflow import planning
from horovod_sparse.tensorflow.parts import DenseBucket, DenseVariable, Part, Place, SparseBucket
from horovod_sparse.tensorflow.tensors import as_variable, dtype_name, unique_names

__all__ = ["Buckets"]


class Buckets:
    """The buckets and dense variables of a tape or optimizer, made when gradients are seen.

    Args:
        recipe: what to do with a bucket.
        process_set: the ranks that take part, which agree about a plan.
        name: of the collectives; part i communicates as ``{name}.{i}``.
        place: tells (rank, size) within the process set, at any time.
        groups: a number of buckets, or lists of variables that form one each.
        bucket_bytes: of gradient in a bucket; 32 MiB if left out.
        plan: which variables form which bucket, in place of both.

    Attributes:
        parts: buckets and dense variables, in the order in which they were planned.
    """

    def __init__(
        self,
        recipe: Recipe,
        process_set: Any,
        name: str,
        place: Place,
        *,
        groups: Any = None,
        bucket_bytes: int | None = None,
        plan: Plan | None = None,
    ) -> None:
        self._recipe, self._process_set, self._name, self._place = recipe, process_set, name, place
        if isinstance(groups, list):
            groups = [[as_variable(variable) for variable in group] for group in groups]
        self._asked = {"groups": groups, "bucket_bytes": bucket_bytes, "plan": plan}
        self.parts: list[Part] = []
        self._names: dict[Any, str] = {}
        self._num_plans = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Of the variables that have their bucket, in the order in which they were seen."""
        return tuple(self._names.values())

    @property
    def sparse(self) -> list[SparseBucket]:
        """The parts that are sparsified."""
        return [
            part
            for part in self.parts
            if isinstance(part, SparseBucket) and not isinstance(part, DenseBucket)
        ]

    @property
    def plan(self) -> Plan:
        """Which variables form which bucket."""
        dense = [part.names[0] for part in self.parts if isinstance(part, (DenseBucket, DenseVariable))]
        return Plan(tuple(part.names for part in self.sparse), tuple(dense))

    def name_of(self, variable: Any) -> str | None:
        """The name of a variable that has its bucket."""
        return self._names.get(variable.ref())

    def of(self, names: Collection[str]) -> list[Part]:
        """The parts of these variables.

        Raises:
            UnsupportedError: if another variable of one of them is missing.
        """
        parts = [part for part in self.parts if any(name in names for name in part.names)]
        for part in parts:
            if absent := sorted(set(part.names) - set(names)):
                raise UnsupportedError(
                    f"{absent[0]} shares a bucket with {next(n for n in part.names if n in names)}, but is "
                    "not synchronized together with it this time (or its gradient is tf.IndexedSlices now). "
                    "Give always the same variables, or every set of variables a compressor of its own"
                )
        return parts

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
        """Gives variables whose first gradient this is their buckets. A collective, if there are any.

        Returns:
            Whether there were any.
        """
        new = [
            variable
            for gradient, variable in zip(gradients, variables, strict=True)
            if is_sparsifiable(gradient, variable) and variable.ref() not in self._names
        ]
        if not new:
            return False
        names = unique_names(new, [name for part in self.parts for name in part.names])
        facts = planning.facts_of(names, new, self._recipe.rules)
        self._recipe.rules.hint(facts)
        plan = make_plan(facts, **self._asked_of(new))
        plan = planning.agree(plan, facts, self._process_set, f"{self._name}.plan{self._num_plans}")
        self._make_parts(plan, facts)
        self._names.update({variable.ref(): name for name, variable in zip(names, new, strict=True)})
        self._num_plans += 1
        return True

    def _asked_of(self, new: Sequence[Any]) -> dict[str, Any]:
        """What was asked for concerned the variables that were there at first."""
        if self._num_plans:
            return {"bucket_bytes": self._asked["bucket_bytes"]}
        groups = self._asked["groups"]
        if not isinstance(groups, list):
            return self._asked
        known = {id(variable) for variable in new}
        present = [[variable for variable in group if id(variable) in known] for group in groups]
        return {**self._asked, "groups": [group for group in present if group]}

    def _make_parts(self, plan: Plan, facts: planning.Facts) -> None:
        for names in plan.buckets:
            first = facts[names[0]][0]
            recipe = self._recipe.for_parameter(first.name, first.num_elements)
            self.parts.append(self._bucket(SparseBucket, f"bucket{len(self.parts)}", names, recipe, facts))
        for name in plan.dense:
            self.parts.append(self._dense(name, facts))

    def _bucket(
        self,
        kind: type[SparseBucket],
        label: str,
        names: Sequence[str],
        recipe: Recipe,
        facts: planning.Facts,
    ) -> SparseBucket:
        shapes = [tuple(facts[name][1].shape) for name in names]
        dtype, collective = facts[names[0]][0].dtype, f"{self._name}.{len(self.parts)}"
        return kind(f"{label}.{names[0]}", collective, names, shapes, dtype, recipe, self._place)

    def _dense(self, name: str, facts: planning.Facts) -> Part:
        """A variable that the plan leaves dense, with the feedback's share that a dense one has."""
        recipe = self._recipe.for_dense()
        if recipe.feedback.num_companions or getattr(recipe.feedback, "clip_norm", None) is not None:
            return self._bucket(DenseBucket, "dense", [name], recipe, facts)
        fact, variable = facts[name]
        collective = f"{self._name}.{len(self.parts)}"
        return DenseVariable(name, collective, tuple(variable.shape), fact.dtype, self._place)


def is_sparsifiable(gradient: Any, variable: Any) -> bool:
    """Whether a bucket can take a gradient: floating point, not None, no slices, not empty."""
    return (
        gradient is not None
        and not isinstance(gradient, tf.IndexedSlices)
        and dtype_name(variable.dtype) is not None
        and tf.TensorShape(variable.shape).num_elements() != 0
    )
