"""Parameters of a bucket, as own moves and sums over ranks reach them: where they lie, and nothing copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from horovod_sparse.arrays import Indices, Values, WeightedParts
from horovod_sparse.arrays.gradients import GradientParts
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.kernels.host import scatter, sparse_vectors
from horovod_sparse.kernels.host.scatter import narrow, wide
from horovod_sparse.sparsifiers import SparseSum
from horovod_sparse.tensors.gradients import HOST_DEVICES, host_view
from horovod_sparse.tensors.layout import local, memory_strides


def flat(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a tensor's elements in the order of a parameter's memory; its own memory where it can."""
    own = local(tensor)
    strides = memory_strides(own if like is None else local(like))
    if own.stride() != strides:
        own = torch.empty_strided(own.shape, strides, dtype=own.dtype, device=own.device).copy_(own)
    return own.as_strided((own.numel(),), (1,), own.storage_offset())


class BucketParameters:
    """See `horovod_sparse.training.moves.Parameters`.

    Args:
        parameters: of the bucket, in its order.
        places: [start, stop) of each.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], places: Sequence[tuple[int, int]]) -> None:
        for own in map(local, parameters):
            if own.numel() and own.stride() != memory_strides(own):
                shape, strides = list(own.shape), list(own.stride())
                raise UnsupportedError(
                    f"a parameter of shape {shape}, strides {strides}, has gaps in memory: "
                    "steps reach its own memory, so make it of tensor.contiguous()"
                )
        self.parameters, self._places = list(parameters), list(places)
        self._stops = np.array([stop for _, stop in places])
        first = local(parameters[0])
        self.on_host = first.device.type in HOST_DEVICES
        #: moves reach the arrays by compiled kernels that read each once
        self._at_once = self.on_host and first.dtype in (torch.float32, torch.float64)
        #: where parameters lie, and their arrays there
        self._lie: list[Any] = []
        self._arrays: list[Any] = []

    def arrays(self) -> list[Any]:
        """Returns the parameters' own memory, flat: arrays on the host, tensors elsewhere."""
        own = [local(parameter) for parameter in self.parameters]
        lie = [(one.data_ptr(), one.stride()) for one in own]
        if lie != self._lie:
            tensors = [flat(one) for one in own]
            flats = [scatter.native_bits(host_view(one)) for one in tensors] if self.on_host else tensors
            self._lie, self._arrays = lie, flats
        return self._arrays

    def _within(self, indices: Indices) -> Iterator[tuple[Any, slice, Any]]:
        """Yields the memory of each parameter that has some of the positions, which, and where in it."""
        cuts = [0, *np.searchsorted(indices, self._stops).tolist()]
        arrays = self.arrays()
        for number, array in enumerate(arrays):
            here = slice(cuts[number], cuts[number + 1])
            if here.start < here.stop:
                where = indices[here] - np.int32(self._places[number][0])
                yield array, here, where if self.on_host else torch.from_numpy(where).to(array.device).long()

    def take(self, indices: Indices) -> list[Any]:
        if self.on_host:
            return [scatter.taken(array, where) for array, _, where in self._within(indices)]
        return [array[where] for array, _, where in self._within(indices)]

    def _placed(self, factors: Mapping[float, Sequence[int]] = MappingProxyType({})) -> list[Any]:
        """Arrays, where they begin in the bucket, and the factor of each."""
        factor_of = {number: factor for factor, numbers in factors.items() for number in numbers}
        return [
            (array, start, factor_of.get(number, 1.0))
            for number, (array, (start, _)) in enumerate(zip(self.arrays(), self._places, strict=True))
        ]

    def put(self, indices: Indices, before: list[Any]) -> None:
        if self._at_once:
            sparse_vectors.replace(self._placed(), [(indices, before[0])])
            return
        for (array, _, where), old in zip(self._within(indices), before, strict=True):
            if self.on_host:
                scatter.put_at(array, where, old)
            else:
                array[where] = old

    def move(self, indices: Indices, values: Values) -> list[Any]:
        if self._at_once:
            return sparse_vectors.replace(self._placed(), again=[(indices, values)])[1]
        before = self.take(indices)
        for array, here, where in self._within(indices):
            self._subtract(array, where, values[here])
        return before

    def _subtract(self, array: Any, where: Any, step: Values) -> None:
        if self.on_host:
            scatter.put_at(array, where, narrow(wide(scatter.taken(array, where)) - step, array.dtype))
        else:
            given = torch.from_numpy(np.ascontiguousarray(step)).to(array.device)
            array[where] = (array[where].to(given.dtype) - given).to(array.dtype)

    def replace(
        self,
        undone: Sequence[tuple[Indices, list[Any]]],
        shrunk: Mapping[float, Sequence[int]],
        total: SparseSum,
        scale: float,
        again: Sequence[tuple[Indices, Values]],
    ) -> tuple[int, list[list[Any]]]:
        values = total.values if scale == 1.0 else total.values * total.values.dtype.type(scale)
        if self._at_once and not total.whole:
            back = [(indices, before[0]) for indices, before in undone]
            placed = self._placed(shrunk)
            num_union, kept = sparse_vectors.replace(placed, back, (total.indices, values), again)
            return num_union, [[one] for one in kept]
        for indices, before in undone:
            self.put(indices, before)
        for factor, numbers in shrunk.items():
            torch._foreach_mul_([local(self.parameters[number]) for number in numbers], factor)
        num_union = self._subtract_sum(total, values)
        return num_union, [self.move(*one) for one in again]

    def _subtract_sum(self, total: SparseSum, values: Values) -> int:
        if total.whole:
            for array, (start, stop) in zip(self.arrays(), self._places, strict=True):
                piece = values[start:stop]
                if self.on_host:
                    array[...] = narrow(wide(array) - piece, array.dtype)
                else:
                    given = torch.from_numpy(np.ascontiguousarray(piece)).to(array.device)
                    array.copy_((array.to(given.dtype) - given).to(array.dtype))
            return int(values.size)
        where, steps = scatter.added_up(scatter.checked(total.indices, int(self._stops[-1])), values)
        for array, here, place in self._within(where):
            self._subtract(array, place, steps[here])
        return int(where.size)

    def to_save(self, values: list[Any]) -> list[torch.Tensor]:
        return [torch.from_numpy(one.copy()) if self.on_host else one.cpu() for one in values]

    def from_saved(self, saved: list[torch.Tensor]) -> list[Any]:
        device = local(self.parameters[0]).device
        return [one.cpu().numpy().copy() if self.on_host else one.to(device) for one in saved]

    def foldable(self, gradients: Sequence[torch.Tensor | None], weights: tuple[float, float]) -> Any:
        """Returns ``weights[0] gradient + weights[1] parameter`` for a fold; without a gradient zeros."""
        if self.on_host:
            # accumulators know float16 as itself, and bfloat16 by its bits
            arrays = [one.view(np.float16) if one.dtype == np.int16 else one for one in self.arrays()]
            arrays = [
                np.zeros_like(array) if one is None else array
                for one, array in zip(gradients, arrays, strict=True)
            ]
            given = [
                array if one is None else host_view(flat(one, like))
                for one, like, array in zip(gradients, self.parameters, arrays, strict=True)
            ]
            return GradientParts(given) if weights == (1.0, 0.0) else WeightedParts(given, arrays, weights)
        return self._on_device(gradients, weights)

    def _on_device(self, gradients: Sequence[torch.Tensor | None], weights: tuple[float, float]) -> Any:
        tensors = [
            torch.zeros_like(like) if one is None else like
            for one, like in zip(gradients, self.arrays(), strict=True)
        ]
        own = torch.cat(
            [
                like if one is None else flat(one, parameter)
                for one, parameter, like in zip(gradients, self.parameters, tensors, strict=True)
            ]
        )
        if weights != (1.0, 0.0):
            own = own.to(torch.promote_types(own.dtype, torch.float32)) * weights[0]
        if weights[1]:
            own.add_(torch.cat(tensors).to(own.dtype), alpha=weights[1])
        return own
