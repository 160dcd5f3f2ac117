"""Messages between two ranks beside Horovod for TensorFlow: a thread that runs whole synchronizations.

TensorFlow has no operation that sends to one rank, and each round of Horovod's all-to-all takes a cycle.
So where all ranks can use MPI, a synchronization that goes between pairs leaves the graph after
its first leg, and comes back when it has ended: the graph's last function waits for it. Nothing waits in
between, so every rank has started all that it has to start before it waits, in whatever order.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.carriers.exchanges import by_exchanges
from horovod_sparse.carriers.pairs import Pairs
from horovod_sparse.carriers.transport_choice import (
    Blocking,
    TransportChoice,
    agreed_transport,
    by_horovod,
    rounds_by_pairs,
)
from horovod_sparse.collectives import AllGather, Exchange, Request, Synchronization
from horovod_sparse.errors import DeadlineError, UnsupportedError
from horovod_sparse.sparsifiers.rounds.pairs import bruck_all_gather
from horovod_sparse.tensorflow._horovod import hvd, is_elastic, present_start
from horovod_sparse.training.deadline import Deadline

#: between two looks at messages under way
_SLEEP_SECONDS = 20e-6
#: between two looks at the deadline by who waits for what a thread has
_WAIT_SECONDS = 0.25


def between_pairs(kinds: Sequence[type[Request]]) -> bool:
    """Whether a synchronization sends between pairs of ranks, alone or beside allgathers, or is to do so."""
    return bool(kinds) and (rounds_by_pairs() or (Exchange in kinds and set(kinds) <= {Exchange, AllGather}))


def over_pairs(coroutine: Synchronization[Any], rank: int, size: int) -> Synchronization[Any]:
    """A synchronization whose collectives go between pairs, too: allgathers by Bruck's algorithm.

    Where all rounds are to be such messages an allgather is one exchange of all with all.

    Example:
        >>> from horovod_sparse.simulation import run_lockstep
        >>> def everyone(rank):
        ...     gathered = yield AllGather(np.full(rank, rank, np.int32))
        ...     return gathered.tolist()
        >>> run_lockstep([over_pairs(everyone(rank), rank, 3) for rank in range(3)])
        [[1, 2, 2], [1, 2, 2], [1, 2, 2]]
    """
    answer: Any = None
    while True:
        try:
            request = coroutine.send(answer)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, AllGather) and not rounds_by_pairs():
            messages = yield from bruck_all_gather(request.buffer, range(size), rank)
            answer = np.concatenate(messages)
        elif not isinstance(request, Exchange):
            answer = yield from by_exchanges(request, rank, size)
        else:
            answer = yield request


class PairsSynchronization:
    """A synchronization that the thread of pairs has, from its first request to its end.

    Attributes:
        result: what the coroutine returned.
        error: what it raised.
        legs: see `Task`.
    """

    def __init__(self, name: str, coroutine: Synchronization[Any], deadline: Deadline) -> None:
        self.name, self.result, self.error = name, None, None
        self.legs: list[tuple[float, float]] = []
        self._coroutine, self._deadline = coroutine, deadline
        self._ended = threading.Event()
        #: held by who runs the coroutine
        self._running = threading.Lock()
        self._handle: Any = None
        self._round = 0
        self._request: Any = None
        self._resume(None)

    @property
    def ended(self) -> bool:
        """Whether there is a result or an error."""
        return self._ended.is_set()

    def wait(self, since: float | None = None) -> None:
        """Until it has ended; it is given up where that takes too long."""
        begun = time.perf_counter() if since is None else since
        try:
            while not self._ended.wait(_WAIT_SECONDS):
                self._deadline.check(time.perf_counter() - begun, self.name, self._round)
        except DeadlineError as error:
            self.give_up(error)
            raise
        self._deadline.moved()

    def give_up(self, error: Exception) -> None:
        """Ends it with an error, if it has not ended: the thread lets go of it."""
        with self._running:
            if not self.ended:
                self._end(error=error)

    def advance(self, pairs: Pairs, rank: int) -> bool:
        """Goes on as far as it can without waiting; whether it went on at all."""
        with self._running:
            return not self.ended and self._advance(pairs, rank)

    def _advance(self, pairs: Pairs, rank: int) -> bool:
        try:
            if self._handle is None:
                self._handle = pairs.start(self._request, f"{self.name}.{self._round}", rank)
            if not self._handle.done():
                return False
            answer, self._handle = self._handle.result(), None
        except Exception as error:
            self._end(error=error)
            return True
        self._round += 1
        self._resume(answer)
        return True

    def _resume(self, answer: Any) -> None:
        begun = time.perf_counter()
        try:
            self._request = self._coroutine.send(answer)
        except StopIteration as stop:
            self._end(result=stop.value)
        except Exception as error:
            self._end(error=error)
        finally:
            self.legs.append((begun, time.perf_counter()))

    def _end(self, *, result: Any = None, error: Any = None) -> None:
        self._coroutine.close()
        self.result, self.error = result, error
        self._ended.set()


class PairsThread:
    """The thread: it alone speaks to the others."""

    def __init__(self, pairs: Pairs, rank: int) -> None:
        self._pairs, self._rank = pairs, rank
        self._news: deque[PairsSynchronization] = deque()
        self._wake, self._stopped = threading.Condition(), False
        threading.Thread(target=self._run, name="horovod_sparse.pairs", daemon=True).start()

    def take(self, entrusted: PairsSynchronization) -> None:
        """Does not wait."""
        with self._wake:
            stopped = self._stopped
            if not stopped:
                self._news.append(entrusted)
                self._wake.notify()
        if stopped:
            entrusted.give_up(_anew())

    def stop(self) -> None:
        """Ends it; synchronizations that are under way end with an error. Does not wait."""
        with self._wake:
            self._stopped = True
            self._wake.notify()

    def _run(self) -> None:
        pairs, under_way = self._pairs, list[PairsSynchronization]()
        while True:
            with self._wake:
                while not (self._news or under_way or self._stopped):
                    self._wake.wait()
                under_way += self._news
                self._news.clear()
            if self._stopped:
                break
            moved = False
            for entrusted in under_way:
                while not entrusted.ended and entrusted.advance(pairs, self._rank):
                    moved = True
            under_way = [entrusted for entrusted in under_way if not entrusted.ended]
            if not moved:
                time.sleep(_SLEEP_SECONDS)
        for entrusted in under_way:
            entrusted.give_up(_anew())


def _anew() -> UnsupportedError:
    return UnsupportedError(
        "Horovod was started again since this function was traced, and messages travel in another way now: "
        "trace it again"
    )


#: by number and ranks of the process set (a number is given again when its set was removed): Horovod's start,
#: the thread, and how messages travel; None and why, where the all-to-all is used
_pairs_threads: dict[tuple[int, tuple[int, ...]], tuple[object, PairsThread | None, str]] = {}


def _key(process_set: Any) -> tuple[int, tuple[int, ...]]:
    return int(process_set.process_set_id), tuple(process_set.ranks or ())


def pairs_thread_for(process_set: Any) -> tuple[PairsThread | None, str]:
    """The thread of a process set, where all its ranks can use one; agreed at the first trace of a start."""
    key, start = _key(process_set), present_start()
    if key not in _pairs_threads or _pairs_threads[key][0] is not start:
        for former in [one for one, (since, _, _) in _pairs_threads.items() if since is not start]:
            thread = _pairs_threads.pop(former)[1]
            if thread is not None:
                thread.stop()
        chosen = _agreed(process_set)
        made = None if chosen.pairs is None else PairsThread(chosen.pairs, int(process_set.rank()))
        _pairs_threads[key] = start, made, chosen.words
    return _pairs_threads[key][1:]


def present_pairs_thread(process_set: Any, traced: PairsThread) -> PairsThread:
    """The thread that there is now, for a function that was traced before Horovod was started again."""
    return _pairs_threads.get(_key(process_set), (None, None, ""))[1] or traced


def _agreed(process_set: Any) -> TransportChoice:
    """How messages between two ranks travel; all ranks ask where any does."""
    rank = int(process_set.rank())
    if is_elastic():
        # who joins traces while the others train: nothing can be agreed upon
        return by_horovod("elastic training", rank)
    with tf.init_scope():
        if not tf.executing_eagerly():
            return by_horovod("TensorFlow 1's graphs", rank)
        name = f"horovod_sparse.pairs.{process_set.process_set_id}"
        steps, answer = agreed_transport(hvd, process_set, int(process_set.process_set_id)), None
        for number in itertools.count():
            try:
                request: Any = steps.send(answer)
            except StopIteration as stop:
                chosen: TransportChoice = stop.value
                return chosen
            if isinstance(request, Blocking):
                answer = request.work()
            else:
                message = tf.constant(request.buffer)
                answer = hvd.allgather(message, name=f"{name}.{number}", process_set=process_set).numpy()
    raise AssertionError("an agreement ends")
