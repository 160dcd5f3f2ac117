"""What all tests of PyTorch on ranks have; see `launched`."""

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
rank, size, process_set, folder = fixtures(hvd, lambda made: hvd.broadcast_object(made, 0, name="folder"))


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """Ranks of Horovod as ranks of torch.distributed."""
    host = "127.0.0.1"
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if hvd.rank() == 0 else None
    port = hvd.broadcast_object(store.port if store else None, name="process_group.port")
    store = store or dist.TCPStore(host, port)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size(), timeout=limit)
    yield
    dist.destroy_process_group()
