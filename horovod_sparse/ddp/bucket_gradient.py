"""The gradients of a part where DistributedDataParallel has them: in its buckets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from horovod_sparse.tensors.flat_gradient import memory_of
from horovod_sparse.tensors.layout import memory_strides, view_into


class BucketGradient:
    """What `FlatGradient` is to Horovod's optimizer: the gradients of a part, one behind the other.

    Where they lie in one of DistributedDataParallel's buckets in that order, that memory is used, and nothing
    is copied. Where they do not (its first buckets are others than the later ones, a plan of the user's,
    parameters that a rule leaves dense), they are copied, and the sum back.
    """

    #: the buckets' memory is DistributedDataParallel's: see `horovod_sparse.carriers.shared_memory`
    lends = None

    def __init__(self, parameters: Sequence[torch.Tensor], name: str) -> None:
        self.parameters, self.name = tuple(parameters), name
        lengths = [parameter.numel() for parameter in self.parameters]
        stops = np.cumsum(lengths)
        #: [start, stop) of every parameter
        self.places = [(int(stop - length), int(stop)) for length, stop in zip(lengths, stops, strict=True)]
        self.num_elements = int(stops[-1])
        first = self.parameters[0]
        self.memory = memory_of(first.device, name)
        self.num_bytes = self.num_elements * first.element_size()
        #: shape and order of every parameter's part
        self.layouts = [
            torch.empty_strided(parameter.shape, memory_strides(parameter), device="meta")
            for parameter in self.parameters
        ]
        #: all of them; from `settle` on, those of this step
        self.flat = torch.empty(0, dtype=first.dtype, device=first.device)
        self._own: torch.Tensor | None = None
        self._pieces: dict[int, torch.Tensor] = {}

    def take(self, number: int, piece: torch.Tensor) -> None:
        """A parameter's gradient has come."""
        self._pieces[number] = piece

    def pieces(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every parameter, and its view into a bucket."""
        return [(self.parameters[number], piece) for number, piece in self._pieces.items()]

    def settle(self) -> None:
        """All have come."""
        first, address = self._pieces[0], self._pieces[0].data_ptr()
        together = all(
            piece.data_ptr() == address + start * piece.element_size()
            and piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            for piece, (start, _) in ((self._pieces[number], self.places[number]) for number in self._pieces)
        )
        if together:
            self._own = None
            self.flat = first.as_strided((self.num_elements,), (1,), first.storage_offset())
            return
        if self._own is None:
            self._own = torch.empty(self.num_elements, dtype=first.dtype, device=first.device)
        self.flat = self._own
        for number, piece in self._pieces.items():
            self._view(number).copy_(piece)

    def _view(self, number: int) -> torch.Tensor:
        return view_into(self.flat, self.places[number][0], self.layouts[number])

    def scatter(self, indices: np.ndarray | None, values: np.ndarray, scale: float = 1.0) -> int:
        """A sum, times a scale, as the gradients; how many different elements it has."""
        num_union = self.memory.write(self.flat, indices, values, scale)
        self._give_out()
        return num_union

    def fill(self, total: torch.Tensor) -> None:
        """All elements of a sum as the gradients."""
        self.flat.copy_(total)
        self._give_out()

    def _give_out(self) -> None:
        if self._own is not None:
            for number, piece in self._pieces.items():
                piece.copy_(self._view(number))

    def let_go(self) -> None:
        """The step is over: the buckets may be freed."""
        self._pieces = {}
        if self._own is None:
            self.flat = self.flat[:0].clone()
