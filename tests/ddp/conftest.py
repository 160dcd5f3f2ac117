"""Tests of torch.distributed that every rank of a launch runs alike: see `launched`.

    torchrun --nproc-per-node 2 -m pytest tests/ddp

Horovod is not imported here. A rank that fails ends, which ends the others' collectives, too.
"""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.launched import fixtures, runtest_hook


def pytest_sessionstart(session: pytest.Session) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))


def pytest_sessionfinish(session: pytest.Session) -> None:
    dist.destroy_process_group()


_LIKE_HOROVOD = SimpleNamespace(rank=dist.get_rank, size=dist.get_world_size, shutdown=lambda: None)
pytest_runtest_call = runtest_hook(_LIKE_HOROVOD, lambda name: dist.barrier(), (RuntimeError,))


def _broadcast(made: Any) -> Any:
    found = [made]
    dist.broadcast_object_list(found)
    return found[0]


rank, size, _, folder = fixtures(_LIKE_HOROVOD, _broadcast)


@pytest.fixture(name="process_set")
def process_set() -> Callable[[list[int]], dist.ProcessGroup]:
    """Makes process groups: as the launches of Horovod have it."""
    return dist.new_group
