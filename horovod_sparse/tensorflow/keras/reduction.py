"""What a Keras optimizer of ours does with gradients before it applies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.tensorflow._horovod import hvd, is_elastic, takes_part
from horovod_sparse.tensorflow.agreement import compare_densely, label_of
from horovod_sparse.tensorflow.arguments import Arguments
from horovod_sparse.tensorflow.collectives import known_to_elastic, not_folded
from horovod_sparse.tensorflow.ending import ScaledReduction, nan_where
from horovod_sparse.tensorflow.graph import EagerCalls, refuse_graphs
from horovod_sparse.tensorflow.tensors import as_dense, as_variable, scaled_locally, times


def is_keras3(optimizer: Any) -> bool:
    """Whether it is an optimizer of Keras 3: Keras 2 has no `stateless_apply`."""
    return hasattr(optimizer, "stateless_apply")


class Reducer(Protocol):
    """Sums gradients over the ranks of a process set: a `GradientSynchronizer`, or a `DenseReducer`."""

    @property
    def process_set(self) -> Any:
        """The ranks."""

    @property
    def is_needed(self) -> bool:
        """Whether there is anybody to reduce with."""

    def synchronize_or_skip(
        self, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any = None
    ) -> tuple[list[Any], tf.Tensor | None]:
        """Reduced gradients, one per variable, and whether all ranks are to skip the step.

        Called eagerly or while a graph is traced.
        """


class Reduction:
    """Keeps local variables apart, and reduces the gradients of the others.

    Keras looks into the attributes of its optimizers to save them; this object it does not.
    """

    def __init__(self, reducer: Reducer, scale_local: bool) -> None:
        self.reducer, self._scale_local = reducer, scale_local
        self._local: set[Any] = set()
        self._scaled = ScaledReduction(reducer.process_set, getattr(reducer, "watch", None))

    def keep_local(self, variable: Any) -> None:
        """Leaves a variable's gradient to this rank."""
        self._local.add(as_variable(variable).ref())

    @property
    def keeps_local(self) -> bool:
        """Whether some variables are each rank's own, and so their optimizer's state."""
        return bool(self._local)

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any
    ) -> tuple[list[Any], tf.Tensor | None]:
        """One gradient per variable, reduced, or local; and whether all ranks are to skip the step."""
        results, skipped = list(gradients), None
        is_local = [as_variable(variable).ref() in self._local for variable in variables]
        shared = [i for i, kept in enumerate(is_local) if not kept]
        if shared:
            reduced, skipped = self.reducer.synchronize_or_skip(
                [gradients[i] for i in shared], [variables[i] for i in shared], learning_rate
            )
            for i, gradient in zip(shared, reduced, strict=True):
                results[i] = gradient
        if self._scale_local and self.reducer.is_needed:
            results = [
                scaled_locally(gradient, self.reducer.process_set) if kept else gradient
                for gradient, kept in zip(results, is_local, strict=True)
            ]
        return results, skipped

    def reduce_if_finite(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        learning_rate: Any,
        scale: Any,
    ) -> list[Any]:
        """As `reduce`, for gradients of a scaled loss: see `ScaledReduction`."""
        if not self.reducer.is_needed:
            return list(gradients)
        return self._scaled(
            lambda unscaled: nan_where(*self.reduce(unscaled, variables, learning_rate)),
            gradients,
            variables,
            scale,
        )


class Accumulation:
    """Adds up the gradients of several passes; every last one is reduced and applied."""

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool) -> None:
        self.passes, self._average, self._sparse_as_dense = passes, average, sparse_as_dense
        self._sums: dict[Any, tf.Variable] = {}
        self._count: tf.Variable | None = None

    def run(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[list[Any]], Any],
        skip: Callable[[], Any],
    ) -> None:
        """One pass."""
        # of one that has none in this pass, what the passes before it had
        sums = [
            self._sums.get(as_variable(variable).ref())
            if gradient is None
            else self._sum_of(gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        if self._count is None:
            with tf.init_scope():
                self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
        count = self._count
        for sum_, gradient in zip(sums, gradients, strict=True):
            if sum_ is not None and gradient is not None:
                sum_.assign_add(tf.convert_to_tensor(gradient))
        count.assign_add(1)

        def complete() -> None:
            factor = 1.0 / self.passes if self._average else 1.0
            totals = [None if sum_ is None else times(sum_.read_value(), factor) for sum_ in sums]
            # before the step, which may end in an error: nothing of it stays for the next one
            with tf.control_dependencies([total for total in totals if total is not None]):
                done = [sum_.assign(tf.zeros_like(sum_)) for sum_ in sums if sum_ is not None]
                done.append(count.assign(0))
            with tf.control_dependencies([] if tf.executing_eagerly() else done):
                totals = [None if total is None else tf.identity(total) for total in totals]
            apply(totals)

        tf.cond(tf.equal(count, self.passes), complete, skip)

    def _sum_of(self, gradient: Any, variable: Any) -> tf.Variable:
        if isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense:
            raise UnsupportedError(
                "backward_passes_per_step above 1 cannot add up tf.IndexedSlices: give sparse_as_dense=True"
            )
        variable = as_variable(variable)
        if variable.ref() not in self._sums:
            with tf.init_scope():
                zeros = tf.zeros(variable.shape, gradient.dtype)
                self._sums[variable.ref()] = tf.Variable(zeros, trainable=False)
        return self._sums[variable.ref()]


class DenseReducer:
    """Sums or averages gradients over ranks, whole, compressed as Horovod's own compressors do."""

    def __init__(self, arguments: Arguments) -> None:
        self.process_set, self._sparse_as_dense = arguments.process_set, arguments.sparse_as_dense
        self._groups, factor = arguments.groups, arguments.gradient_predivide_factor
        if isinstance(arguments.groups, list):
            self._groups = [[as_variable(variable).ref() for variable in group] for group in arguments.groups]
        average = arguments.op == hvd.Average
        self._common = {
            "op": arguments.op,
            "compression": arguments.compression,
            "process_set": arguments.process_set,
            "device_dense": arguments.device_dense,
            "device_sparse": arguments.device_sparse,
            "prescale_factor": 1.0 / factor if average else 1.0,
            "postscale_factor": factor if average else 1.0,
            "ignore_name_scope": True,
        }
        self._declared = arguments.declared()
        self._name = ""
        self._eagerly = EagerCalls(self._build)

    @property
    def is_needed(self) -> bool:
        """Whether there is anybody to reduce with."""
        if not takes_part(self.process_set):
            return False
        return is_elastic() or self.process_set.size() > 1

    def synchronize_or_skip(
        self, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any = None
    ) -> tuple[list[Any], None]:
        """Reduced gradients; None stays None. No step is skipped."""
        refuse_graphs()
        if not self.is_needed:
            return list(gradients), None
        variables = [as_variable(variable) for variable in variables]
        if not self._name:
            compare_densely(self._common["compression"], self.process_set, **self._declared)
            self._name = label_of("horovod_sparse.dense", self.process_set, variables)
        given = [as_dense(gradient) for gradient in gradients] if self._sparse_as_dense else list(gradients)
        if not tf.executing_eagerly():
            return self._build(given, variables, tf.zeros([])), None
        return self._eagerly(given, variables, tf.zeros([])), None

    def _build(self, gradients: list[Any], variables: list[Any], _scalar: tf.Tensor) -> list[Any]:
        results = list(gradients)
        grouped: set[int] = set()
        for number, group in enumerate(self._positions(gradients, variables)):
            grouped.update(group)
            tensors = [not_folded(gradients[i]) for i in group]
            with known_to_elastic():
                sums = hvd.grouped_allreduce(tensors, name=f"{self._name}.group{number}", **self._common)
            for i, sum_ in zip(group, sums, strict=True):
                results[i] = sum_
        for i, gradient in enumerate(gradients):
            if gradient is not None and i not in grouped:
                with known_to_elastic():
                    given = not_folded(gradient)
                    results[i] = hvd.allreduce(given, name=f"{self._name}.{i}", **self._common)
        return results

    def _positions(self, gradients: list[Any], variables: list[Any]) -> list[list[int]]:
        """Positions of dense gradients of one dtype, group by group: what one call can reduce."""
        dense = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.Tensor)]
        if self._groups is None:
            return []
        if isinstance(self._groups, int):
            per_group = -(-len(dense) // self._groups)
            chosen = [dense[i : i + per_group] for i in range(0, len(dense), per_group)]
        else:
            at = {variables[i].ref(): i for i in dense}
            chosen = [[at[ref] for ref in group if ref in at] for group in self._groups]
        return [
            [i for i in group if gradients[i].dtype == dtype]
            for group in chosen
            for dtype in dict.fromkeys(gradients[i].dtype for i in group)
        ]
