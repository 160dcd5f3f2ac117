"""The order of a bucket's work on a GPU, whichever hook does the next piece of it, and when it was done.

What autograd promises (checked in PyTorch's sources): a hook of a parameter, post-accumulate or of the
`AccumulateGrad` node, runs on autograd's thread of the parameter's device, with the stream current on which
the gradient was just written: that of the node, usually the stream of the parameter's first forward. When
`backward()` returns, the caller's current stream waits for all of these streams.

So a bucket is folded on the current stream of the hook that completes it, without waiting for anything, as
long as the model uses one stream. Where it uses several:

* gradients of one bucket may be written on different streams: the one that folds waits for the others;
* a coroutine is resumed in the hook of any parameter: it goes on with the stream it began on;
* what the optimizer does next, it does on its own current stream, which waits for the coroutine's.

All of these are events between streams. The host waits only where a sparsifier reads its k elements.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from typing import Any, Protocol, TypeVar

import torch

from horovod_sparse.collectives import Synchronization

Result = TypeVar("Result")


class CudaStreams:
    """The streams of one GPU, in the order of the work on one bucket."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._writers: list[Any] = []
        self._home: Any = None

    def note(self) -> None:
        """A gradient of the bucket was written on the current stream."""
        stream = self._cuda.current_stream(self._device)
        if stream not in self._writers:
            self._writers.append(stream)

    def meet(self) -> None:
        """What is started on the current stream from now on comes after all gradients noted."""
        stream = self._cuda.current_stream(self._device)
        for writer in self._writers:
            if writer != stream:
                stream.wait_stream(writer)
        self._writers.clear()

    def run(self, coroutine: Synchronization[Result]) -> Synchronization[Result]:
        """The coroutine, whose work comes after all gradients noted; begins where it is called."""
        self.meet()
        self._home = self._cuda.current_stream(self._device)
        return self._at_home(self._home, coroutine)

    def _at_home(self, home: Any, coroutine: Synchronization[Result]) -> Generator[Any, Any, Result]:
        answer: Any = None
        try:
            while True:
                with self._cuda.stream(home):
                    try:
                        request = coroutine.send(answer)
                    except StopIteration as stop:
                        finished: Result = stop.value
                        return finished
                answer = yield request
        finally:
            coroutine.close()

    def join(self) -> None:
        """What is started on the current stream from now on comes after the coroutine's work."""
        stream = self._cuda.current_stream(self._device)
        if self._home is not None and stream != self._home:
            stream.wait_stream(self._home)


class Stamps(Protocol):
    """Takes stamps, and tells the seconds between two of them."""

    def now(self) -> Any:
        """A stamp; waits for nothing."""

    def seconds_between(self, start: Any, stop: Any) -> float:
        """May wait for the stamps."""


class HostStamps:
    """The host's clock. On the CPU a hook runs when its gradient is there: nothing is waited for."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds_between(self, start: float, stop: float) -> float:
        return stop - start


class EventStamps:
    """Events of a GPU: a hook runs when its gradient's kernel has been queued, the event when it is done."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda

    def now(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def seconds_between(self, start: Any, stop: Any) -> float:
        start.synchronize()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def stamps_for(devices: Iterable[str]) -> Stamps:
    """Events where all gradients are on one GPU; the host's clock otherwise."""
    distinct = {torch.device(name) for name in devices}
    if len(distinct) == 1 and (device := distinct.pop()).type == "cuda":
        return EventStamps(device)
    return HostStamps()
