"""What all tests of PyTorch on ranks have; see `launched`."""

from __future__ import annotations

from support.launched import fixtures, measure_little, runtest_hook

# isort: split
import horovod.torch as hvd
import pytest
import torch


def pytest_sessionstart(session: pytest.Session) -> None:
    torch.set_num_threads(1)
    hvd.init()
    measure_little()


pytest_runtest_call = runtest_hook(hvd, lambda name: hvd.barrier(), (hvd.HorovodInternalError,))
rank, size, process_set = fixtures(hvd)
