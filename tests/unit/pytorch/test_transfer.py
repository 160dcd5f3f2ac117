"""What crosses to and from a GPU goes through page-locked memory, told by fakes: no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from horovod_sparse.pytorch import transfer

CUDA = SimpleNamespace(type="cuda")


class Fake:
    """Stands for a tensor on the host or on a device, and writes down what is done with it."""

    def __init__(
        self, tensor: torch.Tensor, log: list[str], *, pinned: bool = False, device: Any = None
    ) -> None:
        self.tensor, self.log, self.pinned = tensor, log, pinned
        self.device = device or SimpleNamespace(type="cpu")
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def numpy(self) -> np.ndarray:
        assert self.device.type == "cpu", "NumPy cannot read a device's memory"
        return self.tensor.numpy()

    def to(self, device: Any, non_blocking: bool = False) -> Fake:
        self.log.append(f"to device, pinned={self.pinned}, waits={not non_blocking}")
        return Fake(self.tensor.clone(), self.log, device=device)

    def copy_(self, other: Fake, non_blocking: bool = False) -> Fake:
        self.log.append(f"to host, pinned={self.pinned}, waits={not non_blocking}")
        self.tensor.copy_(other.tensor)
        return self


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, in order, on a machine that seems to have a GPU."""
    done: list[str] = []

    class Event:
        def record(self, stream: str) -> None:
            done.append(f"event on {stream}")

        def synchronize(self) -> None:
            done.append("wait for the event")

    def empty(shape: Any, dtype: Any, pin_memory: bool = False) -> Fake:
        return Fake(torch.zeros(shape, dtype=dtype), done, pinned=pin_memory)

    cuda = SimpleNamespace(Event=Event, current_stream=lambda device: f"the stream of {device.type}")
    fake = SimpleNamespace(empty=empty, from_numpy=torch.from_numpy, tensor=torch.tensor, cuda=cuda)
    monkeypatch.setattr(transfer, "torch", fake)
    return done


def test_to_a_device_from_pinned_memory_without_waiting(log: list[str]) -> None:
    array = np.array([3, 1, 4], np.int32)
    sent: Any = transfer.to_device(array, CUDA)  # type: ignore[arg-type]
    array[:] = 0  # may be changed at once
    assert sent.tensor.tolist() == [3, 1, 4]
    assert sent.device is CUDA
    assert log == ["to device, pinned=True, waits=False"]


def test_to_the_host_into_pinned_memory_waiting_once(log: list[str]) -> None:
    """Indices and values of a selection: two copies are queued, and one event is waited for."""
    indices = Fake(torch.tensor([5, 9]), log, device=CUDA)
    values = Fake(torch.tensor([0.5, -2.0]), log, device=CUDA)
    pending = transfer.PendingCopy(indices, values)  # type: ignore[arg-type]
    queued = ["to host, pinned=True, waits=False"] * 2 + ["event on the stream of cuda"]
    assert log == queued
    found = pending.arrays()
    assert [array.tolist() for array in found] == [[5, 9], [0.5, -2.0]]
    assert log == [*queued, "wait for the event"]


def test_ordinary_memory_needs_no_staging() -> None:
    array = np.array([1.5, 2.5])
    sent = transfer.to_device(array, torch.device("cpu"))
    array[:] = 0
    assert transfer.to_host(sent).tolist() == [1.5, 2.5]
