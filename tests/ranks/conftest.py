"""Tests that every rank of a launch runs alike: the same tests, in the same order, with the same end.

    horovodrun --gloo -np 2 python -m pytest tests/ranks

Horovod is started once. After every test the ranks tell each other how it ended, so that all of them
fail together; a rank that fails stops Horovod, which frees the others from any collective they are in.
"""

from __future__ import annotations

import os

# process sets that single tests make
os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
# a collective that some rank never starts ends the test, not the user's patience
os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", "20")
os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "60")

import horovod.torch as hvd
import pytest
import torch


def pytest_sessionstart(session: pytest.Session) -> None:
    torch.set_num_threads(1)
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
        hvd.barrier()
    except hvd.HorovodInternalError:
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
