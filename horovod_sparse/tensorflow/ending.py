"""How a step ends: it is applied, or all ranks take it back; and what has to be equal on all of them then."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.collectives import AllGather
from horovod_sparse.tensorflow._horovod import is_elastic
from horovod_sparse.tensorflow.collectives import carry_out, carry_out_together, label_of, not_folded
from horovod_sparse.tensorflow.graph import HOST, HostFunctions
from horovod_sparse.tensorflow.parts import Part
from horovod_sparse.tensorflow.task import idle_seconds
from horovod_sparse.tensorflow.tensors import as_variable, is_comparable, numpy_dtype, scaled_locally, times
from horovod_sparse.tensorflow.training import VariablesTraining
from horovod_sparse.tensorflow.waiting import Watch
from horovod_sparse.training.collective_errors import Outcome, Verdict
from horovod_sparse.training.drift import DriftCheck, HostEntry


class Ending:
    """Takes what the coroutines of a step have returned, when all of them have ended."""

    def __init__(self, training: VariablesTraining, average: bool, leaves_one_alone: bool) -> None:
        self._training, self._average = training, average
        #: with one rank gradients are applied as they are: of the step nothing stays
        self._leaves_one_alone = leaves_one_alone
        self._lock = threading.Lock()

    def finish(
        self, parts: Sequence[Part], found: Sequence[BaseException], scaled: bool
    ) -> tuple[list[np.ndarray], Outcome]:
        """Returns sums or averages by variable; zeros in a skipped step, NaN in one that has overflowed.

        Raises the step's error, and the next step may follow. `found` are errors that all ranks have alike.
        """
        now, training = time.perf_counter(), self._training
        with self._lock:
            errors = [*found, *(part.task.error for part in parts if part.task.error is not None)]
            verdict = training.policy.judge(errors, scaled=scaled)
            training.last_error = verdict.error
            if self._leaves_one_alone and training.size == 1:
                verdict = Verdict(Outcome.SKIPPED, drop=True)
            if verdict.outcome != Outcome.APPLIED:
                for part in parts:
                    part.abandon(drop=verdict.drop)
                if verdict.outcome == Outcome.RAISE and verdict.error is not None:
                    raise verdict.error
                value = float("nan") if verdict.outcome == Outcome.OVERFLOW else 0.0
                shapes = [(shape, numpy_dtype(part.dtype)) for part in parts for shape in part.shapes]
                return [np.full(shape, value, dtype) for shape, dtype in shapes], verdict.outcome
            scale = 1.0 / training.size if self._average else 1.0
            applied = [part.apply(scale) for part in parts]
            training.step += 1
            telemetry = training.telemetry
            telemetry.selection = training.selection
            waited = idle_seconds([part.task for part in parts], now)
            telemetry.record(training.step, [report for _, report in applied], waited)
            return [array for arrays, _ in applied for array in arrays], verdict.outcome


class Replicas:
    """Compares variables with those of the other ranks, within the graph of a step."""

    def __init__(self, training: VariablesTraining, host: HostFunctions, watch: Watch) -> None:
        self._training, self._host, self._watch = training, host, watch
        #: by names of the variables that are synchronized together: others may be changed meanwhile
        self._checks: dict[frozenset[str], DriftCheck] = {}

    def check_of(self, variables: Sequence[Any]) -> DriftCheck | None:
        """Returns the check of these variables; None without one, or with nobody to compare with."""
        known = map(self._training.name_of, variables)
        names = frozenset(name for name in known if name is not None)
        check = self._checks.get(names)
        if check is None:
            check = DriftCheck(self._training.settings)
            check.restart(self._training.step)
            self._checks[names] = check
        alone = self._training.size == 1 and not is_elastic()
        return None if alone or not check.every else check

    def restart(self) -> None:
        """Restarts comparisons after all ranks have agreed on a step."""
        for check in self._checks.values():
            check.restart(self._training.step)

    def compared(
        self, due: tf.Tensor, check: DriftCheck, variables: Sequence[Any], also_equal: Sequence[Any]
    ) -> tf.Tensor:
        """Compares variables where that is due, before they change again: they are read in the graph."""
        every = {self._training.name_of(one) or f"variable {i}": one for i, one in enumerate(variables)}
        every |= {f"variable {i} of the optimizer": one for i, one in enumerate(also_equal)}
        named = {name: variable for name, one in every.items() if is_comparable(variable := as_variable(one))}

        def compare(*arrays: np.ndarray) -> np.ndarray:
            entries = [HostEntry(*one) for one in zip(named, arrays, strict=True)]
            check_them = check.run(self._training.step - 1, entries)
            name = f"{self._training.engine.label}.drift"
            try:
                with self._watch.together(name):
                    carry_out_together(check_them, self._training.process_set, name)
            except Exception as error:
                self._training.last_error = error
                raise
            return np.zeros((), np.int32)

        def checked() -> tf.Tensor:
            with tf.device(HOST):
                values = [variable.read_value() for variable in named.values()]
                done = self._host.run(compare, values, [tf.int32])[0]
            done.set_shape([])
            return done

        return tf.cond(due, checked, lambda: tf.zeros([], tf.int32))


def marks_of(gradients: Sequence[Any], name: str, process_set: Any) -> tf.Tensor:
    """Gathers from all ranks which gradients are not finite: one number each, by rank."""
    values = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients]
    marks = tf.cast(tf.stack([tf.reduce_any(~tf.math.is_finite(one)) for one in values]), tf.int32)
    with tf.device(HOST):
        return carry_out(AllGather, not_folded(marks), tf.zeros([0], tf.int32), name, process_set)[0]


class Reduction:
    """Keeps local variables apart, and reduces the others' gradients. Keras does not look in here."""

    def __init__(self, reducer: Any, scale_local: bool) -> None:
        self.reducer, self._scale_local = reducer, scale_local
        #: variables that are each rank's own, and so their optimizer's state
        self.local: set[Any] = set()
        self._name = ""

    def keep_local(self, variable: Any) -> None:
        """Leaves a variable's gradient to this rank."""
        self.local.add(as_variable(variable).ref())

    def is_local(self, variable: Any) -> bool:
        return as_variable(variable).ref() in self.local

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any, *, scaled: bool = False
    ) -> tuple[list[Any], tf.Tensor | None]:
        """Returns a gradient per variable, reduced or local, and whether all ranks skip the step."""
        results, skipped = list(gradients), None
        shared = [i for i, variable in enumerate(variables) if not self.is_local(variable)]
        if shared:
            given = [gradients[i] for i in shared], [variables[i] for i in shared], learning_rate
            reduced, skipped = self.reducer.synchronize_or_skip(*given, scaled=scaled)
            for i, gradient in zip(shared, reduced, strict=True):
                results[i] = gradient
        if self._scale_local and self.reducer.is_needed:
            for i in set(range(len(results))).difference(shared):
                results[i] = scaled_locally(results[i], self.reducer.process_set)
        return results, skipped

    def reduce_if_finite(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        learning_rate: Any,
        scale: Any,
        skips: bool = True,
    ) -> list[Any]:
        """Reduces gradients of a loss times the scale, a power of two.

        They are NaN on all ranks where one is not finite on some rank: by these a scaler skips the step.
        """
        if not self.reducer.is_needed:
            return list(gradients)
        scale = tf.convert_to_tensor(scale)
        unscaled = [times(gradient, 1.0 / scale) for gradient in gradients]
        results, skipped = self.reduce(unscaled, variables, learning_rate, scaled=skips)
        bad = [] if skipped is None else [skipped]
        local = [one for i, one in enumerate(gradients) if one is not None and self.is_local(variables[i])]
        if skips and local:
            ranks, every = self.reducer.process_set, [as_variable(variable) for variable in variables]
            self._name = self._name or label_of("horovod_sparse.finite", ranks, every)
            bad.append(tf.reduce_any(marks_of(local, self._name, ranks) > 0))
        factor = tf.where(tf.reduce_any(bad), tf.cast(float("nan"), scale.dtype), scale) if bad else scale
        return [times(gradient, factor) for gradient in results]
