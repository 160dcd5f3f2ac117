"""Gradients of one tape or optimizer: from TensorFlow's tensors to the synchronized sums."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.errors import NonFiniteGradientError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.frontend import make_plan
from horovod_sparse.merging import Plan
from horovod_sparse.telemetry import StepReport, Telemetry
from horovod_sparse.tensorflow import planning
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.driver import HOST, refuse_xla, settle, unroll
from horovod_sparse.tensorflow.parts import DenseVariable, Part, SparseBucket
from horovod_sparse.tensorflow.slices import gather_slices
from horovod_sparse.tensorflow.task import idle_seconds
from horovod_sparse.tensorflow.tensors import as_variable, dtype_name, unique_names

__all__ = ["GradientSynchronizer"]

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None


@dataclass(frozen=True, eq=False)
class Started:
    """A synchronization in a graph, but for its end.

    Attributes:
        parts: that take part.
        tokens: of the parts: see `unroll`.
        positions: of all parts' variables, one part behind the other, among those given.
        others: the gradients; done, where no part has them.
    """

    parts: list[Part]
    tokens: list[tf.Tensor]
    positions: list[int]
    others: list[Gradient]


class GradientSynchronizer:
    """Synchronizes gradients of variables that it knows by identity, eagerly and within `tf.function`.

    Variables get their bucket when their first gradient is seen, and keep it: everything of a step
    (residuals, thresholds, learning rates) is host state that host functions look up when a graph runs.
    So a synchronizer outlives graphs, and any number of them may be traced for it. Steps follow one
    another; the same variables are never synchronized twice at a time.

    Args:
        recipe: what to do with a bucket.
        process_set: the ranks that take part.
        average: whether sums are divided by the number of ranks.
        groups: Horovod's argument: a number of buckets, or lists of variables that form one each.
        bucket_bytes: of gradient in a bucket; 32 MiB if left out.
        plan: which variables form which bucket, in place of both.
        sparse_as_dense: sparsify `tf.IndexedSlices` like any other gradient; they are gathered as they
            are otherwise.
        name: of its collectives; those of two synchronizers at work at the same time must differ.

    Attributes:
        telemetry: what happened in the last step, and on average.
        parts: buckets and dense variables.
        step: synchronizations done, those that were given up not counted.
        last_error: what the last step raised on the host, None if it ended well: in a graph,
            TensorFlow raises an error of its own that only quotes it.
        on_planned: called when variables have got their buckets, for saved state to be put into them.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        process_set: Any = None,
        average: bool = True,
        groups: Any = None,
        bucket_bytes: int | None = None,
        plan: Plan | None = None,
        sparse_as_dense: bool = False,
        name: str = "horovod_sparse",
    ) -> None:
        self.recipe, self.process_set = recipe, process_set or hvd.global_process_set
        self.average, self.sparse_as_dense, self.name = average, sparse_as_dense, name
        if isinstance(groups, list):
            groups = [[as_variable(variable) for variable in group] for group in groups]
        self._asked = {"groups": groups, "bucket_bytes": bucket_bytes, "plan": plan}
        self.telemetry = Telemetry()
        self.parts: list[Part] = []
        self.step = 0
        self.last_error: BaseException | None = None
        self._names: dict[Any, str] = {}
        self._part_of: dict[str, Part] = {}
        self._eager: dict[Any, Callable[..., Any]] = {}
        self._last_token: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._num_plans = 0
        self.on_planned: Callable[[], None] | None = None
        self._lock = threading.Lock()

    @property
    def place(self) -> tuple[int, int]:
        """Rank and size of this process within the process set."""
        return int(self.process_set.rank()), int(self.process_set.size())

    @property
    def is_needed(self) -> bool:
        """Whether there is anybody to synchronize with; gradients stay as they are otherwise."""
        if os.environ.get("HOROVOD_ELASTIC") == "1":  # others may join
            return bool(self.process_set.included())
        return bool(self.process_set.included()) and self.process_set.size() > 1

    @property
    def sparse(self) -> list[SparseBucket]:
        """The parts that are sparsified, in the order in which they were planned."""
        return [part for part in self.parts if isinstance(part, SparseBucket)]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the variables that have their bucket, in the order in which they were seen."""
        return tuple(self._names.values())

    @property
    def plan(self) -> Plan:
        """Which variables form which bucket."""
        dense = [part.names[0] for part in self.parts if isinstance(part, DenseVariable)]
        return Plan(tuple(part.names for part in self.sparse), tuple(dense))

    @tf.autograph.experimental.do_not_convert
    def synchronize(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], learning_rate: Any = None
    ) -> list[Gradient]:
        """The sums (or averages) over ranks.

        Args:
            gradients: of the variables; None stays None (if its variable never had a gradient), and
                `tf.IndexedSlices` stay such unless `sparse_as_dense`.
            variables: of TensorFlow or Keras. A bucket's variables are always given together.
            learning_rate: of this step, for error feedback to follow: a number or a scalar tensor.

        Returns:
            One gradient per variable, dense (but for `tf.IndexedSlices`).

        Raises:
            NonFiniteGradientError: on every rank, if a gradient is not finite on some rank. The step is
                given up and the next one may follow. In a graph it arrives as a
                `tf.errors.OpError` that quotes it; `last_error` is the error itself.
            UnsupportedError: within ``tf.function(jit_compile=True)``.
        """
        refuse_xla()
        variables = [as_variable(variable) for variable in variables]
        gradients = list(gradients)
        if not self.is_needed:
            return gradients
        if self.sparse_as_dense:
            gradients = [_dense(gradient) for gradient in gradients]
        if not tf.executing_eagerly():
            return self._build(gradients, variables, _as_rate(learning_rate))
        return self._run_eagerly(gradients, variables, _as_rate(learning_rate))

    def _run_eagerly(
        self, gradients: list[Gradient], variables: list[Any], rate: tf.Tensor
    ) -> list[Gradient]:
        """Through a function of its own, where the collectives of all buckets are under way together."""
        missing = tuple(gradient is None for gradient in gradients)
        key = (tuple(id(variable) for variable in variables), missing)
        if key not in self._eager:

            def synchronize(given: list[Gradient], rate: tf.Tensor) -> list[Gradient]:
                waiting = iter(given)
                every = [None if absent else next(waiting) for absent in missing]
                return [item for item in self._build(every, variables, rate) if item is not None]

            self._eager[key] = tf.function(synchronize, autograph=False, reduce_retracing=True)
        try:
            results = self._eager[key]([item for item in gradients if item is not None], rate)
        except tf.errors.OpError as error:
            if self.last_error is not None and type(self.last_error).__name__ in str(error):
                raise self.last_error from None
            raise
        found = dict(zip([i for i, absent in enumerate(missing) if not absent], results, strict=False))
        return [found.get(i) for i in range(len(gradients))]

    def _plan_new(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> None:
        """Buckets for variables whose first gradient this is."""
        new = [
            variable
            for gradient, variable in zip(gradients, variables, strict=True)
            if _is_sparsifiable(gradient, variable) and variable.ref() not in self._names
        ]
        if not new:
            return
        names = unique_names(new, list(self._part_of))
        facts = planning.facts_of(names, new, self.recipe.rules)
        self.recipe.rules.hint(facts)
        asked = self._asked
        if isinstance(asked["groups"], list) and self._num_plans == 0:
            known = {id(variable) for variable in new}
            groups = [[variable for variable in group if id(variable) in known] for group in asked["groups"]]
            asked = {**asked, "groups": [group for group in groups if group]}
        elif self._num_plans:  # what was asked for concerned the variables that were there
            asked = {"bucket_bytes": asked["bucket_bytes"]}
        plan = make_plan(facts, **asked)
        plan = planning.agree(plan, facts, self.process_set, f"{self.name}.plan{self._num_plans}")
        for bucket in plan.buckets:
            number = len(self.parts)
            shapes = [tuple(facts[name][1].shape) for name in bucket]
            dtype = facts[bucket[0]][0].dtype
            self.parts.append(
                SparseBucket(
                    f"bucket{number}.{bucket[0]}",
                    f"{self.name}.{number}",
                    bucket,
                    shapes,
                    dtype,
                    self.recipe.for_parameter(bucket[0], facts[bucket[0]][0].num_elements),
                    lambda: self.place,
                )
            )
        for name in plan.dense:
            fact, variable = facts[name]
            self.parts.append(
                DenseVariable(
                    name,
                    f"{self.name}.{len(self.parts)}",
                    tuple(variable.shape),
                    fact.dtype,
                    lambda: self.place,
                )
            )
        self._part_of = {name: part for part in self.parts for name in part.names}
        self._names.update({variable.ref(): name for name, variable in zip(names, new, strict=True)})
        self._num_plans += 1
        if self.on_planned is not None:
            self.on_planned()

    def _build(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], rate: tf.Tensor
    ) -> list[Gradient]:
        """The operations of one synchronization, in the graph that is being traced."""
        started = self.start(gradients, variables, rate)
        results, parts = started.others, started.parts
        if not parts:
            return results
        like = [(tf.as_dtype(part.dtype), shape) for part in parts for shape in part.shapes]
        sums = settle(started.tokens, lambda: self.finish(parts), like)
        self._last_token[tf.compat.v1.get_default_graph()] = sums[0]
        for position, sum_ in zip(started.positions, sums, strict=True):
            results[position] = sum_
        return results

    def start(self, gradients: Sequence[Gradient], variables: Sequence[Any], rate: tf.Tensor) -> Started:
        """Everything up to the end of the last round; for those who finish in a way of their own.

        Args:
            gradients: as for `synchronize`.
            variables: as for `synchronize`; `tf.Variable`, or what can pass for it (`shape`, `dtype`,
                `name`, `ref`).
            rate: float64 [], NaN where it is not known.
        """
        self._plan_new(gradients, variables)
        before = self._last_token.get(tf.compat.v1.get_default_graph())
        with tf.control_dependencies([] if before is None else [before]):
            others, by_name = list(gradients), {}
            for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
                name = self._names.get(variable.ref())
                if gradient is None or (name is not None and not isinstance(gradient, tf.IndexedSlices)):
                    if name is not None:
                        by_name[name] = i
                    continue
                others[i] = self._pass_on(gradient, f"{self.name}.other{i}")
            parts = self._complete(by_name)
            tokens = [self._unroll(part, gradients, by_name, rate) for part in parts]
        return Started(parts, tokens, [by_name[name] for part in parts for name in part.names], others)

    def _unroll(
        self, part: Part, gradients: Sequence[Gradient], by_name: dict[str, int], rate: tf.Tensor
    ) -> tf.Tensor:
        given = [gradients[by_name[name]] for name in part.names]
        inputs = [
            tf.zeros(shape, part.dtype) if gradient is None else gradient
            for gradient, shape in zip(given, part.shapes, strict=True)
        ]

        def begin(rate: np.ndarray, *arrays: np.ndarray) -> Any:
            return part.begin(None if np.isnan(rate) else float(rate), arrays)

        return unroll(part.task, begin, lambda: self.place, [rate, *inputs], self.process_set)

    def _complete(self, by_name: dict[str, int]) -> list[Part]:
        """The parts of these variables, all of whose variables are there."""
        parts = [part for part in self.parts if any(name in by_name for name in part.names)]
        for part in parts:
            if absent := sorted(set(part.names) - set(by_name)):
                raise UnsupportedError(
                    f"{absent[0]} shares a bucket with {next(n for n in part.names if n in by_name)}, but is "
                    "not synchronized together with it this time (or its gradient is tf.IndexedSlices now). "
                    "Give always the same variables, or every set of variables a compressor of its own"
                )
        return parts

    def _pass_on(self, gradient: Gradient, name: str) -> Gradient:
        """What no sparsifier takes, as Horovod does it: slices, integers, gradients without elements."""
        if isinstance(gradient, tf.IndexedSlices):
            return gather_slices(gradient, name, self.process_set, self.average)
        op = hvd.Average if self.average else hvd.Sum
        return hvd.allreduce(gradient, op=op, name=name, ignore_name_scope=True, process_set=self.process_set)

    def finish(self, parts: Sequence[Part], scale: float | None = None) -> list[np.ndarray]:
        """On the host, when all coroutines have ended: the dense gradients, or the error of the step.

        Args:
            parts: that were started together.
            scale: of the sums; as `average` says if left out.
        """
        now = time.perf_counter()
        with self._lock:
            errors = [part.task.error for part in parts if part.task.error is not None]
            if errors:
                for part in parts:
                    part.abandon()
                # one of another kind stands on this rank alone, and is the one to look at
                self.last_error = min(errors, key=lambda error: isinstance(error, NonFiniteGradientError))
                raise self.last_error
            self.last_error = None
            if scale is None:
                scale = 1.0 / self.place[1] if self.average else 1.0
            applied = [part.apply(scale) for part in parts]
            self.step += 1
            waited = idle_seconds([part.task for part in parts], now)
            self.telemetry.add(StepReport.of(self.step, [report for _, report in applied], waited))
            return [array for arrays, _ in applied for array in arrays]


def _is_sparsifiable(gradient: Gradient, variable: Any) -> bool:
    return (
        gradient is not None
        and not isinstance(gradient, tf.IndexedSlices)
        and dtype_name(variable.dtype) is not None
        and tf.TensorShape(variable.shape).num_elements() != 0
    )


def _dense(gradient: Gradient) -> Gradient:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def _as_rate(learning_rate: Any) -> tf.Tensor:
    """NaN where it is not known."""
    with tf.device(HOST):
        if learning_rate is None:
            return tf.constant(float("nan"), tf.float64)
        return tf.cast(as_variable(learning_rate), tf.float64)
