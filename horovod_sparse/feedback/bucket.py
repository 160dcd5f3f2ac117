"""A bucket on one rank: its accumulator, sparsifier and feedback, and the steps that they make together.

A bucket's `Progress` is handed on to the buckets of the next plan.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from horovod_sparse import errors
from horovod_sparse.arrays import Accumulator
from horovod_sparse.collectives import AllToAll, Broadcast, Exchange, Request, Synchronization
from horovod_sparse.feedback.adam import Normalizing, RankSimilarity
from horovod_sparse.feedback.feedbacks import Rates
from horovod_sparse.feedback.recipe import Recipe
from horovod_sparse.sparsifiers import BucketInfo, SparseSum, WholeSum
from horovod_sparse.sparsifiers.base import SparsifierState
from horovod_sparse.telemetry import BucketStep


@dataclass(frozen=True)
class Progress:
    """A bucket's step, age and gradients' similarity, which the buckets of a new plan take over.

    It is kept when a sparsifier's state has to start anew: in other buckets, at another number of ranks.

    Attributes:
        step: number of synchronizations; schedules of the density count them.
        since: the step at which the companions began.
        summed: number of ranks whose gradients are summed before a fold: a host's, with two levels.
        leans: means over recent steps of two squares, for `RankSimilarity`: of the mean gradient's projection
            on random signs, and of one rank's.
    """

    step: int = 0
    since: int = 0
    summed: int = 1
    leans: tuple[float, float] = (0.0, 0.0)

    @property
    def age(self) -> int:
        """The number of steps that went into the companions (velocity or moment)."""
        return self.step - self.since


#: elements [start, stop) by the parameter's name
Members: TypeAlias = Mapping[str, tuple[int, int]]
#: the largest number of a gradient's type that does not become infinite when it is rounded
_LARGEST = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": float(np.finfo(np.float32).max),
    "float64": float(np.finfo(np.float64).max),
}


class Bucket:
    """Parameters that are synchronized together, with their residual and their sparsifier's state."""

    def __init__(
        self, info: BucketInfo, recipe: Recipe, accumulator: Accumulator, members: Members | None = None
    ) -> None:
        self.info, self.recipe, self.accumulator = info, recipe, accumulator
        self.members = members or {self.whole.name: (0, self.whole.num_elements)}
        self.state = recipe.sparsifier.init(info)
        #: this step's feedback: the recipe's, with the optimizer's present settings
        self.feedback = recipe.feedback
        self._progress = Progress(summed=self.num_summed)
        self.last = BucketStep(info.name, info.num_elements)
        #: sparsifier's state and progress before the last step, until it is committed
        self._before: tuple[SparsifierState, Progress] | None = None
        self._gradient: Any = None
        #: during a step: age before it, and the hidden elements of parameters without a gradient
        self._hidden: tuple[int, Any] | None = None
        #: for rules that divide each rank's gradient by its own second moment
        apart = info.size > 1 and isinstance(recipe.feedback, Normalizing) and recipe.feedback.whole_batch
        self._similarity = RankSimilarity(info) if apart else None

    @property
    def progress(self) -> Progress:
        """The bucket's step, age of companions and gradients' similarity, as `Progress`."""
        return dataclasses.replace(self._progress, step=self.state.step)

    def restart(self, progress: Progress | None = None) -> None:
        """Resets the sparsifier's state, at the step of `progress` if given; residual and companions stay."""
        self._progress = progress = progress or Progress(summed=self.num_summed)
        if progress.summed != self.num_summed:  # companions of other gradients
            anew = {"since": progress.step, "summed": self.num_summed, "leans": (0.0, 0.0)}
            self._progress = dataclasses.replace(progress, **anew)  # type: ignore[arg-type]
        fresh = self.recipe.sparsifier.init(self.info)
        self.state = dataclasses.replace(fresh, step=self._progress.step)
        self._before = None

    @property
    def num_summed(self) -> int:
        """The number of ranks whose gradients are summed before the fold: 1, or with two levels a host's."""
        return 1

    @property
    def whole(self) -> BucketInfo:
        """Info about the whole bucket; with two levels `info` is about this rank's slice of it."""
        return self.info

    @property
    def shard(self) -> tuple[int, int]:
        """The slice [start, stop) of the bucket whose residual this rank keeps: with one level, all of it."""
        return 0, self.info.num_elements

    def spread_shard(self, values: np.ndarray) -> np.ndarray:
        """Returns a read-only array [n] with the values of this rank's shard, and zeros elsewhere."""
        return values

    def whole_arrays(self) -> tuple[np.ndarray, ...]:
        """Returns residual and companions as read-only arrays [n], zeros outside of this rank's shard."""
        return tuple(map(self.spread_shard, self.accumulator.host_arrays()))

    def load(self, arrays: Sequence[np.ndarray]) -> None:
        """Replaces residual and companions by arrays [n]; with two levels by this rank's slice of them."""
        self.accumulator.assign_arrays(arrays)

    def load_host_sum(self, arrays: Sequence[np.ndarray]) -> Synchronization[None]:
        """Loads the sum of arrays [n] over this host's ranks, with two levels; else does nothing."""
        yield from ()

    def step(
        self,
        gradient: Any,
        learning_rate: float = 1.0,
        *,
        mark_cancelled: bool = False,
        scale: float | None = None,
        absent: Sequence[tuple[int, int]] = (),
    ) -> Synchronization[SparseSum]:
        """Runs one step of this bucket: folds the gradient, runs the sparsifier, returns the sum over ranks.

        With `mark_cancelled` this rank's message makes all ranks cancel the step. The sum is not divided; the
        caller multiplies it by `scale` (1 / P by default), which must not overflow. All ranks raise the same
        error, and roll the step back; finite gradients stay in the residual.
        """
        reduced = yield from self.reduce_within_host(gradient)
        absent = absent if self.whole is self.info else ()  # a host's other ranks may have a gradient
        report = self.fold(reduced, learning_rate, mark_cancelled=mark_cancelled, absent=absent)
        return (yield from self.synchronize(report, scale))

    def reduce_within_host(self, gradient: Any) -> Synchronization[Any]:
        """Returns the gradient to fold: the given one; with two levels a rank's shard of its host's sum."""
        yield from ()
        return gradient

    def fold(
        self,
        gradient: Any,
        learning_rate: float = 1.0,
        *,
        mark_cancelled: bool = False,
        absent: Sequence[tuple[int, int]] = (),
    ) -> BucketStep:
        """Begins a step: adds a gradient to the residual, by the recipe's rule. Returns the step's report.

        Rules of optimizers multiply by the learning rate; other feedbacks leave that to the caller.
        Elements [start, stop) that are `absent` keep residual and companions as they are in this step.
        """
        started, target = time.perf_counter(), self.recipe.sparsifier.num_selected(self.info, self.state.step)
        report = BucketStep(self.info.name, self.info.num_elements, target)
        feedback = self.feedback
        if target == self.info.num_elements:
            # all is sent: clearing the velocity at sent elements would leave none
            feedback = feedback.for_dense()
        longer = 1.0 if self._similarity is None else self._similarity.step_ratio(self._progress.leans)
        rule = feedback.rule(self.info, Rates(learning_rate, self.progress.age, longer))
        if absent:
            self._hidden = self.progress.age, self.accumulator.zero_spans(absent)
        self.accumulator.step = self.state.step
        if self._similarity is None:
            self.accumulator.fold(gradient, rule)
        else:
            self._similarity.fold(self.accumulator, gradient, rule, self.state.step)
        self._gradient = gradient
        if mark_cancelled:
            self.accumulator.mark_cancelled()
        report.fold_seconds = time.perf_counter() - started
        return report

    def synchronize(self, report: BucketStep, scale: float | None = None) -> Synchronization[SparseSum]:
        """Runs the sparsifier; returns the sum over ranks. All raise on NaN, or if sum * scale overflows."""
        sum_, overflow = yield from self._sum_over_ranks(report, scale)
        self.raise_if_failed(sum_.notes.first_nonfinite, overflow)
        return sum_

    def _sum_over_ranks(
        self, report: BucketStep, scale: float | None
    ) -> Synchronization[tuple[SparseSum, int | None]]:
        """Runs the sparsifier; returns the sum and an overflow's index or None; undoes a failed step."""
        self._before = self.state, self._progress
        sum_, after = yield from self._run_sparsifier(report)
        self.state = dataclasses.replace(after, step=after.step + 1)
        self._check_steps(sum_.notes.steps)
        self.update_similarity(sum_.notes.projections)
        overflow = self.record_sum(sum_, report, scale)
        if sum_.notes.first_nonfinite or overflow is not None:
            self._undo_step()
        self.last = report
        return sum_, overflow

    def record_sum(self, sum_: SparseSum, report: BucketStep, scale: float | None) -> int | None:
        """Writes counts and norms of a sum into the report; returns the position of an overflow, or None."""
        report.num_selected = int(sum_.counts[self.info.rank])
        report.facts.update(sum_.facts)
        if (norms := sum_.notes.norms) is not None:
            report.global_error = float(np.add.reduce(norms)) / len(norms)
        # all ranks have the same sum, so all find the same overflow
        return overflowing(sum_, self.info, 1.0 / self.whole.size if scale is None else scale)

    def update_similarity(self, projections: np.ndarray) -> None:
        """Updates the estimate of how similar ranks' gradients are, by their projections [P]."""
        if self._similarity is not None and projections.any():
            learned = self._similarity.next_leans(self._progress.leans, projections)
            self._progress = dataclasses.replace(self._progress, leans=learned)

    def _check_steps(self, steps: np.ndarray, ranks: Sequence[int] | None = None) -> None:
        """Raises on all ranks if they are not at the same step; every message carries its rank's step."""
        if (steps != steps[:1]).any():
            self._undo_step()
            numbers = np.arange(len(steps)) if ranks is None else np.array(ranks)
            at = {int(step): numbers[steps == step].tolist() for step in steps}
            groups = ", ".join(f"ranks {where} at {step}" for step, where in at.items())
            raise errors.StateMismatchError(
                f"ranks are not at the same step of {self.info.name}: {groups}. Some ranks "
                "cancelled a step that others applied, so parameters differ: resume from a checkpoint"
            )

    def raise_if_failed(self, marks: Mapping[int, int], overflow: int | None) -> None:
        """Raises if `overflow` is a position, or on marks {rank: position of NaN or Inf; n for an edit}."""
        name, cancelled = self.whole.name, self.whole.num_elements
        if edited := [rank for rank, at in marks.items() if at == cancelled]:
            raise errors.EditedGradientError(name, dict.fromkeys(edited, "see its own error for names"))
        if marks:
            raise errors.NonFiniteGradientError(
                name, {rank: self.parameter_at(at) for rank, at in marks.items()}
            )
        if overflow is not None:
            raise errors.NonFiniteSumError(name, {}, self.parameter_at(overflow))

    def _run_sparsifier(self, report: BucketStep) -> Synchronization[tuple[SparseSum, SparsifierState]]:
        """Runs the sparsifier's coroutine, and counts its bytes and the time between its collectives."""
        coroutine = self.recipe.sparsifier.synchronize(self.accumulator, self.state, self.info)
        result: Any = None
        while True:
            resumed = time.perf_counter()
            try:
                request: Request = coroutine.send(result)
            except StopIteration as stop:
                finished: tuple[SparseSum, SparsifierState] = stop.value
                return finished
            finally:
                report.select_seconds += time.perf_counter() - resumed
            report.bytes_by_round.append(num_bytes_sent(request, self.info.rank))
            report.bytes_sent += report.bytes_by_round[-1]
            result = yield request

    def abandon(self, *, drop: bool = False) -> None:
        """Rolls back the last step: returns its selection to the residual; `drop` undoes its fold, too."""
        self._undo_step()
        if drop and self._gradient is not None:
            self.accumulator.drop(self._gradient)
        self._gradient = None
        self._restore_absent()

    def _undo_step(self) -> None:
        if self._before is not None:
            self.accumulator.abandon()
            (self.state, self._progress), self._before = self._before, None

    def _restore_absent(self) -> None:
        if self._hidden is not None:
            (age, hidden), self._hidden = self._hidden, None
            self.accumulator.restore_spans(hidden, self.feedback.moment_factor(age, self.progress.age) or 1.0)

    def skip(self) -> None:
        """Counts a step without folding or selecting; called when a pass is skipped, or had no batch here."""
        self.state = dataclasses.replace(self.state, step=self.state.step + 1)
        self._progress = dataclasses.replace(self._progress, since=self._progress.since + 1)
        self._gradient = self._before = None

    def accept(self) -> None:
        """Commits the last step: `abandon` cannot undo it any more. Restores absent parameters' elements."""
        self._gradient = self._before = None
        self.accumulator.accept()
        self._restore_absent()
        self.last.residual_norm = math.sqrt(self.accumulator.square_norm)

    def parameter_at(self, position: int) -> str:
        """Returns the name of the parameter to which an element of the bucket belongs."""
        for name, (start, stop) in self.members.items():
            if start <= position < stop:
                return name
        return f"element {position}"


def overflowing(sum_: SparseSum, info: BucketInfo, scale: float) -> int | None:
    """Returns the index of a sum's first element that the gradient's dtype cannot hold, or None."""
    values, limit = sum_.values, _LARGEST[info.dtype]
    if not len(values):
        return None
    # with a NaN, minimum and maximum both are NaN
    largest = sum_.largest if isinstance(sum_, WholeSum) else max(float(values.max()), -float(values.min()))
    # every rank adds an element once at most, and front ends scale before they add
    if largest * max(1.0, info.size) * scale <= limit and np.isfinite(largest):
        return None
    if sum_.whole:
        on_host = values if isinstance(values, np.ndarray) else values.cpu().numpy()
        within = np.abs(on_host) * scale <= limit  # no NaN is
        return None if within.all() else int((~within).argmax())
    indices, which = np.unique(sum_.indices, return_inverse=True)
    with np.errstate(all="ignore"):
        totals = np.bincount(which, weights=np.abs(values.astype(np.float64)), minlength=indices.size)
        within = (totals * scale <= limit) & np.isfinite(totals)
    return None if within.all() else int(indices[int(np.argmin(within))])


def num_bytes_sent(request: Request, rank: int) -> int:
    """Returns the payload bytes that this rank sends in a collective."""
    if isinstance(request, Broadcast):
        return request.buffer.nbytes if request.root == rank else 0
    if isinstance(request, Exchange):
        return sum(buffer.nbytes for peer, buffer in request.sends.items() if peer != rank)
    if isinstance(request, AllToAll):
        return sum(buffer.nbytes for peer, buffer in enumerate(request.buffers) if peer != rank)
    return request.buffer.nbytes
