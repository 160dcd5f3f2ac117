"""A graph that waits too long for other ranks ends with an error, where Horovod would wait for ever.

No thread waits for a collective in a graph, so none can give up. The host function with which a step begins
gives the graph a small array to hold until the step's end. A thread looks at what is held. At the deadline it
puts the error's text into a queue that an assertion in the graph waits for, and shuts Horovod down: then all
that is under way fails, on all ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.errors import DeadlineError, warn_once
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.graph import HOST, HostFunctions, run_independently
from horovod_sparse.tensorflow.tensors import ALIGNMENT, aligned_zeros
from horovod_sparse.training.deadline import Deadline

_log = logging.getLogger("horovod_sparse")

#: name and round of a collective
Awaited = tuple[str, int]

#: between two looks, as a share of the deadline, and in seconds
_LOOK_SHARE, _LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.05, 0.05, 1.0
#: from the assertion to Horovod's end: the graphs of other ranks come to their deadlines, too
_SPREAD_SECONDS = 1.0
#: in which Horovod has to end: Gloo gives a rank up after 30 s, MPI never
ENDS_SECONDS = 45.0
#: of the assertions in a graph
_queues: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


class Waiting:
    """Watches one synchronization of a graph, in every step anew."""

    def __init__(self, num_begins: int, awaited: Callable[[], Awaited | None]) -> None:
        self._begun: list[weakref.ref[np.ndarray] | None] = [None] * num_begins
        self._awaited, self._since = awaited, 0.0

    def begun(self, number: int) -> np.ndarray:
        """What the graph holds until the end: int32 zeros."""
        held = aligned_zeros(ALIGNMENT).view(np.int32)
        self._begun[number] = weakref.ref(held)
        self.moved()
        return held

    def moved(self) -> None:
        self._since = time.perf_counter()

    def waited(self, now: float) -> tuple[float, Awaited] | None:
        """Seconds, and for what; None while this rank still has something to do, and after the end."""
        if any(reference is None or reference() is None for reference in self._begun):
            return None
        awaited = self._awaited()
        return None if awaited is None else (now - self._since, awaited)


class Watch:
    """Looks after what one synchronizer waits for."""

    def __init__(
        self,
        deadline_seconds: float | None,
        process_set: Any,
        on_error: Callable[[DeadlineError], None] | None = None,
    ) -> None:
        def place() -> tuple[int, list[int]]:
            return int(process_set.rank()), list(process_set.ranks)

        self.deadline = Deadline(deadline_seconds, place)
        self._on_error = None if on_error is None else weakref.WeakMethod(on_error)
        self._queue: Any = None
        self._host = HostFunctions()
        self._waiting: weakref.WeakSet[Waiting] = weakref.WeakSet()
        self._error: DeadlineError | None = None

    def waiting(self, num_begins: int, awaited: Callable[[], Awaited | None]) -> Waiting:
        """Watches a synchronization as long as the caller keeps what this returns."""
        made = Waiting(num_begins, awaited)
        self._waiting.add(made)
        _thread.look_after(self)
        return made

    def arm(self) -> None:
        """Puts the assertion into the graph that is being traced; `disarm` has to follow, in the same one."""
        if self.deadline.seconds == math.inf:
            return
        queue = self._made_queue()
        graph: Any = tf.compat.v1.get_default_graph()
        while hasattr(graph, "outer_graph"):  # which may outlive all else
            _queues.setdefault(graph, []).append(queue)
            graph = graph.outer_graph
        with tf.device(HOST):
            message = queue.dequeue()
            run_independently(message.op, "QueueDequeueV2")
            passes = tf.raw_ops.Assert(condition=tf.equal(message, ""), data=[message])
            run_independently(passes, "Assert")

    def disarm(self, end: tf.Tensor) -> None:
        """Lets the assertion pass when a tensor is there."""
        if self.deadline.seconds == math.inf:
            return
        with tf.device(HOST), tf.control_dependencies([end]):
            handle = self._made_queue().queue_ref
            passed = tf.raw_ops.QueueEnqueueV2(handle=handle, components=[tf.constant("")])
            run_independently(passed, "QueueEnqueueV2")

    def sound(self, error: DeadlineError) -> None:
        """Lets a graph that runs fail with an error."""
        self._error = error
        tell = None if self._on_error is None else self._on_error()
        if tell is not None:
            tell(error)
        if self._queue is not None:
            with tf.device(HOST):
                self._queue.enqueue(f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Watches collectives that this thread runs eagerly in this context."""
        self._error, waiting = None, self.waiting(1, lambda: (name, 0))
        held = waiting.begun(0)
        try:
            yield
        except Exception as error:
            if self._error is not None:
                raise self._error from error
            raise
        finally:
            del held

    def around(self, given: tf.Tensor, name: str, collective: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Watches one collective of a number, in a graph or eagerly."""
        if tf.executing_eagerly():
            with self.together(name):
                return collective(given)
        waiting = self.waiting(1, lambda: (name, 0))

        def begin(number: np.ndarray) -> list[np.ndarray]:
            return [number, waiting.begun(0)]

        self.arm()
        with tf.device(HOST):
            begun, held = self._host.run(begin, [given], [tf.int32, tf.int32])
            begun.set_shape([])
            result = collective(begun)
            # which needs what is held to be there until then
            result = tf.reduce_sum(tf.concat([tf.reshape(result, [1]), held], 0))
        self.disarm(result)
        return result

    def look(self, now: float) -> DeadlineError | None:
        """Returns an error if something has waited for too long."""
        if not hvd.is_initialized():
            return None
        overdue = [found for one in list(self._waiting) if (found := one.waited(now)) is not None]
        if not overdue:
            self.deadline.moved()
            return None
        waited, (name, number) = max(overdue)
        try:
            self.deadline.check(waited, name, number)
        except DeadlineError as error:
            return error
        return None

    def forget(self) -> None:
        """Nothing is under way any more, and nobody is there to be told."""
        self._waiting.clear()
        while self._queue is not None and int(self._queue.size()):
            self._queue.dequeue()

    def _made_queue(self) -> Any:
        if self._queue is None:
            with tf.init_scope(), tf.device(HOST):
                self._queue = tf.queue.FIFOQueue(1 << 20, [tf.string], shapes=[[]])
        return self._queue


class _Thread:
    """Looks at all watches of this process; begins with the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._runs = False

    def look_after(self, watch: Watch) -> None:
        if watch.deadline.seconds == math.inf:
            return
        with self._lock:
            self._watches.add(watch)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="horovod_sparse.deadline", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._looked())

    def _looked(self) -> float:
        """Seconds until it is to look again."""
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            try:
                error = watch.look(time.perf_counter())
            except Exception as problem:  # Horovod was shut down meanwhile, or a process set is no more
                # a thread that ended here would leave all that comes later without a deadline
                words = "what waits for other ranks could not be looked at, which is tried again: %s"
                warn_once(words, str(problem))
                continue
            if error is not None:
                _give_up(watch, error, watches)
        shares = [_LOOK_SHARE * watch.deadline.seconds for watch in watches]
        return max(_LOOK_SECONDS, min([_LONGEST_LOOK_SECONDS, *shares]))


def _give_up(watch: Watch, error: DeadlineError, watches: list[Watch]) -> None:
    _log.error("%s", error)
    watch.sound(error)
    time.sleep(_SPREAD_SECONDS)
    ending = threading.Thread(target=hvd.shutdown, name="horovod_sparse.shutdown", daemon=True)
    # before Horovod's own, which must not come in between: two ends at a time never end
    atexit.register(ending.join, ENDS_SECONDS)
    ending.start()
    ending.join(ENDS_SECONDS)
    if ending.is_alive():
        _log.critical("Horovod does not end either, since a rank has stopped: this process is ended")
        logging.shutdown()
        sys.stderr.flush()
        os._exit(1)  # what waits is in Horovod's own threads, where no exception can be raised
    for one in watches:
        one.forget()


_thread = _Thread()
