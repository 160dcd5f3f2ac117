"""Threads of synchronizations that leave the graph: deadlines, and ends; without ranks."""

import time

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from horovod_sparse.carriers.transport_choice import TransportChoice  # noqa: E402
from horovod_sparse.collectives import Exchange  # noqa: E402
from horovod_sparse.errors import DeadlineError, UnsupportedError  # noqa: E402
from horovod_sparse.tensorflow import transport  # noqa: E402
from horovod_sparse.tensorflow.task import Task  # noqa: E402
from horovod_sparse.tensorflow.transport import PairsThread, pairs_thread_for, present_pairs_thread  # noqa: E402
from horovod_sparse.training.deadline import Deadline  # noqa: E402

pytestmark = pytest.mark.tensorflow

_SECONDS = 0.6


class Silence:
    """Messages of which none arrives, but those that a test lets through."""

    def __init__(self):
        self.arrived = False

    def start(self, request, name, rank):
        return self

    def done(self):
        return self.arrived

    def result(self):
        return {1: np.ones(1, np.int32)}


@pytest.fixture
def silence():
    return Silence()


@pytest.fixture
def thread(silence):
    made = PairsThread(silence, 0)
    yield made
    made.stop()


def one_round():
    found = yield Exchange({}, (1,))
    return int(found[1][0])


def entrusted(thread, deadline=None, name="task"):
    task = Task(name, (Exchange,), np.dtype(np.float32))
    task.entrust(one_round(), (0, 2), thread, deadline or Deadline(_SECONDS, lambda: (0, [0, 1])))
    return task


def test_tasks_that_are_waited_for_together_have_one_deadline(thread):
    """That of the user's argument."""
    deadline = Deadline(_SECONDS, lambda: (0, [0, 1]))
    tasks, since, overdue = (
        [entrusted(thread, deadline, f"task{i}") for i in range(4)],
        time.perf_counter(),
        None,
    )
    for task in tasks:
        overdue = task.wait(since, overdue)
    assert _SECONDS <= time.perf_counter() - since < 2 * _SECONDS
    assert all(isinstance(task.error, DeadlineError) for task in tasks)
    assert (overdue.bucket, overdue.round, overdue.seconds) == ("task0", 0, _SECONDS)


def test_a_deadline_says_who_is_missing(thread, monkeypatch):
    store = {}

    def asked(scope, key, value=None):
        if value is not None:
            store[key] = value
        return store.get(key)

    monkeypatch.setattr("horovod_sparse.training.deadline.asked_store", asked)
    task = entrusted(thread)
    task.wait()
    assert task.error.missing == {1: ""}


def test_what_was_given_up_is_not_resumed(silence, thread):
    """Its bucket is another step's then."""
    resumed = []

    def noting():
        yield Exchange({}, (1,))
        resumed.append(True)

    task = Task("task", (Exchange,), np.dtype(np.float32))
    task.entrust(noting(), (0, 2), thread, Deadline(0.1, lambda: (0, [0, 1])))
    assert isinstance(task.wait(), DeadlineError)
    silence.arrived = True
    after = entrusted(thread, name="after")
    assert after.wait() is None
    assert not resumed


def test_a_thread_that_is_stopped_ends_what_it_has(silence):
    thread = PairsThread(silence, 0)
    task = entrusted(thread)
    thread.stop()
    for one in (task, entrusted(thread)):
        assert one.wait() is None
        assert isinstance(one.error, UnsupportedError) and "trace it again" in str(one.error)


class Ranks:
    process_set_id, ranks = 0, (0, 1)

    def rank(self):
        return 0

    def size(self):
        return 2


def test_every_start_of_horovod_has_threads_of_its_own(monkeypatch):
    """And those of the former one are stopped; a function that was traced before finds the new one."""
    starts = [object()]

    def agreed(process_set):
        return TransportChoice(Silence(), "mpi", "somehow")

    monkeypatch.setattr(transport, "_pairs_threads", {})
    monkeypatch.setattr(transport, "_agreed", agreed)
    monkeypatch.setattr(transport, "present_start", lambda: starts[-1])
    former, words = pairs_thread_for(Ranks())
    assert words == "somehow" and pairs_thread_for(Ranks())[0] is former
    starts.append(object())
    present, _ = pairs_thread_for(Ranks())
    assert present is not former
    late = entrusted(former)
    assert late.wait() is None and "trace it again" in str(late.error)
    assert present_pairs_thread(Ranks(), former) is present
    present.stop()


def test_a_step_that_is_left_behind_raises_nothing_in_the_next(thread):
    task = entrusted(thread, Deadline(0.1, lambda: (0, [0, 1])))
    begun = time.perf_counter()
    task.drop()
    assert not task.under_way and time.perf_counter() - begun < 2.0
