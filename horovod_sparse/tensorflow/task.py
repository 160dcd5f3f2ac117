"""Runs one coroutine in pieces: in the host functions that a graph calls, from one round to the next."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from horovod_sparse.collectives import AllGather, Request, Synchronization
from horovod_sparse.errors import ArgumentError, CollectiveMismatchError
from horovod_sparse.sparsifiers import BucketInfo, Sparsifier
from horovod_sparse.tensorflow._horovod import is_elastic
from horovod_sparse.tensorflow.collectives import Wire, empty_messages, from_wire, to_wire
from horovod_sparse.tensorflow.tensors import ALIGNMENT, aligned_zeros
from horovod_sparse.tensorflow.waiting import Wait
from horovod_sparse.topology import RankAndSize

_log = logging.getLogger("horovod_sparse")

#: numbers of ranks at which rounds are compared: 1 has none, 2 has one stage, 3 has two
_SIZES = (1, 2, 3)


class Task:
    """Runs a coroutine in a graph's fixed rounds, anew in every step.

    None of its methods raises, or the others would wait for ever: the exception stands in `error`, and empty
    messages take the place of the rounds that are left.
    """

    def __init__(
        self,
        name: str,
        kinds: tuple[type[Request], ...],
        value_dtype: np.dtype[Any],
        waits: bool = False,
        title: str = "",
    ) -> None:
        #: round r communicates as ``{name}.{r}``; an error calls it by its title
        self.name, self.kinds, self.value_dtype, self.title = name, kinds, value_dtype, title or name
        #: True if one host function runs all rounds; see `rounds_may_vary`
        self.waits = waits
        self.ranks = (0, 1)
        #: what the coroutine returned, or raised
        self.result: Any = None
        self.error: BaseException | None = None
        self._coroutine: Synchronization[Any] | None = None
        self._request: Request | None = None
        self._round = 0
        #: begin and end (`time.perf_counter`) of each piece of work between the last step's collectives
        self.legs: list[tuple[float, float]] = []
        #: True once the last result was applied or rolled back; the part sets it
        self.settled = True
        self._held: weakref.ref[np.ndarray] | None = None

    @property
    def under_way(self) -> bool:
        """True while the coroutine has not ended, even if its step has failed."""
        return self._coroutine is not None

    def current_wait(self, now: float) -> Wait | None:
        """Returns how long this rank has waited for which round; None if it waits for none."""
        is_held = self._held is not None and self._held() is not None
        if self.settled or self.next_kind is None or not is_held or not self.legs:
            return None
        return now - self.legs[-1][1], self.title, self._round

    @property
    def next_kind(self) -> type[Request] | None:
        """Returns the next round's kind of collective; None after the last round."""
        return self.kinds[self._round] if self._round < len(self.kinds) else None

    def start(self, coroutine: Synchronization[Any], ranks: RankAndSize) -> Wire:
        self._reset(ranks)
        self._coroutine = coroutine
        return self._advance(None)

    def fail(self, error: BaseException, ranks: RankAndSize) -> Wire:
        """Begins a step that has failed already: sends empty messages in all rounds."""
        self._reset(ranks)
        self.error = error
        return self._empty_messages()

    def resume(self, output: np.ndarray, splits: np.ndarray) -> Wire:
        """Gives a collective's result to the coroutine; returns its next message, empty after the last."""
        self._round += 1
        if self._coroutine is None or self._request is None:
            return self._empty_messages()
        try:
            answer = from_wire(self._request, output, splits)
        except Exception as error:
            return self._end_with(error)
        return self._advance(answer)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.legs.append((began, time.perf_counter()))

    def drop(self) -> None:
        """Closes the coroutine of a step that failed elsewhere."""
        if self._coroutine is not None:
            _log.warning("%s: the last synchronization did not end, and is cancelled", self.name)
            self._coroutine.close()
            self._coroutine = None

    def _reset(self, ranks: RankAndSize) -> None:
        self.drop()
        self.settled = False
        self.result, self.error, self.ranks, self._round = None, None, ranks, 0

    def _advance(self, answer: Any) -> Wire:
        assert self._coroutine is not None  # callers have checked this
        try:
            request = self._coroutine.send(answer)
        except StopIteration as stop:
            self._coroutine, self.result = None, stop.value
            if self._round != len(self.kinds):
                return self._end_with(self._mismatch_error("has ended"))
            return self._empty_messages()
        except Exception as error:
            return self._end_with(error)
        if type(request) is not self.next_kind:
            return self._end_with(self._mismatch_error(f"asks for {type(request).__name__}"))
        try:
            self._request = request
            return to_wire(request, self.value_dtype, self.ranks)
        except Exception as error:
            return self._end_with(error)

    def _mismatch_error(self, what: str) -> CollectiveMismatchError:
        declared = ", ".join(kind.__name__ for kind in self.kinds)
        return CollectiveMismatchError(
            f"{self.name} {what} in round {self._round}, but the graph was traced for {declared}. If the "
            "number of ranks has changed, trace the function again"
        )

    def _end_with(self, error: BaseException) -> Wire:
        if self._coroutine is not None:
            self._coroutine.close()
        self._coroutine, self._request, self.error = None, None, error
        return self._empty_messages()

    def _empty_messages(self) -> Wire:
        # a rank alone may have no rounds
        kind = self.kinds[min(self._round, len(self.kinds) - 1)] if self.kinds else AllGather
        return empty_messages(kind, self.value_dtype, self.ranks[1])


def graph_lifetime_token(tasks: Iterable[Task]) -> np.ndarray:
    """Returns an array that a running graph keeps alive, so that tasks notice when the graph has ended."""
    held = aligned_zeros(ALIGNMENT).view(np.int32)
    for task in tasks:
        task._held = weakref.ref(held)
    return held


def idle_seconds(tasks: Sequence[Task], now: float) -> float:
    """Returns how long this rank has waited for collectives, without work, since the last task began."""
    since = max((task.legs[0][1] for task in tasks if task.legs), default=now)
    later = [leg for task in tasks for leg in task.legs if leg[1] > since]
    busy = sum(end - max(begin, since) for begin, end in later)
    return max(0.0, now - since - busy)


def rounds_may_vary(sparsifier: Sparsifier, num_elements: int, two_levels: bool = False) -> bool:
    """True if a bucket's number of rounds may change in elastic training, so that no graph can fix it."""
    if not is_elastic() or two_levels:
        return is_elastic()
    kinds = set()
    for size in _SIZES:
        with contextlib.suppress(ArgumentError):  # its arguments do not go with this size
            kinds.add(sparsifier.resolved(BucketInfo("any", num_elements, 0, size)).rounds(size))
    return len(kinds) > 1
