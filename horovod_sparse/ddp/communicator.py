"""Runs coroutines in a thread of their own, one after the other, in the order in which they were started."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Generator, Iterable
from typing import Any

import torch

from horovod_sparse.collectives import Synchronization
from horovod_sparse.ddp.collectives import Carrier
from horovod_sparse.errors import (
    DeadlineError,
    EditedGradientError,
    NonFiniteGradientError,
    StateMismatchError,
)
from horovod_sparse.tensors.driver import Task
from horovod_sparse.topology import Topology
from horovod_sparse.training.deadline import Deadline
from horovod_sparse.training.engine import carry_out

#: raised by all ranks alike, after the same messages: what comes next fits together
_COLLECTIVE = (NonFiniteGradientError, EditedGradientError, StateMismatchError)

#: how often one who waits looks at its deadline
_LOOK_SECONDS = 0.5
#: how long a thread is waited for when its owner goes; it may wait for a rank that is gone
_END_SECONDS = 2.0


class _Shared:
    """What the thread and its owner both see. It does not hold the owner, which would never be freed."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.waiting: queue.SimpleQueue[tuple[Task, Synchronization[Any]] | None] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.failure: BaseException | None = None


class Communicator:
    """Starts coroutines in the order of DistributedDataParallel's hooks, which all ranks share.

    torch.distributed matches collectives by their order, and its messages can only be waited for. So a
    thread carries out everything in that order, folds and selections included, while backward goes on.
    """

    def __init__(self, carrier: Carrier, deadline: Deadline) -> None:
        self._shared, self._deadline = _Shared(carrier), deadline
        #: seconds that `wait` waited, ever
        self.idle_seconds = 0.0
        thread = threading.Thread(target=_work, args=(self._shared,), name="horovod_sparse.ddp", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._shared, thread)

    def start(self, name: str, coroutine: Synchronization[Any]) -> Task:
        task = Task(name)
        self._shared.waiting.put((task, coroutine))
        return task

    def start_on_device(self, name: str, coroutine: Synchronization[Any]) -> Task:
        """As `start`; a first request for the sum of a tensor on an accelerator is started at once."""
        request = next(coroutine)
        work = self._shared.carrier.starts_on_device(request)
        return self.start(name, _after(work, request, coroutine))

    def move_to(self, topology: Topology | None) -> None:
        """From now on ranks share these hosts; nothing is under way."""
        self._shared.carrier.topology = topology

    def run(self, name: str, coroutine: Synchronization[Any]) -> Any:
        """What a coroutine returns; waits for it, and raises what it raises."""
        task = self.start(name, coroutine)
        self.wait([task])
        return task.value()

    def wait(self, tasks: Iterable[Task]) -> None:
        """Waits until tasks are done. What a coroutine raises stays in its task."""
        awaited, shared, since = list(tasks), self._shared, time.perf_counter()
        while (pending := self._pending(awaited)) is not None:
            try:
                self._deadline.check(time.perf_counter() - since, pending.name, 0)
            except DeadlineError as error:
                shared.failure = error  # of whatever is waited for next
                raise
        self._deadline.moved()
        self.idle_seconds += time.perf_counter() - since
        for task in awaited:
            task.waited_seconds = max(0.0, task.finished - since)
        if shared.failure is not None:
            raise shared.failure

    def _pending(self, tasks: Iterable[Task]) -> Task | None:
        """The first that is not done; waits for a moment before it says so."""
        with self._shared.changed:
            if self._shared.changed.wait_for(lambda: all(task.done for task in tasks), _LOOK_SECONDS):
                return None
        return next((task for task in tasks if not task.done), None)


def _after(work: Any, request: Any, coroutine: Synchronization[Any]) -> Generator[Any, Any, Any]:
    """Goes on with a coroutine whose first request is under way."""
    try:
        if work is None:
            answer = yield request
        else:
            work.wait()
            # on a device `wait` only makes the current stream wait; the coroutine works in another
            torch.cuda.current_stream(request.buffer.device).synchronize()
            answer = request.buffer
        while True:
            try:
                request = coroutine.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = yield request
    finally:
        coroutine.close()


def _end(shared: _Shared, thread: threading.Thread) -> None:
    """Ends the thread, before the process does: no group may be freed while the interpreter ends."""
    shared.waiting.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_SECONDS)


def _work(shared: _Shared) -> None:
    while (item := shared.waiting.get()) is not None:
        task, coroutine = item
        try:
            if shared.failure is not None:
                coroutine.close()
                raise shared.failure
            shared.carrier.name = task.name
            task.result = carry_out(coroutine, shared.carrier)
        except BaseException as error:
            task.error = error
            if not isinstance(error, _COLLECTIVE):
                shared.failure = error
        with shared.changed:
            task.finished, task.done = time.perf_counter(), True
            shared.changed.notify_all()
        del item, task, coroutine
