"""A bucket's moves: a rank applies its selection at once; the mean over ranks replaces it later.

With `steps_ahead` a rank also moves by the largest elements of its residual until its next pass: the next
gradient sees most of what is still unsent, which would overshoot otherwise.

``(theta - x) + x`` is not theta in floating point. So each move stores the k old values of the parameters
that it changes; they are written back, the last move's first, before a mean is subtracted.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from horovod_sparse.arrays import Indices, Values
from horovod_sparse.collectives import AllGather, Synchronization
from horovod_sparse.feedback.feedbacks import OwnStep
from horovod_sparse.kernels.host.scatter import sum_duplicates
from horovod_sparse.sparsifiers import BucketInfo, SparseSum
from horovod_sparse.sparsifiers.base import SelectAndGather
from horovod_sparse.telemetry import BucketStep
from horovod_sparse.training.engine import Starter, Task
from horovod_sparse.training.parts import BucketPart, Parameters
from horovod_sparse.wire import WireFormat, pack, unpack_sum

#: most indices whose parameters `remember_parameters` remembers; a step ahead has n / 64 elements
_NUM_NOTED, _AHEAD = 4096, 64


@dataclass
class Move:
    """Indices and values that a rank subtracted from its parameters in a pass, and their values before."""

    indices: Indices
    values: Values
    before: Any


@dataclass
class Exchange:
    """An allgather in flight that averages moves over ranks."""

    task: Task
    num_moves: int
    message: np.ndarray
    report: BucketStep


class OwnMoves:
    """Applies a rank's own selection to its parameters at once, and later replaces it by the ranks' mean."""

    def __init__(self, part: StepPart) -> None:
        self._bucket, self._parameters = part.bucket, part.parameters
        bucket = part.bucket
        #: messages have no fixed length: ranks may have made different numbers of moves
        self._wire = bucket.recipe.sparsifier.wire
        #: moves that no mean has replaced yet, and exchanges whose mean was not applied yet, the oldest first
        self.moves: list[Move] = []
        self.in_flight: deque[Exchange] = deque()
        self._report = BucketStep(bucket.info.name, bucket.info.num_elements)
        #: the step ahead that the parameters contain; none, or one
        self.ahead: list[Move] = []
        #: some indices of the last move, and their parameters after the pass; for `was_edited`
        self._left: tuple[Indices, Any] | None = None
        #: number of moves and message of each exchange that was in flight when a checkpoint was saved
        self._resumed: deque[tuple[int, np.ndarray]] = deque()

    @property
    def task(self) -> Task:
        """The collective of the oldest exchange in flight."""
        return self.in_flight[0].task

    def select(self, report: BucketStep) -> None:
        """Subtracts a selection of the residual from the parameters (a move); called after a finite fold."""
        bucket, sparsifier = self._bucket, self._bucket.recipe.sparsifier
        n, step = bucket.info.num_elements, bucket.state.step
        facts: Mapping[str, float] = {}
        after, most = None, None
        if isinstance(sparsifier, SelectAndGather):
            k = sparsifier.num_selected(bucket.info, step)
            if bucket.recipe.feedback.steps_ahead:
                # first: the next fold notes as many candidates, and then neither search reads all elements
                most = bucket.accumulator.largest(n // _AHEAD + k)
            indices, facts, after = sparsifier.select(bucket.accumulator, k, bucket.state, bucket.info)
        else:
            indices = np.arange(n, dtype=np.int32)
        sent, ahead = bucket.accumulator.remove(indices), list[tuple[Indices, Values]]()
        if most is not None and len(indices) < n:
            values = bucket.accumulator.take(most)
            unsent = np.flatnonzero(values)
            ahead = [(most[unsent], values[unsent])]
        self._move([(indices, sent)], ahead)
        bucket.state = replace(after or bucket.state, step=step + 1)
        report.facts.update(facts)
        bucket.last = self._report = report
        bucket.accept()

    def undo_step_ahead(self) -> None:
        """Undoes the step ahead in the parameters; the residual has kept its elements."""
        self._move(())

    def remember_parameters(self) -> None:
        """Called at a pass's end: remembers some parameters for `was_edited`."""
        if moves := [*self.moves, *self.ahead]:
            indices = moves[-1].indices
            indices = indices[:: 1 + len(indices) // _NUM_NOTED]
            self._left = indices, self._parameters.take(indices)

    def was_edited(self) -> bool:
        """True if a remembered parameter has changed since the pass: undoing moves would lose the change."""
        if self._left is None:
            return False
        indices, before = self._left
        now = self._parameters.take(indices)
        return not all(bool((one == other).all()) for one, other in zip(before, now, strict=True))

    def _move(
        self, steps: Sequence[tuple[Indices, Values]], ahead: Sequence[tuple[Indices, Values]] = ()
    ) -> None:
        """Subtracts moves from the parameters, undoes the last step ahead, and makes the one given."""
        undone, given = [(one.indices, one.before) for one in self.ahead], [*steps, *ahead]
        if undone or given:
            _, before = self._parameters.replace(undone, moves=given)
            moves = [Move(*step, old) for step, old in zip(given, before, strict=True)]
            self.moves += moves[: len(steps)]
            self.ahead, self._left = moves[len(steps) :], None

    def begin(self, starter: Starter, name: str) -> None:
        """Begins the exchange of all moves that are not in an exchange yet."""
        if self._resumed:
            self._send_message(starter, name, *self._resumed.popleft())
            return
        bucket, info = self._bucket, self._bucket.info
        mine = self.moves[sum(one.num_moves for one in self.in_flight) :]
        indices, values = _sum_of_moves(mine, info)
        sent = values
        if not self._wire.exact:
            sent = self._wire.round(values)
            bucket.accumulator.add(indices, values - sent)
            # the step ahead is one of the residual with these rounding errors
            self._move((), [(one.indices, bucket.accumulator.take(one.indices)) for one in self.ahead])
        message = pack(indices, sent, bucket.accumulator.report, self._wire, info.num_elements)
        self._send_message(starter, name, len(mine), message)

    def _send_message(self, starter: Starter, name: str, num_moves: int, message: np.ndarray) -> None:
        report, self._report = self._report, replace(self._report)
        report.bytes_sent, report.bytes_by_round = message.nbytes, [message.nbytes]
        task = starter.start(name, _gather_moves(message, self._bucket.info, self._wire))
        self.in_flight.append(Exchange(task, num_moves, message, report))

    def _decode(self, message: np.ndarray) -> tuple[Indices, Values]:
        info = self._bucket.info
        own = unpack_sum(message, 1, self._wire, info.num_elements, info.value_dtype)
        return own.indices, own.values

    def received_sum(self, scale: float) -> SparseSum:
        """Returns the oldest exchange's sum, which has arrived; raises on all ranks if it overflows."""
        exchange = self.in_flight[0]
        total: SparseSum = exchange.task.value()
        overflow = self._bucket.record_sum(total, exchange.report, scale)
        self._bucket.raise_if_failed({}, overflow)
        return total

    def apply_mean(self, total: SparseSum, scale: float, decay: Mapping[float, Sequence[int]]) -> int:
        """Replaces the oldest exchange's moves by their mean over ranks, after applying weight decay.

        `decay` is {factor: numbers of parameters}. Returns the size of the union.
        """
        exchange = self.in_flight.popleft()
        undone = [(one.indices, one.before) for one in (*self.ahead, *reversed(self.moves))]
        self.moves, self._left = self.moves[exchange.num_moves :], None
        later = [*self.moves, *self.ahead]
        again = [(move.indices, move.values) for move in later]
        num_union, before = self._parameters.replace(undone, decay, total, scale, again)
        for move, old in zip(later, before, strict=True):
            move.before = old
        self._bucket.last = exchange.report
        return num_union

    def cancel(self) -> None:
        """Undoes the oldest exchange's moves, and adds them to the residual again."""
        exchange = self.in_flight.popleft()
        later = [(move.indices, move.values) for move in self.moves[exchange.num_moves :]]
        self._undo_moves()
        self._bucket.accumulator.add(*self._decode(exchange.message))
        self._move(later)

    def pending(self) -> list[tuple[Indices, Values]]:
        """Returns indices and values of all moves that no mean has replaced yet."""
        flying = [(one.num_moves, one.message) for one in self.in_flight] + [*self._resumed]
        later = self.moves[sum(num_moves for num_moves, _ in flying) :]
        return [self._decode(one) for _, one in flying] + [(one.indices, one.values) for one in later]

    def _undo_moves(self) -> None:
        if undone := [(move.indices, move.before) for move in (*self.ahead, *reversed(self.moves))]:
            self._parameters.replace(undone)
        self.moves, self.ahead, self._left = [], [], None

    def roll_back(self) -> None:
        """Undoes all moves that no mean has replaced, and returns them to the residual."""
        pending = self.pending()
        if self.was_edited():  # other parameters were loaded over the moves
            self.moves, self.ahead, self._left = [], [], None
        self._undo_moves()
        self.in_flight.clear()
        self._resumed.clear()
        for indices, values in pending:
            self._bucket.accumulator.add(indices, values)

    @contextlib.contextmanager
    def common(self) -> Iterator[None]:
        """Returns a context in which the parameters are the common ones; afterwards it redoes the moves."""
        moves, ahead, noted = self.moves, self.ahead, self._left is not None
        self._undo_moves()
        try:
            yield
        finally:
            redone = ([(move.indices, move.values) for move in some] for some in (moves, ahead))
            self._move(*redone)
            if noted:
                self.remember_parameters()

    def save(self, array: Callable[[np.ndarray], Any]) -> dict[str, Any]:
        """Returns moves and messages in flight, for a checkpoint."""

        def saved(moves: Sequence[Move]) -> list[list[Any]]:
            to_save = self._parameters.to_save
            return [[array(one.indices), array(one.values), to_save(one.before, array)] for one in moves]

        flying = [[one.num_moves, array(one.message)] for one in self.in_flight]
        return {"moves": saved(self.moves), "in_flight": flying, "ahead": saved(self.ahead)}

    def loaded(self, saved: Mapping[str, Any]) -> OwnMoves:
        """Loads moves that the loaded parameters contain; `begin` sends messages that were in flight."""
        self.moves, self.ahead = (
            [
                Move(np.asarray(indices), np.asarray(values), self._parameters.from_saved(before))
                for indices, values, before in saved[name]
            ]
            for name in ("moves", "ahead")
        )
        self._resumed = deque((num_moves, np.asarray(message)) for num_moves, message in saved["in_flight"])
        return self


class JointMoves:
    """Applies the sum over ranks once it has arrived (every=1 and delay=0), for any sparsifier."""

    #: the exchange in flight; None without one
    task: Any = None

    def __init__(self, part: Any) -> None:
        self._part = part

    def begin(self, starter: Starter, name: str) -> None:
        bucket = self._part.bucket
        self.task = starter.start(name, bucket.synchronize(self._part.report, 1.0 / bucket.info.size))

    def received_sum(self, scale: float) -> SparseSum:
        """Returns the exchange's sum, which has arrived; raises its error on all ranks alike."""
        total: SparseSum = self.task.value()
        return total

    def apply_mean(self, total: SparseSum, scale: float, decay: Mapping[float, Sequence[int]]) -> int:
        self.task = None
        num_union, _ = self._part.parameters.replace((), decay, total, scale)
        self._part.bucket.accept()
        return int(num_union)

    def cancel(self) -> None:
        """Cancels the exchange, and drops its gradients."""
        self.task = None
        self._part.abandon(drop=True)

    def undo_step_ahead(self) -> None:
        """Does nothing: there is no step ahead."""

    def pending(self) -> list[tuple[Indices, Values]]:
        """Returns no moves: the parameters are the common ones."""
        return []

    def roll_back(self) -> None:
        if self.task is not None:
            self.task = None
            self._part.abandon()

    def common(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class StepPart(BucketPart):
    """A bucket of parameters with own steps; `moves` applies them at once, or their sum when it is there."""

    #: of the bucket's gradient
    num_bytes: int
    #: each parameter's gradient in this pass, or None
    gradients: list[Any]

    def bind(self, parameters: Parameters, moves_at_once: bool) -> None:
        """Sets the parameters' memory, and `moves`: at once (`OwnMoves`), or with the sum (`JointMoves`)."""
        self.parameters = parameters
        #: makes moves of which none is in flight
        self.new_moves: Callable[[], Any] = partial(OwnMoves if moves_at_once else JointMoves, self)
        self.moves = self.new_moves()
        self.now = OwnStep(self.bucket.feedback, (1.0, 0.0), 1.0, 0.0)
        self.release()

    def set_gradients(self, now: OwnStep, gradients: Iterable[Any]) -> None:
        self.now, self.gradients, self.bucket.feedback = now, list(gradients), now.feedback

    def release(self) -> None:
        """Drops references to the pass's gradients, so that their memory can be freed."""
        self.gradients = [None] * len(self.names)

    @property
    def absent(self) -> list[int]:
        """Returns the numbers of parameters that have no gradient in this pass, or a learning rate of 0."""
        still = self.now.rate == 0.0
        return [number for number, one in enumerate(self.gradients) if still or one is None]

    def fold(self) -> BucketStep:
        """Folds this pass's gradients; residual and moments of absent parameters stay."""
        absent = [self.spans[number] for number in self.absent]
        self.report = self.bucket.fold(self.prepare_fold(), self.now.rate, absent=absent)
        return self.report

    def prepare_fold(self) -> Any:
        """Returns the weighted sum of gradients and parameters (coupled weight decay) for `Bucket.fold`."""
        return self.parameters.fold_input(self.gradients, self.now.weights)

    def add_moves_to(self, residuals: dict[str, Any], moved: Sequence[tuple[Indices, Values]]) -> None:
        """Adds moves to this part's entries of `residuals`, {parameter: array}; called when saving."""
        info = self.bucket.info
        total = np.zeros(info.num_elements, info.value_dtype)
        for indices, values in moved:
            total[np.asarray(indices)] += np.asarray(values)
        for number, (name, span) in enumerate(zip(self.names, self.spans, strict=True)):
            residuals[name] = residuals[name] + self.shaped(number, total[slice(*span)])


def _gather_moves(message: np.ndarray, info: BucketInfo, wire: WireFormat) -> Synchronization[SparseSum]:
    words = yield AllGather(message)
    return unpack_sum(words, info.size, wire, info.num_elements, info.value_dtype)


def _sum_of_moves(moves: Sequence[Move], info: BucketInfo) -> tuple[Indices, Values]:
    """Returns the sum of several moves: indices, ascending and unique, and values."""
    if len(moves) == 1:
        return moves[0].indices, moves[0].values
    if not moves:
        return np.empty(0, np.int32), np.empty(0, info.value_dtype)
    indices = np.concatenate([move.indices for move in moves])
    values = np.concatenate([move.values for move in moves])
    return sum_duplicates(indices, values)[:2]
