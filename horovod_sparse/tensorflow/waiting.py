"""Ends graphs that wait too long for other ranks, with an error: Horovod would wait for ever.

No thread of Python waits for a collective in a graph, so none can raise an error. The host function with
which a step begins gives the graph a small array to hold until the step's end. A thread checks tasks whose
graph holds one. At the deadline it puts the error's text into a queue that an assertion in the graph reads,
and shuts Horovod down, which makes all collectives in flight fail, on all ranks.
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
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from horovod_sparse.errors import DeadlineError, warn_once
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.graph import HOST, run_independently
from horovod_sparse.training.deadline import Deadline

_log = logging.getLogger("horovod_sparse")

#: seconds waited so far, name of the collective, and its round
Wait = tuple[float, str, int]

#: between two checks: share of the deadline, shortest and longest seconds
_LOOK_SHARE, _LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.05, 0.05, 1.0
#: seconds from the assertion to Horovod's shutdown, in which other ranks' deadlines expire too
_SPREAD_SECONDS = 1.0
#: seconds for Horovod's shutdown: Gloo stops waiting for a rank after 30 s, MPI never
ENDS_SECONDS = 45.0
#: queues of the assertions, by graph, which keeps them alive
_queues: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


class Watch:
    """Makes a graph's run or an eager collective fail if it waits for other ranks beyond the deadline."""

    def __init__(self, deadline_seconds: float | None, process_set: Any, owner: Any = None) -> None:
        def rank_and_members() -> tuple[int, list[int]]:
            return int(process_set.rank()), list(process_set.ranks)

        self.deadline = Deadline(deadline_seconds, rank_and_members)
        self._owner = None if owner is None else weakref.ref(owner)
        self._queue: Any = None
        #: begin and name of the eager collectives in progress
        self._eager: list[tuple[float, str]] = []
        self._error: DeadlineError | None = None

    def add_assertion(self) -> None:
        """Adds an assertion to the graph being traced, by which `fail_graph` can end a run of the graph."""
        if self.deadline.seconds == math.inf:
            return
        _thread.add_watch(self)
        queue = self._error_queue()
        graph: Any = tf.compat.v1.get_default_graph()
        while hasattr(graph, "outer_graph"):  # which may outlive all else
            _queues.setdefault(graph, []).append(queue)
            graph = graph.outer_graph
        with tf.device(HOST):
            message = queue.dequeue()
            run_independently(message.op, "QueueDequeueV2")
            passes = tf.raw_ops.Assert(condition=tf.equal(message, ""), data=[message])
            run_independently(passes, "Assert")

    def pass_assertion(self, end: tf.Tensor) -> None:
        """Makes the assertion pass once the tensor `end`, the end of a step, is ready."""
        if self.deadline.seconds == math.inf:
            return
        with tf.device(HOST), tf.control_dependencies([end]):
            handle = self._error_queue().queue_ref
            passed = tf.raw_ops.QueueEnqueueV2(handle=handle, components=[tf.constant("")])
            run_independently(passed, "QueueEnqueueV2")

    def fail_graph(self, error: DeadlineError) -> None:
        """Makes the running graph (or the eager collective) raise this error."""
        self._error = error
        if (owner := self._owner_or_none()) is not None:
            owner.last_error = error
        if self._queue is not None:
            with tf.device(HOST):
                self._queue.enqueue(f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def watch_eager(self, name: str) -> Iterator[None]:
        """Returns a context in which eager collectives raise `DeadlineError` if they wait too long."""
        self._error, wait = None, (time.perf_counter(), name)
        self._eager.append(wait)
        _thread.add_watch(self)
        try:
            yield
        except Exception as error:
            if self._error is not None:
                raise self._error from error
            raise
        finally:
            self._eager.remove(wait)

    def _owner_or_none(self) -> Any:
        return None if self._owner is None else self._owner()

    def overdue_error(self, now: float) -> DeadlineError | None:
        """Returns the error if a collective has waited too long, else None; called by the watching thread."""
        if not hvd.is_initialized():
            return None
        waits: list[Wait] = [(now - began, name, 0) for began, name in self._eager]
        if (owner := self._owner_or_none()) is not None:
            waits += [wait for task in owner.tasks if (wait := task.current_wait(now)) is not None]
        if not waits:
            self.deadline.saw_progress()
            return None
        # the first one is the same on all ranks that wait for the same rank
        waited, (_, name, number) = min(seconds for seconds, *_ in waits), waits[0]
        try:
            self.deadline.check(waited, name, number)
        except DeadlineError as error:
            return error
        return None

    def clear_errors(self) -> None:
        """Empties the queue of errors after Horovod's shutdown, which ends graphs by itself."""
        while self._queue is not None and int(self._queue.size()):
            self._queue.dequeue()

    def _error_queue(self) -> Any:
        if self._queue is None:
            with tf.init_scope(), tf.device(HOST):
                self._queue = tf.queue.FIFOQueue(1 << 20, [tf.string], shapes=[[]])
        return self._queue


class _WatchThread:
    """Checks all watches of this process in one thread, which starts with the first watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._runs = False

    def add_watch(self, watch: Watch) -> None:
        if watch.deadline.seconds == math.inf:
            return
        with self._lock:
            self._watches.add(watch)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="horovod_sparse.deadline", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._check_all())

    def _check_all(self) -> float:
        """Checks all watches; returns the seconds until the next check."""
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            try:
                error = watch.overdue_error(time.perf_counter())
            except Exception as problem:  # Horovod was shut down meanwhile, or a process set is no more
                # if the thread ended here, later collectives would have no deadline
                words = "the deadline of collectives could not be checked, will retry: %s"
                warn_once(words, str(problem))
                continue
            if error is not None:
                _fail_and_shut_down(watch, error, watches)
        shares = [_LOOK_SHARE * watch.deadline.seconds for watch in watches]
        return max(_LOOK_SECONDS, min([_LONGEST_LOOK_SECONDS, *shares]))


def _fail_and_shut_down(watch: Watch, error: DeadlineError, watches: list[Watch]) -> None:
    _log.error("%s", error)
    watch.fail_graph(error)
    time.sleep(_SPREAD_SECONDS)
    ending = threading.Thread(target=hvd.shutdown, name="horovod_sparse.shutdown", daemon=True)
    # before Horovod's own exit handler: two shutdowns at a time deadlock
    atexit.register(ending.join, ENDS_SECONDS)
    ending.start()
    ending.join(ENDS_SECONDS)
    if ending.is_alive():
        _log.critical("Horovod does not end either, since a rank has stopped: this process is ended")
        logging.shutdown()
        sys.stderr.flush()
        os._exit(1)  # Horovod's own threads wait, where no exception can be raised
    for one in watches:
        one.clear_errors()


_thread = _WatchThread()
