"""What all tests of PyTorch on ranks have; see `launched`."""

import socket
from collections.abc import Iterator
from datetime import timedelta

from support.launched import fixtures, measure_little, pytest_itemcollected, runtest_hook

# isort: split
import horovod.torch as hvd
import pytest
import torch
import torch.distributed as dist

__all__ = ["pytest_itemcollected"]


def pytest_sessionstart(session: pytest.Session) -> None:
    torch.set_num_threads(1)
    hvd.init()
    measure_little()


pytest_runtest_call = runtest_hook(hvd, lambda name: hvd.barrier(), (hvd.HorovodInternalError,))
rank, size, process_set = fixtures(hvd)


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """Ranks of Horovod as ranks of torch.distributed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = hvd.broadcast_object(free.getsockname(), name="process_group.address")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address[0]}:{address[1]}",
        rank=hvd.rank(),
        world_size=hvd.size(),
        timeout=timedelta(seconds=60),
    )
    yield
    dist.destroy_process_group()
