"""Buckets, each with a task that runs its coroutine in the host functions of a graph."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from horovod_sparse.arrays import GradientParts
from horovod_sparse.carriers import rounds_over_hosts, run_over_hosts
from horovod_sparse.collectives import AllGather, Request, Synchronization
from horovod_sparse.errors import CollectiveMismatchError
from horovod_sparse.kernels.host.scatter import apply_scaled_sums
from horovod_sparse.sparsifiers.base import accumulator_dtype
from horovod_sparse.telemetry import BucketReport
from horovod_sparse.tensorflow.collectives import Wire, empty_messages, from_wire, to_wire
from horovod_sparse.tensorflow.tensors import ALIGNMENT, ReusedArrays, aligned_zeros, numpy_dtype
from horovod_sparse.tensorflow.waiting import Wait
from horovod_sparse.topology import RankAndSize, Topology
from horovod_sparse.training import parts as common
from horovod_sparse.training.engine import Facts, PartSpec

_log = logging.getLogger("horovod_sparse")


class Task:
    """Runs a coroutine in a graph's fixed rounds, anew in every step.

    No method raises, since other ranks would wait for ever: the exception is stored in `error`, and the
    remaining rounds send empty messages.
    """

    def __init__(
        self,
        name: str,
        kinds: tuple[type[Request], ...],
        value_dtype: np.dtype[Any],
        title: str = "",
    ) -> None:
        #: round r communicates as ``{name}.{r}``; an error calls it by its title
        self.name, self.kinds, self.value_dtype, self.title = name, kinds, value_dtype, title or name
        self.ranks = (0, 1)
        #: the coroutine's result, and its error
        self.result: Any = None
        self.error: BaseException | None = None
        self._coroutine: Synchronization[Any] | None = None
        self._request: Request | None = None
        self._round = 0
        #: begin and end (`time.perf_counter`) of each piece of work between the last step's collectives
        self.legs: list[tuple[float, float]] = []
        #: True once the last result was applied or rolled back; the part sets it
        self.settled = True
        self._lifetime: weakref.ref[np.ndarray] | None = None

    @property
    def under_way(self) -> bool:
        """True while the coroutine has not ended, even if its step has failed."""
        return self._coroutine is not None

    def current_wait(self, now: float) -> Wait | None:
        """Returns the seconds waited for other ranks, with title and round; None if no collective runs."""
        graph_runs = self._lifetime is not None and self._lifetime() is not None
        if self.settled or self.next_kind is None or not graph_runs or not self.legs:
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
        """Begins a step that has failed already: returns an empty message, as all later rounds do."""
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
            return self._fail_with(error)
        return self._advance(answer)

    @contextlib.contextmanager
    def record_work(self) -> Iterator[None]:
        """Returns a context for work between collectives; appends its begin and end time to `legs`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.legs.append((began, time.perf_counter()))

    def cancel(self) -> None:
        """Closes the coroutine of a step that has not ended, with a warning; does nothing if none runs."""
        if self._coroutine is not None:
            _log.warning("%s: the last synchronization has not ended, and is cancelled", self.name)
            self._coroutine.close()
            self._coroutine = None

    def _reset(self, ranks: RankAndSize) -> None:
        self.cancel()
        self.settled = False
        self.result, self.error, self.ranks, self._round = None, None, ranks, 0

    def _advance(self, answer: Any) -> Wire:
        assert self._coroutine is not None  # callers have checked this
        try:
            request = self._coroutine.send(answer)
        except StopIteration as stop:
            self._coroutine, self.result = None, stop.value
            if self._round != len(self.kinds):
                return self._fail_with(self._mismatch_error("has ended"))
            return self._empty_messages()
        except Exception as error:
            return self._fail_with(error)
        if type(request) is not self.next_kind:
            return self._fail_with(self._mismatch_error(f"asks for {type(request).__name__}"))
        try:
            self._request = request
            return to_wire(request, self.value_dtype, self.ranks)
        except Exception as error:
            return self._fail_with(error)

    def _mismatch_error(self, what: str) -> CollectiveMismatchError:
        declared = ", ".join(kind.__name__ for kind in self.kinds)
        return CollectiveMismatchError(
            f"{self.name} {what} in round {self._round}, but the graph was traced for {declared}. If the "
            "number of ranks has changed, trace the function again"
        )

    def _fail_with(self, error: BaseException) -> Wire:
        if self._coroutine is not None:
            self._coroutine.close()
        self._coroutine, self._request, self.error = None, None, error
        return self._empty_messages()

    def _empty_messages(self) -> Wire:
        # a rank alone may have no rounds
        kind = self.kinds[min(self._round, len(self.kinds) - 1)] if self.kinds else AllGather
        return empty_messages(kind, self.value_dtype, self.ranks[1])


def graph_lifetime_token(tasks: Iterable[Task]) -> np.ndarray:
    """Returns an array that a graph frees when its run has ended, which tasks notice by a weak reference."""
    token = aligned_zeros(ALIGNMENT).view(np.int32)
    for task in tasks:
        task._lifetime = weakref.ref(token)
    return token


def idle_seconds(tasks: Sequence[Task], now: float) -> float:
    """Returns the seconds without any task's work, spent on collectives, since the last task began."""
    since = max((task.legs[0][1] for task in tasks if task.legs), default=now)
    later = [leg for task in tasks for leg in task.legs if leg[1] > since]
    busy = sum(end - max(begin, since) for begin, end in later)
    return max(0.0, now - since - busy)


class Part(common.BucketPart):
    def __init__(
        self,
        spec: PartSpec,
        facts: Facts,
        ranks: RankAndSize,
        topology: Topology | None,
        *,
        label: str,
        scale: float | None = None,
    ) -> None:
        self.dtype = facts[spec.names[0]][0].dtype
        shapes = [facts[name][1].shape for name in spec.names]
        super().__init__(spec, shapes, ranks, self.dtype, topology=topology)
        #: see `Bucket.step`
        self._scale = scale
        self._rank, self._topology = ranks[0], topology
        kinds = self.bucket.recipe.sparsifier.rounds(self.bucket.info.size)
        kinds = kinds if topology is None else rounds_over_hosts(kinds, topology)
        # the name is equal on all ranks, and differs between plans
        collective = f"{label}.{zlib.crc32(repr((self.name, self.names)).encode()):08x}"
        self.task = Task(collective, kinds, accumulator_dtype(self.dtype), f"{label}.{self.name}")
        self._outputs = ReusedArrays(self.shapes, numpy_dtype(self.dtype))

    def begin(self, gradients: Sequence[np.ndarray]) -> Synchronization[Any]:
        """Returns a step's coroutine, which folds these gradients, and exchanges and sums the selections."""
        self.roll_back_unapplied()
        step = self.bucket.step(GradientParts(gradients), scale=self._scale)
        return step if self._topology is None else run_over_hosts(step, self._topology, self._rank)

    def apply(self, scale: float) -> tuple[list[np.ndarray], BucketReport]:
        """Ends the step: returns each variable's sum over ranks times `scale`, dense, and the report."""
        started = time.perf_counter()
        sum_ = self.task.result
        arrays, indices = self._outputs.acquire(), None if sum_.whole else sum_.indices
        num_union = apply_scaled_sums(arrays, self.spans, indices, sum_.values, scale)
        self.task.settled = True
        self.bucket.accept()
        return arrays, BucketReport(
            step=self.bucket.last,
            num_union=num_union,
            dense_bytes=self.bucket.whole.num_elements * self._outputs.dtype.itemsize,
            norms=sum_.notes.norms,
            apply_seconds=time.perf_counter() - started,
        )

    def abandon(self, *, drop: bool = False) -> None:
        super().abandon(drop=drop)
        self.task.settled = True

    def roll_back_unapplied(self) -> None:
        """Cancels the last step if its sum was not applied; called before a step, a load or `agree`."""
        if not self.task.settled:
            self.task.cancel()
            self.abandon()

    def return_to_residual(self, names: Collection[str]) -> None:
        """Adds these variables' last sum to the residuals, an equal share per rank: they had no gradient."""
        # ranks that hold the same elements; with two levels those of a column
        sum_, share = self.task.result, 1.0 / self.bucket.info.size
        first, last = self.bucket.shard
        for name, (start, stop) in zip(self.names, self.spans, strict=True):
            if name in names:
                inside = (sum_.indices >= max(start, first)) & (sum_.indices < min(stop, last))
                indices, which = np.unique(sum_.indices[inside], return_inverse=True)
                total = np.bincount(which, weights=sum_.values[inside], minlength=indices.size)
                self.bucket.accumulator.add(
                    indices - np.int32(first), (total * share).astype(sum_.values.dtype)
                )
