"""Tests of the TensorFlow front end that every rank of a launch runs alike; see tests/ranks/conftest.py.

    horovodrun --gloo -np 2 python -m pytest tests/ranks_tf

TensorFlow takes seconds to start, so all of them share one launch.
"""

from __future__ import annotations

import os

os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", "20")
os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "60")
os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")  # a test starts it
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd


def pytest_sessionstart(session: pytest.Session) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """One test on this rank; fails here, too, if it failed on another."""
    try:
        result = yield
    except pytest.skip.Exception:  # decided by facts that all ranks share
        raise
    except BaseException:
        item.session.shouldfail = "Horovod was stopped, since a test failed"
        hvd.shutdown()
        raise
    try:
        hvd.allreduce(tf.constant(0.0), name=f"end.{item.name}")
    except (tf.errors.OpError, ValueError):
        item.session.shouldfail = "Horovod was stopped, since a test failed on another rank"
        raise AssertionError("this test failed on another rank: look at that rank's output") from None
    return result


@pytest.fixture
def rank() -> int:
    return hvd.rank()


@pytest.fixture
def size() -> int:
    return hvd.size()


@pytest.fixture
def process_set():
    """Makes process sets, and removes them after the test."""
    made = []

    def make(ranks):
        if len(ranks) == hvd.size():
            return hvd.global_process_set
        made.append(hvd.add_process_set(list(ranks)))
        return made[-1]

    yield make
    for one in made:
        if hvd.is_initialized():  # not after a failed test
            hvd.remove_process_set(one)


@pytest.fixture
def everywhere():
    """An array of every rank, stacked."""

    def gather(array):
        return hvd.allgather(tf.constant(array[None]), name="everywhere").numpy()

    return gather
