"""Gradients of one tape or optimizer: from TensorFlow's tensors to the synchronized sums."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from horovod_sparse.errors import NonFiniteGradientError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.plans import Plan
from horovod_sparse.tensorflow._horovod import hvd, is_elastic, takes_part
from horovod_sparse.tensorflow.collectives import reduce_densely
from horovod_sparse.tensorflow.driver import Driver, shaped
from horovod_sparse.tensorflow.ending import Ending, Replicas, marks_of
from horovod_sparse.tensorflow.graph import (
    HOST,
    WAITING,
    EagerCalls,
    Order,
    gate,
    refuse_differentiation,
    refuse_graphs,
    ungated,
)
from horovod_sparse.tensorflow.parts import Part
from horovod_sparse.tensorflow.replanning import Replanning
from horovod_sparse.tensorflow.tensors import as_dense, as_rate, as_variable
from horovod_sparse.tensorflow.training import VariablesEngine, VariablesTraining
from horovod_sparse.tensorflow.waiting import Watch
from horovod_sparse.training.agreement import AgreedStatus
from horovod_sparse.training.collective_errors import Outcome
from horovod_sparse.training.settings import RAISE, PlannedOptions, Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack


#: tf.Tensor, tf.IndexedSlices or None
Gradient = Any


class GradientSynchronizer(VariablesTraining):
    """Synchronizes gradients of variables that it knows by identity, eagerly and within `tf.function`.

    All of a step is host state that host functions look up when a graph runs: it outlives any number of
    graphs. The same variables are never synchronized twice at a time.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: Settings | None = None,
        *,
        process_set: Any = None,
        average: bool = True,
        leaves_one_alone: bool = False,
        sparse_as_dense: bool = False,
        groups: Any = None,
        **options: Unpack[PlannedOptions],
    ) -> None:
        settings, ranks = settings or Settings(**options), process_set or hvd.global_process_set
        op = "Average" if average else "Sum"
        engine = VariablesEngine(ranks, settings.levels, op=op, sparse_as_dense=sparse_as_dense)
        super().__init__(engine, recipe, settings, groups)
        self._averages, self.sparse_as_dense = average, sparse_as_dense
        self.replanning, self.watch = Replanning(self), Watch(settings.deadline_seconds, ranks, self)
        self._driver, self._ending = Driver(self), Ending(self, average, leaves_one_alone)
        self._order, self.host = Order(), self._driver.host
        self._replicas = Replicas(self, self.host, self.watch)
        self._eagerly, self._agreeing = EagerCalls(self._build), threading.Lock()
        #: gives further variables that have to be equal on all ranks, in one order: the optimizer's
        self.also_equal: Callable[[], Sequence[Any]] = lambda: ()
        #: called when variables have got their buckets, for saved state to be put into them
        self.on_planned: Callable[[], None] | None = None

    @property
    def is_needed(self) -> bool:
        """True if this rank takes part. One rank alone does what each of many does."""
        return takes_part(self.process_set)

    def plan_anew(self, plan: Plan | None = None, measure_steps: int | None = None) -> None:
        if self.is_needed:
            self.replanning.replan(plan, measure_steps)

    def _retire(self) -> None:
        self._eagerly = EagerCalls(self._build)  # our own functions

    def agree(self) -> None:
        """After every start of Horovod: all ranks say where they stand, and go on alike. A collective then.

        Who comes first to a bucket does so for all: a rank that traces for the first time before its buckets
        are in the graph, any other one in the first host function of its next step.
        """
        if self.is_agreed and not self._agreeing.locked():
            return
        with self._agreeing:  # several buckets may come at the same time
            if not self.is_agreed:
                for part in self.parts:
                    part.close()
                with self.watch.together(f"{self.engine.label}.start"):
                    super().agree()
                self._replicas.restart()

    def start_anew(self, start: AgreedStatus) -> None:
        super().start_anew(start)
        self.replanning.stop()

    @tf.autograph.experimental.do_not_convert
    def synchronize(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], learning_rate: Any = None
    ) -> list[Gradient]:
        """Returns the gradients alone of `synchronize_or_skip`: zeros in a step that is skipped."""
        return self.synchronize_or_skip(gradients, variables, learning_rate)[0]

    @tf.autograph.experimental.do_not_convert
    def synchronize_or_skip(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        learning_rate: Any = None,
        *,
        scaled: bool = False,
    ) -> tuple[list[Gradient], tf.Tensor | None]:
        """Returns the sums (or averages) over ranks, and whether all ranks skip the step.

        With `scaled`, sums are NaN where a gradient is not finite on some rank, and nothing is raised.
        """
        refuse_graphs()
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
            self.replanning.refuse("eager steps")  # a tape gives all gradients at once
            build = self._eagerly
        try:
            *results, skipped = build(gradients, variables, as_rate(learning_rate), scaled)
        except tf.errors.OpError as error:
            if self.last_error is not None and type(self.last_error).__name__ in str(error):
                raise self.last_error from None
            raise
        return results, None if self.settings.on_nonfinite == RAISE else skipped

    def _build(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], rate: tf.Tensor, scaled: bool
    ) -> list[Any]:
        """Makes the operations of one synchronization, in the graph that is being traced."""
        with ungated():
            results, end, skipped = self._ended(gradients, variables, rate, scaled)
        if end is not None:
            gate(end)
        return [*results, skipped]

    def _ended(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], rate: tf.Tensor, scaled: bool
    ) -> tuple[list[Any], tf.Tensor | None, tf.Tensor]:
        """Returns the sums, a tensor of their end (None without any part), and whether to skip."""
        absent = self.absent(variables)
        every = [*gradients, *(None for _ in absent)]
        results, by_name, parts, tokens = self._started(every, [*variables, *absent.values()], rate)
        check = self._replicas.check_of(variables)
        slices = [i for i, one in enumerate(gradients) if isinstance(one, tf.IndexedSlices)]
        if not parts and not slices:
            return results[: len(gradients)], None, tf.constant(False)
        like = [(tf.as_dtype(part.dtype), shape) for part in parts for shape in part.shapes]
        like += [(tf.int32, ()), (tf.bool, ())]
        absent_names, tasks = frozenset(absent), [part.task for part in parts]
        gathered = [str(getattr(variables[i], "name", f"gradient {i}")).split(":")[0] for i in slices]
        if slices:
            label = f"{self.engine.label}.finite"
            tokens.append(marks_of([gradients[i] for i in slices], label, self.process_set))

        def finish(*given: np.ndarray) -> list[np.ndarray]:
            before, found = self.step, list[BaseException]()
            marks = given[-1].reshape(-1, len(gathered)).T if gathered else ()
            for name, marked in zip(gathered, marks, strict=True):
                if ranks := np.flatnonzero(marked).tolist():
                    found.append(NonFiniteGradientError(name, dict.fromkeys(ranks, name)))
            outcome = None
            try:
                parts = list(map(self.part_of, tasks))
                arrays, outcome = self._ending.finish(parts, found, scaled)
            finally:
                self.replanning.after_step(went_well=outcome == Outcome.APPLIED)
            for part in parts:
                if not part.dense and outcome == Outcome.APPLIED:
                    part.take_back(absent_names)
            is_due = check is not None and outcome == Outcome.APPLIED and before >= check.next_step
            return [*arrays, np.array(outcome, np.int32), np.array(is_due)]

        waits = is_elastic() or check is not None
        with WAITING.behind() if waits else contextlib.nullcontext(), tf.device(HOST):
            ended = self.host.run(finish, tokens, [dtype for dtype, _ in like])
            *sums, outcome, due = shaped(ended, [shape for _, shape in like])
            end = outcome
            if check is not None:
                end = self._replicas.compared(due, check, variables, self.also_equal())
        for order in (self._order, WAITING) if waits else (self._order,):
            order.note(end)
        if parts:
            self.watch.disarm(end)
        for i in slices:
            values = results[i].values
            refused = tf.cast(
                tf.where(tf.equal(outcome, int(Outcome.OVERFLOW)), float("nan"), 0.0), values.dtype
            )
            kept = tf.where(tf.equal(outcome, int(Outcome.APPLIED)), values, refused)
            results[i] = tf.IndexedSlices(kept, results[i].indices, results[i].dense_shape)
        names = [name for part in parts for name in part.names]
        given = [every[by_name[name]] for name in names if every[by_name[name]] is not None]
        if given:
            sums = refuse_differentiation(sums, given)
        for name, sum_ in zip(names, sums, strict=True):
            results[by_name[name]] = sum_
        return results[: len(gradients)], end, tf.equal(outcome, int(Outcome.SKIPPED))

    def _started(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], rate: tf.Tensor
    ) -> tuple[list[Gradient], dict[str, int], list[Part], list[tf.Tensor]]:
        """Starts all rounds; returns gradients, positions by name of those in buckets, parts and tokens."""
        with self.watch.together(f"{self.engine.label or 'horovod_sparse'}.plan"):
            added = self.add(gradients, variables)
        if added:
            self.replanning.planned()
            if self.on_planned is not None:
                self.on_planned()
            self.agree()
        results, by_name = list(gradients), {}
        makes_steps = self.recipe.feedback.applies_rate
        # where ranks come and go a first bucket may wait for the other ranks
        with self._order.behind(), WAITING.behind() if is_elastic() else contextlib.nullcontext():
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
                    label = f"{self.engine.label}.other{i}"
                    results[i] = reduce_densely(gradient, label, self.process_set, self._averages)
            parts, given = self.parts_of(by_name), self.replanning.stamped(gradients, by_name, self.host)
            tensors = [
                [
                    tf.zeros(shape, part.dtype) if given[by_name[name]] is None else given[by_name[name]]
                    for name, shape in zip(part.names, part.shapes, strict=True)
                ]
                for part in parts
            ]
            tokens = self._driver.start(parts, tensors, rate)
        if parts:
            self.watch.arm()
        return results, by_name, parts, tokens
