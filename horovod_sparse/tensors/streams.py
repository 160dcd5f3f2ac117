"""Keeps a bucket's work in order over a GPU's streams, and copies arrays to and from the GPU.

What autograd promises (checked in PyTorch's sources): a hook of a parameter runs on autograd's thread of the
parameter's device, with the stream current on which the gradient was just written, usually that of the
parameter's first forward. When `backward()` returns, the caller's stream waits for all of these streams.

So a bucket is folded on the current stream of the hook that completes it, without waiting for anything, as
long as the model uses one stream. Where it uses several, the one that folds waits for the writers;
a coroutine goes on with the stream it began on; and the optimizer's stream waits for the coroutine's. All of
these are events between streams. The host waits only where a sparsifier reads its k elements.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_sparse.arrays import FoldReport
from horovod_sparse.collectives import Synchronization


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copies an array to a device through page-locked memory, so that the host need not wait."""
    if device.type != "cuda":
        return torch.tensor(array, device=device)
    array = np.ascontiguousarray(array)
    staged = torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, pin_memory=True)
    np.copyto(staged.numpy(), array)
    return staged.to(device, non_blocking=True)


class PendingCopy:
    """Copies tensors to the host in the background; reading `arrays` waits for them."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type != "cuda":
            self._copies = [tensor.cpu().clone() for tensor in tensors]
            return
        self._copies = []
        for tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copies.append(copy.copy_(tensor, non_blocking=True))
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensors[0].device))

    def arrays(self) -> list[NDArray[Any]]:
        """Returns the copies as arrays that the caller may change."""
        if self._event is not None:
            self._event.synchronize()
        return [copy.numpy() for copy in self._copies]


def to_host(tensor: torch.Tensor) -> NDArray[Any]:
    """Copies a tensor to a new array, and waits for the device."""
    return PendingCopy(tensor).arrays()[0]


def _report_field(name: str) -> Any:
    return property(lambda report: getattr(report._wait_for_report(), name))


class PendingReport(FoldReport):
    """A `FoldReport` whose numbers are still on the device; reading one waits for it.

    Args:
        pending: count and position of what is not finite, and both sums of squares.
        step: see `FoldReport`.
        projection: see `FoldReport`; None for 0.
    """

    pending: PendingCopy

    def __init__(self, pending: PendingCopy, step: int = 0, projection: PendingCopy | None = None) -> None:
        self.__dict__.update(pending=pending, step=step, _projection=projection, _report=None)

    def _wait_for_report(self) -> FoldReport:
        if self.__dict__["_report"] is None:
            count, first, square, carried = (float(number) for number in self.pending.arrays()[0])
            copy: PendingCopy | None = self.__dict__["_projection"]
            projection = 0.0 if copy is None else float(copy.arrays()[0][0])
            position = int(first) if count else -1
            found = int(count), position, square, carried, self.step, projection
            self.__dict__["_report"] = FoldReport(*found)
        report: FoldReport = self.__dict__["_report"]
        return report

    num_nonfinite = _report_field("num_nonfinite")
    first_nonfinite = _report_field("first_nonfinite")
    square_norm = _report_field("square_norm")
    carried_square_norm = _report_field("carried_square_norm")
    projection = _report_field("projection")


Result = TypeVar("Result")


class CudaStreams:
    """Orders one bucket's work on several CUDA streams: each waits for the streams whose memory it reads."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._writers: list[Any] = []
        self._home: Any = None

    def note_writer(self) -> None:
        """Notes that the current stream wrote a gradient of the bucket, for `wait_for_writers`."""
        stream = self._cuda.current_stream(self._device)
        if stream not in self._writers:
            self._writers.append(stream)

    def wait_for_writers(self) -> None:
        """Makes the current stream wait for the streams that wrote the noted gradients."""
        stream = self._cuda.current_stream(self._device)
        for writer in self._writers:
            if writer != stream:
                stream.wait_stream(writer)
        self._writers.clear()

    def run(self, coroutine: Synchronization[Result]) -> Synchronization[Result]:
        """Wraps a coroutine, so that all its work runs on the present stream, after the noted gradients."""
        self.wait_for_writers()
        self._home = self._cuda.current_stream(self._device)
        return self._on_stream(self._home, coroutine)

    def _on_stream(self, stream: Any, coroutine: Synchronization[Result]) -> Generator[Any, Any, Result]:
        answer: Any = None
        try:
            while True:
                with self._cuda.stream(stream):
                    try:
                        request = coroutine.send(answer)
                    except StopIteration as stop:
                        finished: Result = stop.value
                        return finished
                if isinstance(getattr(request, "buffer", None), torch.Tensor):
                    self.wait_for_coroutine()  # the collective reads it on the current stream
                answer = yield request
        finally:
            coroutine.close()

    def wait_for_coroutine(self) -> None:
        """Makes the current stream wait for the coroutine's work."""
        stream = self._cuda.current_stream(self._device)
        if self._home is not None and stream != self._home:
            stream.wait_stream(self._home)
