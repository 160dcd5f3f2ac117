"""Synchronizes the gradients of one tape or optimizer: from TensorFlow's tensors to their sums."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.errors import NonFiniteGradientError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.tensorflow import graph
from horovod_sparse.tensorflow._horovod import hvd, is_elastic, takes_part
from horovod_sparse.tensorflow.collectives import carry_out_together, nonfinite_marks, reduce_densely
from horovod_sparse.tensorflow.driver import Driver, shaped
from horovod_sparse.tensorflow.parts import Part, idle_seconds
from horovod_sparse.tensorflow.tensors import as_dense, as_variable, is_comparable, numpy_dtype
from horovod_sparse.tensorflow.training import VariablesEngine, VariablesTraining
from horovod_sparse.tensorflow.waiting import Watch
from horovod_sparse.training.agreement import DriftCheck, ReplicatedArray
from horovod_sparse.training.collective_errors import Outcome
from horovod_sparse.training.settings import RAISE, Settings

#: tf.Tensor, tf.IndexedSlices or None
Gradient = Any


class GradientSynchronizer(VariablesTraining):
    """Synchronizes variables' gradients over ranks, eagerly and within `tf.function`.

    Host functions look the state of a step up when a graph runs, so the state outlives graphs. The same
    variables are never synchronized twice at a time.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: Settings,
        *,
        process_set: Any = hvd.global_process_set,
        average: bool = True,
        sparse_as_dense: bool = False,
        groups: Any = None,
    ) -> None:
        op = "Average" if average else "Sum"
        engine = VariablesEngine(process_set, op=op, sparse_as_dense=sparse_as_dense)
        super().__init__(engine, recipe, settings, groups)
        self._averages, self.sparse_as_dense = average, sparse_as_dense
        self.watch = engine.watch = Watch(settings.deadline_seconds, process_set, self)
        self._driver, self._order, self._ending = Driver(self), graph.Order(), threading.Lock()
        self.host = self._driver.host
        self._drift_checks = DriftChecks(self, self.host)
        self._eagerly, self._agreeing = graph.EagerCalls(self._build), threading.Lock()
        #: returns further variables that have to be equal on all ranks: the optimizer's
        self.also_equal: Callable[[], Sequence[Any]] = lambda: ()
        #: called when buckets were made, to load a saved state into them
        self.on_planned: Callable[[], None] | None = None

    @property
    def is_needed(self) -> bool:
        """True if this rank is in the process set and so synchronizes gradients, even as the only rank."""
        return takes_part(self.process_set)

    def _on_invalid_traces(self) -> None:
        self._eagerly = graph.EagerCalls(self._build)  # drops our own traced functions

    def save(self, **more: Any) -> dict[str, Any]:
        """Returns the checkpoint entry with the fields `more`; raises in the middle of a step."""
        if self.under_way:
            raise UnsupportedError(
                "residuals can only be saved between steps, but a step is in progress or was interrupted"
            )
        return super().save(**more)

    def load(self, entry: Mapping[str, Any] | None) -> None:
        """Loads a checkpoint entry, after cancelling a step in progress."""
        for part in self.parts:
            part.roll_back_unapplied()
        super().load(entry)

    def agree(self) -> None:
        """Makes all ranks agree on step, plan and states, once after every start of Horovod and every load.

        The first bucket agrees for all: at the first trace before its buckets are in the graph, later in the
        first host function of the next step.
        """
        if self.is_agreed and not self._agreeing.locked():
            return
        with self._agreeing:  # several buckets may come at the same time
            if not self.is_agreed:
                for part in self.parts:
                    part.roll_back_unapplied()
                super().agree()
                self._drift_checks.compare_next()

    @tf.autograph.experimental.do_not_convert
    def synchronize(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """Returns the gradients' sums (or averages) over ranks; zeros in a step that is skipped."""
        return self.synchronize_or_skip(gradients, variables)[0]

    @tf.autograph.experimental.do_not_convert
    def synchronize_or_skip(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], *, scaled: bool = False
    ) -> tuple[list[Gradient], tf.Tensor | None]:
        """Returns the gradients' sums (or averages) over ranks, and whether all ranks skip the step.

        With `scaled`, sums are NaN where a gradient is not finite on some rank, and nothing is raised.
        """
        graph.raise_if_unsupported_graph()
        variables = [as_variable(variable) for variable in variables]
        if len({variable.ref() for variable in variables}) < len(variables):
            raise UnsupportedError("a variable is given twice: give it once, with the sum of its gradients")
        gradients = list(gradients)
        if not self.is_needed:
            return gradients, None
        if self.sparse_as_dense:
            gradients = [as_dense(gradient) for gradient in gradients]
        build: Callable[..., list[Any]] = self._build
        if tf.executing_eagerly():
            build = self._eagerly
        try:
            *results, skipped = build(gradients, variables, scaled)
        except tf.errors.OpError as error:
            if self.last_error is not None and type(self.last_error).__name__ in str(error):
                raise self.last_error from None
            raise
        return results, None if self.settings.on_nonfinite == RAISE else skipped

    def _build(self, gradients: Sequence[Gradient], variables: Sequence[Any], scaled: bool) -> list[Any]:
        """Builds the operations of one synchronization, in the graph being traced."""
        with graph.ungated():
            results, end, skipped = self._add_sums(gradients, variables, scaled)
        if end is not None:
            graph.gate_later_operations(end)
        return [*results, skipped]

    def _add_sums(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], scaled: bool
    ) -> tuple[list[Any], tf.Tensor | None, tf.Tensor]:
        """Builds the sums; returns them, a tensor ready after them, and whether to skip the step."""
        results, by_name, parts, tokens = self._start_rounds(gradients, variables)
        check = self._drift_checks.drift_check_for(variables)
        slices = [i for i, one in enumerate(gradients) if isinstance(one, tf.IndexedSlices)]
        if not parts and not slices:
            return results, None, tf.constant(False)
        like = [(tf.as_dtype(part.dtype), shape) for part in parts for shape in part.shapes]
        like += [(tf.int32, ()), (tf.bool, ())]
        names, tasks = [name for part in parts for name in part.names], [part.task for part in parts]
        absent = frozenset(names).difference(by_name)
        gathered = [str(getattr(variables[i], "name", f"gradient {i}")).split(":")[0] for i in slices]
        if slices:
            label = f"{self.engine.label}.finite"
            tokens.append(nonfinite_marks([gradients[i] for i in slices], label, self.process_set))

        def finish_step(*given: np.ndarray) -> list[np.ndarray]:
            before, found = self.step, list[BaseException]()
            marks = given[-1].reshape(-1, len(gathered)).T if gathered else ()
            for name, marked in zip(gathered, marks, strict=True):
                if ranks := np.flatnonzero(marked).tolist():
                    found.append(NonFiniteGradientError(name, dict.fromkeys(ranks, name)))
            parts = list(map(self.part_of, tasks))
            arrays, outcome = self._finish_step(parts, found, scaled)
            for part in parts:
                if not part.dense and outcome == Outcome.APPLIED:
                    part.return_to_residual(absent)
            is_due = check is not None and outcome == Outcome.APPLIED and before >= check.next_step
            return [*arrays, np.array(outcome, np.int32), np.array(is_due)]

        waits = is_elastic() or check is not None
        with graph.WAITING.after() if waits else contextlib.nullcontext(), tf.device(graph.HOST):
            ended = self.host.add_to_graph(finish_step, tokens, [dtype for dtype, _ in like])
            *sums, outcome, due = shaped(ended, [shape for _, shape in like])
            end = outcome
            if check is not None:
                end = self._drift_checks.compare_when_due(due, check, variables, self.also_equal())
        for order in (self._order, graph.WAITING) if waits else (self._order,):
            order.set_last(end)
        if parts:
            self.watch.pass_assertion(end)
        skipped = tf.equal(outcome, int(Outcome.SKIPPED))
        for i in slices:  # with a loss that is scaled, NaN stays what it is
            kept = tf.where(skipped, tf.zeros_like(results[i].values), results[i].values)
            results[i] = tf.IndexedSlices(kept, results[i].indices, results[i].dense_shape)
        for name, sum_ in zip(names, sums, strict=True):
            if name in by_name:
                results[by_name[name]] = sum_
        return results, end, skipped

    def _finish_step(
        self, parts: Sequence[Part], found: Sequence[BaseException], scaled: bool
    ) -> tuple[list[np.ndarray], Outcome]:
        """Ends a step; returns variables' sums (zeros if skipped, NaN after overflow), and its outcome.

        Raises the step's error, and the next step may follow. `found` are errors that all ranks have alike.
        """
        now = time.perf_counter()
        with self._ending:
            errors = [*found, *(part.task.error for part in parts if part.task.error is not None)]
            verdict = self.policy.judge(errors, scaled=scaled)
            self.last_error = verdict.error
            if verdict.outcome != Outcome.APPLIED:
                for part in parts:
                    part.abandon(drop=verdict.drop)
                if verdict.outcome == Outcome.RAISE and verdict.error is not None:
                    raise verdict.error
                value = float("nan") if verdict.outcome == Outcome.OVERFLOW else 0.0
                shapes = [(shape, numpy_dtype(part.dtype)) for part in parts for shape in part.shapes]
                return [np.full(shape, value, dtype) for shape, dtype in shapes], verdict.outcome
            scale = 1.0 / self.size if self._averages else 1.0
            applied = [part.apply(scale) for part in parts]
            self.step += 1
            self.telemetry.selection = self.selection
            waited = idle_seconds([part.task for part in parts], now)
            self.telemetry.record(self.step, [report for _, report in applied], waited)
            return [array for arrays, _ in applied for array in arrays], verdict.outcome

    def _start_rounds(
        self, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> tuple[list[Gradient], dict[str, int], list[Part], list[tf.Tensor]]:
        """Builds all rounds; returns gradients, their positions by variable, parts, and final tensors."""
        if self.add_new_variables(gradients, variables):
            if self.on_planned is not None:
                self.on_planned()
            self.agree()
        results, by_name, slices = list(gradients), dict[str, int](), set[str]()
        makes_steps = self.recipe.feedback.applies_rate
        # in elastic training a new bucket may wait for other ranks
        with self._order.after(), graph.WAITING.after() if is_elastic() else contextlib.nullcontext():
            for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
                name = self.name_of(variable)
                if name is not None and not isinstance(gradient, tf.IndexedSlices):
                    by_name[name] = i
                elif gradient is not None:
                    if makes_steps and not isinstance(variable, tf.Tensor):
                        raise UnsupportedError(
                            f"{self.recipe.feedback} makes steps of dense gradients, and this one is "
                            "tf.IndexedSlices (of an embedding, say): give sparse_as_dense=True"
                        )
                    slices.add(name or "")
                    label = f"{self.engine.label}.other{i}"
                    results[i] = reduce_densely(gradient, label, self.process_set, self._averages)
            parts = self.checked_parts_of(by_name, slices)
            given = {name: gradients[i] for name, i in by_name.items() if gradients[i] is not None}
            tensors = [
                [
                    given[name] if name in given else tf.zeros(shape, part.dtype)
                    for name, shape in zip(part.names, part.shapes, strict=True)
                ]
                for part in parts
            ]
            tokens = self._driver.start(parts, tensors)
        if parts:
            self.watch.add_assertion()
        return results, by_name, parts, tokens


class DriftChecks:
    """Compares variables between ranks from time to time, in the graph of a step."""

    def __init__(self, training: VariablesTraining, host: graph.HostFunctions) -> None:
        self._training, self._host = training, host
        #: by names of variables that are synchronized together: others may change meanwhile
        self._checks: dict[frozenset[str], DriftCheck] = {}

    def drift_check_for(self, variables: Sequence[Any]) -> DriftCheck | None:
        """Returns the `DriftCheck` for these variables; None with one rank, or if `check_every` is off."""
        known = map(self._training.name_of, variables)
        names = frozenset(name for name in known if name is not None)
        check = self._checks.get(names)
        if check is None:
            check = DriftCheck(self._training.settings)
            check.compare_next(self._training.step)
            self._checks[names] = check
        alone = self._training.size == 1 and not is_elastic()
        return None if alone or not check.every else check

    def compare_next(self) -> None:
        """Makes ranks compare their variables after the next step; called after each agreement."""
        for check in self._checks.values():
            check.compare_next(self._training.step)

    def compare_when_due(
        self, due: tf.Tensor, check: DriftCheck, variables: Sequence[Any], also_equal: Sequence[Any]
    ) -> tf.Tensor:
        """Builds a comparison of variables between ranks, which runs in a step where `due` is true."""
        every = {self._training.name_of(one) or f"variable {i}": one for i, one in enumerate(variables)}
        every |= {f"variable {i} of the optimizer": one for i, one in enumerate(also_equal)}
        named = {name: variable for name, one in every.items() if is_comparable(variable := as_variable(one))}

        def compare_on_host(*arrays: np.ndarray) -> np.ndarray:
            entries = [ReplicatedArray(*one) for one in zip(named, arrays, strict=True)]
            check_them = check.compare(self._training.step - 1, entries)
            engine = self._training.engine
            try:
                carry_out_together(
                    check_them, engine.process_set, f"{engine.label}.drift", watch=engine.watch
                )
            except Exception as error:
                self._training.last_error = error
                raise
            return np.zeros((), np.int32)

        def compared_in_graph() -> tf.Tensor:
            with tf.device(graph.HOST):
                values = [variable.read_value() for variable in named.values()]
                done = self._host.add_to_graph(compare_on_host, values, [tf.int32])[0]
            done.set_shape([])
            return done

        return tf.cond(due, compared_in_graph, lambda: tf.zeros([], tf.int32))
