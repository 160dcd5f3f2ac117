"""Time stamps for backward: a clock's where hooks run when gradients are ready, events where they do not."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch

__all__ = ["EventStamps", "HostStamps", "Stamps", "stamps_for"]


class Stamps(Protocol):
    """Takes stamps, and tells the seconds between two of them."""

    def now(self) -> Any:
        """A stamp; waits for nothing."""

    def seconds_between(self, start: Any, stop: Any) -> float:
        """May wait for the stamps."""


class HostStamps:
    """The host's clock. On the CPU a hook runs when its gradient is there: nothing is waited for."""

    def now(self) -> float:
        """See `Stamps.now`."""
        return time.perf_counter()

    def seconds_between(self, start: float, stop: float) -> float:
        """See `Stamps.seconds_between`."""
        return stop - start


class EventStamps:
    """Events of a GPU: a hook runs when its gradient's kernel has been queued, the event when it is done.

    Args:
        device: of all gradients.
        cuda: PyTorch's module, or what stands for it in tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda

    def now(self) -> Any:
        """See `Stamps.now`."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def seconds_between(self, start: Any, stop: Any) -> float:
        """See `Stamps.seconds_between`."""
        start.synchronize()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def stamps_for(devices: Iterable[str]) -> Stamps:
    """Events where all gradients are on one GPU; the host's clock otherwise.

    Args:
        devices: of the parameters.

    Example:
        >>> type(stamps_for(["cpu", "cpu"])).__name__
        'HostStamps'
    """
    distinct = {torch.device(name) for name in devices}
    if len(distinct) == 1 and (device := distinct.pop()).type == "cuda":
        return EventStamps(device)
    return HostStamps()
