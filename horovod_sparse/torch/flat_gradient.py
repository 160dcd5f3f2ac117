"""One flat buffer for the gradients of a bucket; every parameter's gradient is a view into it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from horovod_sparse.torch.layout import alone, view_into
from horovod_sparse.torch.memory import memory_of

__all__ = ["FlatGradient"]

_log = logging.getLogger("horovod_sparse")

_NOWHERE = np.empty(0, np.int32)
#: places per parameter that are looked at to notice a change that PyTorch did not count
_NUM_PROBES = 16


class FlatGradient:
    """The gradients of a bucket in one buffer, so that a bucket is folded in one pass.

    ``parameter.grad`` is a view into the buffer, to which autograd adds in place. Whoever replaces it
    (the first backward, ``model.zero_grad()``, user code) costs one copy: `gather` takes the gradient
    over and puts the view back.

    After a step the buffer holds zeros and the scattered sum. On the CPU `clear` then writes only to
    the scattered places, as long as nobody else has written to the buffer: the version counters that
    PyTorch keeps for autograd tell. Writing through ``grad.data`` goes past them; 16 places
    of every parameter are looked at to notice it, which finds whatever touches all of a gradient
    (weight decay added in place), not a change of a few elements.

    Args:
        parameters: of one dtype and device, in bucket order.
        name: of the bucket, for messages.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], name: str = "a bucket") -> None:
        self.parameters = tuple(parameters)
        lengths = [parameter.numel() for parameter in self.parameters]
        stops = np.cumsum(lengths)
        #: [start, stop) of every parameter
        self.places = [(int(stop - length), int(stop)) for length, stop in zip(lengths, stops, strict=True)]
        self.num_elements = int(stops[-1])
        first = self.parameters[0]
        self.memory = memory_of(first.device, name)
        self.flat = _zeros(self.num_elements, first)
        self.views = [
            view_into(alone(self.flat, start, stop), 0, parameter)
            for parameter, (start, stop) in zip(self.parameters, self.places, strict=True)
        ]
        self._probes = np.concatenate(
            [
                np.linspace(start, stop - 1, min(_NUM_PROBES, stop - start)).astype(np.int64)
                for start, stop in self.places
            ]
        )
        self._uncounted = False
        self._mark(_NOWHERE)

    def _mark(self, scattered: np.ndarray) -> None:
        """The buffer holds zeros, and values only at these places."""
        self._scattered: np.ndarray = scattered
        self._version = self._versions()

    def _versions(self) -> int:
        """Counts every write that goes through PyTorch."""
        return sum(view._version for view in self.views)

    def gather(self) -> None:
        """Takes over gradients that lie elsewhere; a parameter without a gradient gets zeros."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is view:
                continue
            if gradient is None:
                view.zero_()
            elif gradient.is_sparse:
                view.zero_().add_(gradient)
            else:
                view.copy_(gradient)
            parameter.grad = view

    def gather_existing(self) -> None:
        """As `gather`, but a parameter without a gradient keeps none."""
        missing = [parameter for parameter in self.parameters if parameter.grad is None]
        self.gather()
        for parameter in missing:
            parameter.grad = None

    @property
    def num_bytes(self) -> int:
        """Of the buffer."""
        return self.num_elements * int(self.flat.element_size())

    def scatter(self, indices: np.ndarray, values: np.ndarray) -> int:
        """Adds a sum to the buffer, which holds zeros.

        Returns:
            How many different elements it has.
        """
        num_union = self.memory.scatter(self.flat, indices, values, 1.0)
        self._mark(indices)
        return num_union

    def clear(self) -> None:
        """Zeros everywhere, written only where needed."""
        if self._uncounted or self._versions() != self._version:
            self.flat.zero_()
        elif self._scattered.size and self.memory.clear(self.flat, self._scattered, self._probes):
            self._uncounted = True
            _log.info("a gradient was changed through .data: zero_grad() clears whole buffers from now on")
        self._mark(_NOWHERE)

    def reset(self) -> None:
        """Zeros everywhere, and views as gradients, whatever was there before."""
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        self._mark(_NOWHERE)


def _zeros(num_elements: int, like: torch.Tensor) -> torch.Tensor:
    """Zeros. On the host NumPy's, which asks for huge pages: large folds miss the TLB less."""
    if like.device.type != "cpu":
        return torch.zeros(num_elements, dtype=like.dtype, device=like.device)
    return torch.from_numpy(np.zeros(num_elements * like.element_size(), np.uint8)).view(like.dtype)
