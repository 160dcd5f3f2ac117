"""Gradients of one tape or optimizer: from TensorFlow's tensors to the synchronized sums."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.frontend.agreement import settings
from horovod_sparse.frontend.collective_errors import worst
from horovod_sparse.frontend.decision import Decision
from horovod_sparse.frontend.drift import DriftCheck
from horovod_sparse.frontend.levels import check_levels
from horovod_sparse.frontend.poison import RAISE, ZERO, Poison
from horovod_sparse.merging import Plan
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.tensorflow import planning
from horovod_sparse.tensorflow._horovod import hvd, is_elastic, present_start, takes_part
from horovod_sparse.tensorflow.bucketing import Bucketing
from horovod_sparse.tensorflow.collectives import reduce_densely
from horovod_sparse.tensorflow.driver import Driver
from horovod_sparse.tensorflow.graph import EagerCalls, refuse_differentiation, refuse_graphs
from horovod_sparse.tensorflow.loss_scale import ScaledReduction, nan_where
from horovod_sparse.tensorflow.order import WAITING, Order, gate, ungated
from horovod_sparse.tensorflow.parts import Part, SparseBucket
from horovod_sparse.tensorflow.replanning import Replanning
from horovod_sparse.tensorflow.replicas import Replicas
from horovod_sparse.tensorflow.task import idle_seconds
from horovod_sparse.tensorflow.tensors import as_dense, as_rate, as_variable, numpy_dtype
from horovod_sparse.tensorflow.waiting import Watch
from horovod_sparse.topology import Topology

_log = logging.getLogger("horovod_sparse")


#: what becomes of a step
_APPLIED, _AGAIN, _SKIPPED = range(3)
#: tf.Tensor, tf.IndexedSlices or None
Gradient = Any


@dataclass(frozen=True, eq=False)
class Unsettled:
    """A synchronization in a graph up to its end.

    Attributes:
        parts: that take part.
        tokens: of their ends: see `Driver.start`.
        positions: of all parts' variables, one part behind the other, among those given.
        results: the gradients; where no part has them, their sums.
    """

    parts: list[Part]
    tokens: list[tf.Tensor]
    positions: list[int]
    results: list[Gradient]


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
        on_nonfinite: see `Poison`.
        check_every: see `DriftCheck`.
        on_drift: see there.
        levels: see `horovod_sparse.frontend.levels`.
        name: what names of its collectives begin with. The rest is taken when variables are seen, so that
            ranks may make synchronizers for themselves; those at work at the same time differ in it.
        deadline_seconds: of waiting for other ranks.
        **asked: how buckets are made (`groups`, `merging` and the others): see `plan_request`.

    Attributes:
        bucketing: which variable is in which bucket.
        replanning: what is done about the plan.
        host: keeps what graphs call.
        watch: ends what waits for too long.
        telemetry: what happened in the last step, and on average.
        step: synchronizations done, those that were given up not counted.
        last_error: what the last step raised on the host, None if it ended well. In a graph, TensorFlow
            raises an error of its own that only quotes it.
        declared: arguments of the tape or optimizer that change what is applied, by name: ranks compare them.
        also_equal: gives the variables that have to be equal on all ranks beside those that are synchronized:
            the optimizer's, where it is known. In the same order on all ranks.
        on_planned: called when variables have got their buckets, for saved state to be put into them.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        process_set: Any = None,
        average: bool = True,
        sparse_as_dense: bool = False,
        on_nonfinite: str = RAISE,
        check_every: int | None = None,
        on_drift: str | None = None,
        levels: str = "flat",
        name: str = "horovod_sparse",
        deadline_seconds: float | None = None,
        **asked: Any,
    ) -> None:
        self.recipe, self.process_set = recipe, process_set or hvd.global_process_set
        self.average, self.sparse_as_dense = average, sparse_as_dense
        check_levels(levels)
        self._levels = levels
        self.bucketing = Bucketing(recipe, self.process_set, name, lambda: self.place, levels, **asked)
        self.replanning = Replanning(self.bucketing, recipe.sparsifier, self.process_set)
        self._eagerly = EagerCalls(self._build)
        self.watch = Watch(deadline_seconds, self.process_set, self._noted)
        self._scaled = ScaledReduction(self.process_set, self.watch)
        self._driver = Driver(self.bucketing, self.process_set, self._agree, self.watch)
        self._order, self.host = Order(), self._driver.host
        #: Horovod's start since which all ranks go on alike
        self._start: object = None
        self._agreeing, self._finishing = threading.Lock(), threading.Lock()
        #: all numbers of ranks that there have been
        self.sizes: set[int] = set()
        self.telemetry, self.step = Telemetry(), 0
        self.poison = Poison(on_nonfinite, self.telemetry)
        checks = partial(DriftCheck, check_every, on_drift, self.telemetry)
        known = (self.bucketing, self.process_set, self.host, self.watch)
        self._replicas = Replicas(checks, *known, lambda: self.step, self._noted)
        self.last_error: BaseException | None = None
        self.declared: Mapping[str, Any] = {}
        self.also_equal: Callable[[], Sequence[Any]] = lambda: ()
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
        return takes_part(self.process_set)

    @property
    def topology(self) -> Topology | None:
        """Which ranks share a host, where gradients are summed within hosts first; None for one level."""
        return self.bucketing.topology

    def moved(self) -> None:
        """Residuals have been put into buckets: those of others' shards go there in the next step."""
        if self.topology is not None:
            self._start = None

    @property
    def parts(self) -> list[Part]:
        """Buckets and dense variables, in the order in which they were planned."""
        return self.bucketing.parts

    @property
    def sparse(self) -> list[SparseBucket]:
        """The parts that are sparsified."""
        return self.bucketing.sparse

    @property
    def names(self) -> tuple[str, ...]:
        """Of the variables that have their bucket, in the order in which they were seen."""
        return self.bucketing.names

    @property
    def plan(self) -> Plan:
        """Which variables form which bucket."""
        return self.bucketing.plan

    @property
    def decision(self) -> Decision | None:
        """Why the plan was taken, where times decided about it: predictions, and the profile behind them."""
        return self.bucketing.decision

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
            self.moved()

    def _forget_functions(self) -> None:
        """Those that were traced for other buckets."""
        self._eagerly = EagerCalls(self._build)

    @tf.autograph.experimental.do_not_convert
    def synchronize(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], learning_rate: Any = None
    ) -> list[Gradient]:
        """The gradients alone that `synchronize_or_skip` gives: zeros in a step that is skipped."""
        return self.synchronize_or_skip(gradients, variables, learning_rate)[0]

    @tf.autograph.experimental.do_not_convert
    def synchronize_or_skip(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], learning_rate: Any = None
    ) -> tuple[list[Gradient], tf.Tensor | None]:
        """The sums (or averages) over ranks, and whether all ranks are to skip the step.

        Args:
            gradients: of the variables; None stays None (if its variable never had a gradient), and
                `tf.IndexedSlices` stay such unless `sparse_as_dense`.
            variables: of TensorFlow or Keras. All ranks give the same. One that shares a bucket with them and
                is left out (a frozen layer, a tape over some variables) sends zeros; what its residual makes
                the ranks send nevertheless returns to the residuals.
            learning_rate: of this step, for error feedback to follow: a number or a scalar tensor.

        Returns:
            One gradient per variable, dense (but for `tf.IndexedSlices`); and a bool [], or None where an
            error is raised in place of skipping.

        Raises:
            NonFiniteGradientError: on every rank, if a gradient is not finite on some rank, and
                `on_nonfinite` is "raise". The step is given up and the next one may follow. In a graph it
                arrives as a `tf.errors.OpError` that quotes it; `last_error` is the error itself.
            UnsupportedError: within ``tf.function(jit_compile=True)``, and for two gradients of one variable.
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
        rate = as_rate(learning_rate)
        if not tf.executing_eagerly():
            return self._apart(self._build(gradients, variables, rate))
        self.replanning.refuse("eager steps")  # a tape gives all gradients at once
        try:
            return self._apart(self._eagerly(gradients, variables, rate))
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

        def synchronized(unscaled: Sequence[Gradient]) -> list[Gradient]:
            return nan_where(*self.synchronize_or_skip(unscaled, variables, learning_rate))

        return self._scaled(
            synchronized,
            gradients,
            variables,
            scale,
            skips,
        )

    def _apart(self, results: list[Any]) -> tuple[list[Gradient], tf.Tensor | None]:
        """What `_build` gives: the gradients, and whether to skip."""
        return (results, None) if self.poison.policy == RAISE else (results[:-1], results[-1])

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
        absent = self.bucketing.absent(variables)
        every = [*gradients, *(None for _ in absent)]
        started = self.start(every, [*variables, *absent.values()], rate)
        results, parts, num_given = started.results, started.parts, len(gradients)
        policy, check = self.poison.policy, self._replicas.check_of(variables)
        if not parts:
            return results[:num_given] + [tf.constant(False)] * (policy != RAISE), None
        like = [(tf.as_dtype(part.dtype), shape) for part in parts for shape in part.shapes]
        if policy != RAISE:
            like.append((tf.int32, ()))
        if check is not None:
            like.append((tf.bool, ()))
        absent_names = frozenset(absent)
        # by their positions: a graph shall not keep the memory of buckets that there are no more
        version, positions = self.bucketing.version, [self.parts.index(part) for part in parts]

        def finish() -> list[np.ndarray]:
            parts = self.bucketing.at(version, positions)
            before = self.step
            arrays, outcome = self._outcome(parts, None)
            for part in parts:
                if isinstance(part, SparseBucket) and outcome == _APPLIED:
                    part.take_back(absent_names)
            told = [] if policy == RAISE else [np.array(outcome, np.int32)]
            if check is not None:
                told.append(np.array(outcome == _APPLIED and before >= check.next_step))
            return [*arrays, *told]

        waits = is_elastic() or check is not None or any(part.task.between_pairs for part in parts)
        with WAITING.behind() if waits else contextlib.nullcontext():
            sums = self._driver.settle(started.tokens, finish, like)
            if policy == ZERO:
                first, outcome = sums, sums[-1 if check is None else -2]

                def once_more() -> list[tf.Tensor]:
                    return self._driver.settle(
                        self._driver.start(parts, [()] * len(parts), rate), finish, like
                    )

                sums = tf.cond(tf.equal(outcome, _AGAIN), once_more, lambda: list(first))
            end = sums[0]
            if check is not None:
                end = self._replicas.compared(sums.pop(), check, variables, self.also_equal())
        for order in (self._order, WAITING) if waits else (self._order,):
            order.note(end)
        skipped = [] if policy == RAISE else [tf.equal(sums.pop(), _SKIPPED)]
        self.watch.disarm(end)
        given = [every[i] for i in started.positions if every[i] is not None]
        if given:
            sums = refuse_differentiation(sums, given)
        for position, sum_ in zip(started.positions, sums, strict=True):
            results[position] = sum_
        return results[:num_given] + skipped, end

    def start(self, gradients: Sequence[Gradient], variables: Sequence[Any], rate: tf.Tensor) -> Unsettled:
        """Everything up to the end of the last round; for those who finish in a way of their own.

        Args:
            gradients: as for `synchronize`.
            variables: likewise; or what can pass for them (`shape`, `dtype`, `name`, `ref`).
            rate: see `as_rate`.
        """
        with self.watch.together(f"{self.bucketing.label or 'horovod_sparse'}.plan"):
            added = self.bucketing.add(gradients, variables, self._settings())
        if added:
            self.replanning.planned()
            if self.on_planned is not None:
                self.on_planned()
            self._agree()
        results, by_name = list(gradients), {}
        # where ranks come and go a first bucket may wait for the other ranks
        with self._order.behind(), WAITING.behind() if is_elastic() else contextlib.nullcontext():
            for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
                name = self.bucketing.name_of(variable)
                if name is not None and not isinstance(gradient, tf.IndexedSlices):
                    by_name[name] = i
                elif gradient is not None:
                    label = f"{self.bucketing.label}.other{i}"
                    results[i] = reduce_densely(gradient, label, self.process_set, self.average)
            parts, given = self.bucketing.of(by_name), self.replanning.stamped(gradients, by_name, self.host)
            tensors = [
                [
                    tf.zeros(shape, part.dtype) if given[by_name[name]] is None else given[by_name[name]]
                    for name, shape in zip(part.names, part.shapes, strict=True)
                ]
                for part in parts
            ]
            for part in parts:
                if isinstance(part, SparseBucket):
                    part.scale = 1.0 if self._settings()["op"] == "Sum" else None
            tokens = self._driver.start(parts, tensors, rate)
        if parts:
            self.watch.arm()
        return Unsettled(parts, tokens, [by_name[name] for part in parts for name in part.names], results)

    def finish(self, parts: Sequence[Part], scale: float | None = None) -> list[np.ndarray]:
        """Dense gradients out of what the coroutines have returned, on the host, when all of them have ended.

        Args:
            parts: that were started together.
            scale: of the sums; as `average` says if left out.

        Returns:
            One gradient per variable, one part behind the other.

        Raises:
            NonFiniteGradientError: or what else ended a coroutine; the step is taken back.
        """
        return self._outcome(parts, scale)[0]

    def _outcome(self, parts: Sequence[Part], scale: float | None) -> tuple[list[np.ndarray], int]:
        """See `finish`; and whether the gradients are to be applied."""
        if scale is None:
            scale = 1.0 / self.place[1] if self.average else 1.0
        try:
            arrays, outcome = self._finished(parts, scale)
        except BaseException:
            self.replanning.after_step(went_well=False)
            raise
        if outcome != _AGAIN:
            self.replanning.after_step(went_well=outcome == _APPLIED)
        return arrays, outcome

    def _finished(self, parts: Sequence[Part], scale: float) -> tuple[list[np.ndarray], int]:
        since, overdue = time.perf_counter(), None
        for part in parts:
            overdue = part.task.wait(since, overdue)
        now = time.perf_counter()
        with self._finishing:
            errors = [part.task.error for part in parts if part.task.error is not None]
            if errors:
                drop = any(self.poison.drops(errors, rank) for rank in self.bucketing.mates)
                for part in parts:
                    part.abandon(drop=drop)
                self.last_error, outcome = worst(errors), _AGAIN
                if not self.poison.repeats(errors):
                    if not self.poison.skips(errors):
                        raise self.last_error
                    outcome = _SKIPPED
                nothing = [
                    np.zeros(shape, numpy_dtype(part.dtype)) for part in parts for shape in part.shapes
                ]
                return nothing, outcome
            self.last_error = None
            applied = [part.apply(scale) for part in parts]
            self.step += 1
            transports = {part.task.transport for part in parts} - {""}
            self.telemetry.transport = "; ".join(sorted(transports))
            self.telemetry.density = "" if self.decision is None else self.decision.density
            self.telemetry.selection = self.bucketing.selection
            waited = idle_seconds([part.task for part in parts], now)
            self.telemetry.record(self.step, [report for _, report in applied], waited)
            return [array for arrays, _ in applied for array in arrays], _APPLIED

    def _noted(self, error: BaseException) -> None:
        self.last_error = error

    def _settings(self) -> dict[str, str]:
        """What has to be equal on all ranks; that of `declared` in place of what is known here."""
        known = {
            "engine": "horovod_sparse.tensorflow",
            "op": "Average" if self.average else "Sum",
            "sparse_as_dense": self.sparse_as_dense,
            "levels": self._levels,
            "process_set": planning.ranks_of(self.process_set),
        }
        return settings(self.recipe, **{**known, **self.declared})

    def _agree(self) -> None:
        """After every start of Horovod: all ranks say where they stand, and go on alike. A collective then.

        Whoever comes first to a bucket does so for all buckets: a rank that traces a function for the first
        time before its buckets are in the graph, so that they may still become those of the others; any other
        rank in the first host function of its next step. Both wait for each other: what is traced needs no
        collective otherwise in elastic training, where the others may have been traced long ago.

        Raises:
            StateMismatchError: on every rank alike: they do not train the same.
        """
        if self._start is present_start():
            return
        with self._agreeing:  # several buckets may come at the same time
            if self._start is present_start():
                return
            before = self.bucketing.version
            with self.watch.together(f"{self.bucketing.label}.start"):
                start = self.bucketing.agreed_start(self.step, self._settings())
            if start.anew:
                if self.bucketing.version != before:
                    self._forget_functions()
                self.step, why = start.step, start.reason
                self.replanning.stop()
                _log.info("Horovod has started: sparsifiers start anew at step %d, since %s", self.step, why)
            self._replicas.restart()
            self._start = present_start()
            self.sizes.add(self.place[1])

    def take_place(self) -> None:
        """Between steps, before state is loaded: parts that were made for another place start anew here."""
        for part in self.parts:
            if not isinstance(part, SparseBucket) or part.made_for != self.place:
                part.start_anew(self.step)
