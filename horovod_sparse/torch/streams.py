"""The order of a bucket's work on a GPU, whichever hook does the next piece of it.

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

from collections.abc import Generator
from typing import Any, Protocol, TypeVar

import torch

from horovod_sparse.collectives import Synchronization

__all__ = ["CudaStreams", "NoStreams", "Streams"]

Result = TypeVar("Result")


class Streams(Protocol):
    """Order of the work on one bucket."""

    def note(self) -> None:
        """A gradient of the bucket was written on the current stream."""

    def run(self, coroutine: Synchronization[Result]) -> Synchronization[Result]:
        """The coroutine, whose work comes after all gradients noted; begins where it is called."""

    def join(self) -> None:
        """What is started on the current stream from now on comes after the coroutine's work."""


class NoStreams:
    """For devices that do everything in the order in which it is asked for."""

    def note(self) -> None:
        """See `Streams.note`."""

    def run(self, coroutine: Synchronization[Result]) -> Synchronization[Result]:
        """See `Streams.run`."""
        return coroutine

    def join(self) -> None:
        """See `Streams.join`."""


class CudaStreams:
    """The streams of one GPU.

    Args:
        device: of the bucket's gradients.
        cuda: PyTorch's module, or what stands for it in tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._writers: list[Any] = []
        self._home: Any = None

    def note(self) -> None:
        """See `Streams.note`."""
        stream = self._cuda.current_stream(self._device)
        if stream not in self._writers:
            self._writers.append(stream)

    def run(self, coroutine: Synchronization[Result]) -> Synchronization[Result]:
        """See `Streams.run`."""
        self._home = self._cuda.current_stream(self._device)
        for writer in self._writers:
            if writer != self._home:
                self._home.wait_stream(writer)
        self._writers.clear()
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
        """See `Streams.join`."""
        stream = self._cuda.current_stream(self._device)
        if self._home is not None and stream != self._home:
            stream.wait_stream(self._home)
