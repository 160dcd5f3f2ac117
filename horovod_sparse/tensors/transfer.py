"""What crosses between the host and a device: k elements at a time, through page-locked memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_sparse.arrays import FoldReport


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor with the array's content; the array may be changed at once.

    A copy to a GPU from ordinary memory would first wait for everything that the GPU has to do. From
    page-locked memory, which PyTorch keeps for reuse, it only takes its place in the queue.
    """
    if device.type != "cuda":
        return torch.tensor(array, device=device)
    array = np.ascontiguousarray(array)
    staged = torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, pin_memory=True)
    np.copyto(staged.numpy(), array)
    return staged.to(device, non_blocking=True)


class PendingCopy:
    """Tensors on their way to the host; asking for them waits for the device once."""

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
        """The copies, of which the caller may do what it likes."""
        if self._event is not None:
            self._event.synchronize()
        return [copy.numpy() for copy in self._copies]


def to_host(tensor: torch.Tensor) -> NDArray[Any]:
    """A fresh array with the tensor's content; waits for the device."""
    return PendingCopy(tensor).arrays()[0]


class PendingReport(FoldReport):
    """What `FoldReport` says, without waiting for the device until it is read.

    The next step of every sparsifier reads something from the device anyway, so that the fold need
    not make the host wait for it.
    """

    def __init__(self, copy: PendingCopy, step: int = 0) -> None:
        object.__setattr__(self, "_copy", copy)
        object.__setattr__(self, "step", step)

    def _ready(self) -> FoldReport:
        copy = self.__dict__["_copy"]
        if isinstance(copy, PendingCopy):
            count, first, square, carried = (float(number) for number in copy.arrays()[0])
            copy = FoldReport(int(count), int(first) if count else -1, square, carried)
            self.__dict__["_copy"] = copy
        report: FoldReport = copy
        return report

    @property
    def num_nonfinite(self) -> int:
        return self._ready().num_nonfinite

    @property
    def first_nonfinite(self) -> int:
        return self._ready().first_nonfinite

    @property
    def square_norm(self) -> float:
        return self._ready().square_norm

    @property
    def carried_square_norm(self) -> float:
        return self._ready().carried_square_norm

    def __eq__(self, other: object) -> bool:
        return self._ready() == (other._ready() if isinstance(other, PendingReport) else other)

    def __hash__(self) -> int:
        return hash(self._ready())

    def __repr__(self) -> str:
        return repr(self._ready())

    def __reduce__(self) -> tuple[type[FoldReport], tuple[int, int, float, float]]:
        report = self._ready()
        return FoldReport, (
            report.num_nonfinite,
            report.first_nonfinite,
            report.square_norm,
            report.carried_square_norm,
        )
