"""Gradients of one tape or optimizer: from TensorFlow's tensors to the synchronized sums."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.frontend.decision import Decision
from horovod_sparse.merging import Plan
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.tensorflow._horovod import hvd, is_elastic
from horovod_sparse.tensorflow.buckets import Buckets
from horovod_sparse.tensorflow.courier import between_pairs
from horovod_sparse.tensorflow.driver import HostFunctions, refuse_graphs, settle
from horovod_sparse.tensorflow.eager import EagerCalls
from horovod_sparse.tensorflow.order import WAITING, Order, gate, ungated
from horovod_sparse.tensorflow.others import reduce_densely
from horovod_sparse.tensorflow.parts import Part, SparseBucket
from horovod_sparse.tensorflow.replanning import Replanning
from horovod_sparse.tensorflow.scaled import ScaledReduction
from horovod_sparse.tensorflow.second_order import refuse_differentiation
from horovod_sparse.tensorflow.started import Gradient, Started, start
from horovod_sparse.tensorflow.starts import Starts
from horovod_sparse.tensorflow.steps import Steps
from horovod_sparse.tensorflow.tensors import as_dense, as_rate, as_variable

__all__ = ["GradientSynchronizer"]


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
        sparse_as_dense: sparsify `tf.IndexedSlices` like any other gradient; they are gathered as they
            are otherwise.
        name: what names of its collectives begin with. The rest is taken when variables are seen, so that
            ranks may make synchronizers for themselves; those at work at the same time differ in it.
        **asked: how buckets are made (`groups`, `merging` and the others): see `plan_request`.

    Attributes:
        replanning: what is done about the plan.
        starts: what is done when Horovod has been started.
        host: keeps what graphs call.
        on_planned: called when variables have got their buckets, for saved state to be put into them.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        process_set: Any = None,
        average: bool = True,
        sparse_as_dense: bool = False,
        name: str = "horovod_sparse",
        **asked: Any,
    ) -> None:
        self.recipe, self.process_set = recipe, process_set or hvd.global_process_set
        self.average, self.sparse_as_dense = average, sparse_as_dense
        self._buckets = Buckets(recipe, self.process_set, name, lambda: self.place, **asked)
        self._scaled = ScaledReduction(self.process_set)
        self._steps = Steps()
        self.replanning = Replanning(self._buckets, recipe.sparsifier, self.process_set)
        self._eagerly = EagerCalls(self._build)
        self._order, self.host = Order(), HostFunctions()
        settings = {"compression": recipe.describe(), "op": "Average" if average else "Sum"}
        self.starts = Starts(self._buckets, self._steps, self.replanning, settings, self.process_set)
        self.starts.on_replanned = self._forget_functions
        self.on_planned: Callable[[], None] | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Rank and size of this process within the process set."""
        return int(self.process_set.rank()), int(self.process_set.size())

    @property
    def is_needed(self) -> bool:
        """Whether this rank takes part; its gradients stay as they are otherwise.

        One rank alone does what each of many does.
        """
        return bool(self.process_set.included())

    @property
    def telemetry(self) -> Telemetry:
        """What happened in the last step, and on average."""
        return self._steps.telemetry

    @property
    def step(self) -> int:
        """Synchronizations done, those that were given up not counted."""
        return self._steps.number

    @step.setter
    def step(self, number: int) -> None:
        self._steps.number = number

    @property
    def last_error(self) -> BaseException | None:
        """What the last step raised on the host, None if it ended well.

        In a graph, TensorFlow raises an error of its own that only quotes it.
        """
        return self._steps.last_error

    @property
    def parts(self) -> list[Part]:
        """Buckets and dense variables, in the order in which they were planned."""
        return self._buckets.parts

    @property
    def sparse(self) -> list[SparseBucket]:
        """The parts that are sparsified."""
        return self._buckets.sparse

    @property
    def names(self) -> tuple[str, ...]:
        """Of the variables that have their bucket, in the order in which they were seen."""
        return self._buckets.names

    @property
    def plan(self) -> Plan:
        """Which variables form which bucket."""
        return self._buckets.plan

    @property
    def decision(self) -> Decision | None:
        """Why the plan was taken, where times decided about it: predictions, and the profile behind them."""
        return self._buckets.decision

    @property
    def is_measured(self) -> bool:
        """Whether backward times wait for `replan`: from the same step on, on all ranks."""
        return self.replanning.is_measured

    def replan(self, plan: Plan | None = None, *, measure_steps: int | None = None) -> None:
        """Changes the buckets, between two steps; every rank does so alike. Residuals are kept.

        Functions that were traced before have to be traced again; they raise an error otherwise.

        Args:
            plan: the new one. If left out, it is made as `merging` and `tensor_selection` ask for: costs
                are measured again, unless a profile was given, and all ranks take rank 0's plan.
            measure_steps: without a plan: so many steps are measured first, in functions that are traced
                from now on, after one that has no beginning; call again when `is_measured` says so.

        Raises:
            ArgumentError: if no plan is given and `merging` was not either, or the plan does not fit.
            ProfileMismatchError: on every rank alike, if no step has been measured.
            UnsupportedError: while a step is under way.
        """
        if self.is_needed:
            self.replanning.replan(plan, measure_steps)
            self._forget_functions()

    def _forget_functions(self) -> None:
        """Those that were traced for other buckets."""
        self._eagerly = EagerCalls(self._build)

    @tf.autograph.experimental.do_not_convert
    def synchronize(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], learning_rate: Any = None
    ) -> list[Gradient]:
        """The sums (or averages) over ranks.

        Args:
            gradients: of the variables; None stays None (if its variable never had a gradient), and
                `tf.IndexedSlices` stay such unless `sparse_as_dense`.
            variables: of TensorFlow or Keras. All ranks give the same. One that shares a bucket with them and
                is left out (a frozen layer, a tape over some variables) sends zeros; what its residual makes
                the ranks send nevertheless returns to the residuals.
            learning_rate: of this step, for error feedback to follow: a number or a scalar tensor.

        Returns:
            One gradient per variable, dense (but for `tf.IndexedSlices`).

        Raises:
            NonFiniteGradientError: on every rank, if a gradient is not finite on some rank. The step is
                given up and the next one may follow. In a graph it arrives as a
                `tf.errors.OpError` that quotes it; `last_error` is the error itself.
            UnsupportedError: within ``tf.function(jit_compile=True)``, and for two gradients of one variable.
        """
        refuse_graphs()
        variables = [as_variable(variable) for variable in variables]
        if len({variable.ref() for variable in variables}) < len(variables):
            raise UnsupportedError("a variable is given twice: give it once, with the sum of its gradients")
        gradients = list(gradients)
        if not self.is_needed:
            return gradients
        if self.sparse_as_dense:
            gradients = [as_dense(gradient) for gradient in gradients]
        rate = as_rate(learning_rate)
        if not tf.executing_eagerly():
            return self._build(gradients, variables, rate)
        self.replanning.refuse("eager steps")  # a tape gives all gradients at once
        try:
            return self._eagerly(gradients, variables, rate)
        except tf.errors.OpError as error:
            if self.last_error is not None and type(self.last_error).__name__ in str(error):
                raise self.last_error from None
            raise

    def synchronize_scaled(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        scale: Any,
        learning_rate: Any = None,
        skips: bool = True,
    ) -> list[Gradient]:
        """As `synchronize`, for gradients of a scaled loss: see `ScaledReduction`.

        Args:
            gradients: of the loss times the scale.
            variables: see `synchronize`.
            scale: number or scalar tensor, a power of two.
            learning_rate: see `synchronize`.
            skips: whether what is not finite on some rank becomes NaN on all, and no error.
        """
        if not self.is_needed:
            return list(gradients)
        return self._scaled(
            lambda unscaled: self.synchronize(unscaled, variables, learning_rate),
            gradients,
            variables,
            scale,
            skips,
        )

    def _build(self, gradients: Sequence[Gradient], variables: Sequence[Any], rate: tf.Tensor) -> list[Any]:
        """The operations of one synchronization, in the graph that is being traced."""
        with ungated():
            results, end = self._ended(gradients, variables, rate)
        if end is not None:
            gate(end)
        return results

    def _ended(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], rate: tf.Tensor
    ) -> tuple[list[Any], tf.Tensor | None]:
        """What `_build` gives, and what is there when it ends; None where no part takes part."""
        absent = self._buckets.absent(variables)
        every = [*gradients, *(None for _ in absent)]
        started = self.start(every, [*variables, *absent.values()], rate)
        results, parts, num_given = started.others, started.parts, len(gradients)
        if not parts:
            return results[:num_given], None
        like = [(tf.as_dtype(part.dtype), shape) for part in parts for shape in part.shapes]
        absent_names = frozenset(absent)
        # by their positions: a graph shall not keep the memory of buckets that there are no more
        version, positions = self._buckets.version, [self.parts.index(part) for part in parts]

        def finish() -> list[np.ndarray]:
            parts = self._buckets.at(version, positions)
            arrays = self.finish(parts)
            for part in parts:
                if isinstance(part, SparseBucket):
                    part.take_back(absent_names)
            return arrays

        waits = is_elastic() or any(between_pairs(part.task.kinds) for part in parts)
        with WAITING.behind() if waits else contextlib.nullcontext():
            sums = settle(started.tokens, finish, like, self.host)
        for order in (self._order, WAITING) if waits else (self._order,):
            order.note(sums[0])
        end = sums[0]
        given = [every[i] for i in started.positions if every[i] is not None]
        if given:
            sums = refuse_differentiation(sums, given)
        for position, sum_ in zip(started.positions, sums, strict=True):
            results[position] = sum_
        return results[:num_given], end

    def beside(self, variables: Collection[Any]) -> list[SparseBucket]:
        """The buckets that these variables have, those that have one."""
        names = {self._buckets.name_of(variable) for variable in variables} - {None}
        return [part for part in self.sparse if names & set(part.names)]

    def name_of(self, variable: Any) -> str | None:
        """The name of a variable that has its bucket."""
        return self._buckets.name_of(variable)

    def start(self, gradients: Sequence[Gradient], variables: Sequence[Any], rate: tf.Tensor) -> Started:
        """Everything up to the end of the last round; for those who finish in a way of their own.

        Args:
            gradients: as for `synchronize`.
            variables: likewise; or what can pass for them (`shape`, `dtype`, `name`, `ref`).
            rate: see `as_rate`.
        """
        if self._buckets.add(gradients, variables):
            self.replanning.planned()
            if self.on_planned is not None:
                self.on_planned()
            self.starts.agree()
        # where ranks come and go a first bucket may wait for the other ranks
        with self._order.behind(), WAITING.behind() if is_elastic() else contextlib.nullcontext():
            common = self._reduce_other, self._stamped, self.process_set, self.starts.agree, self.host
            return start(self._buckets, gradients, variables, rate, *common)

    def _stamped(self, gradients: Sequence[Gradient], by_name: Mapping[str, int]) -> list[Gradient]:
        return self.replanning.stamped(gradients, by_name, self.host)

    def _reduce_other(self, gradient: Gradient, i: int) -> Gradient:
        return reduce_densely(gradient, f"{self._buckets.label}.other{i}", self.process_set, self.average)

    def finish(self, parts: Sequence[Part], scale: float | None = None) -> list[np.ndarray]:
        """On the host, when all coroutines have ended: see `Steps.finish`.

        Args:
            parts: that were started together.
            scale: of the sums; as `average` says if left out.
        """
        if scale is None:
            scale = 1.0 / self.place[1] if self.average else 1.0
        try:
            arrays = self._steps.finish(parts, scale)
        except BaseException:
            self.replanning.after_step(went_well=False)
            raise
        self.replanning.after_step(went_well=True)
        return arrays
