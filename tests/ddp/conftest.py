"""Tests of the hook of DistributedDataParallel that every rank of a launch runs alike.

    torchrun --nproc-per-node 2 -m pytest tests/ddp

Horovod is not imported here. After every test all ranks meet; a rank that fails ends, which ends the others'
collectives, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist


def pytest_sessionstart(session: pytest.Session) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))


def pytest_sessionfinish(session: pytest.Session) -> None:
    dist.destroy_process_group()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """One test on this rank; fails here, too, if it failed on another."""
    try:
        result = yield
    except pytest.skip.Exception:  # decided by facts that all ranks share
        raise
    except BaseException:
        item.session.shouldfail = "this rank ends, since a test failed"
        raise
    try:
        dist.barrier()
    except RuntimeError:
        item.session.shouldfail = "a test failed on another rank"
        raise AssertionError("this test failed on another rank: look at that rank's output") from None
    return result


@pytest.fixture(name="rank")
def rank() -> int:
    return dist.get_rank()


@pytest.fixture(name="size")
def size() -> int:
    return dist.get_world_size()


@pytest.fixture(name="process_set")
def process_set() -> Callable[[list[int]], dist.ProcessGroup]:
    """Makes process groups: as the launches of Horovod have it."""
    return dist.new_group
