"""Sparse vectors: ascending indices and their values, added, cut, reduced, and summed up by regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays import Accumulator, FoldReport, Indices, Values
from horovod_sparse.collectives import AllToAll, Synchronization, Words
from horovod_sparse.kernels.host.kth import kth_of
from horovod_sparse.kernels.host.scatter import sum_duplicates
from horovod_sparse.kernels.layout import bits_dtype
from horovod_sparse.sparsifiers.base import BucketInfo, Traffic
from horovod_sparse.wire import SparseSum, WireFormat, pack, unpack_sum

#: bits of a value that survive when it is shared out among ranks whose number is no power of two
_SHARE_BITS = {"float32": 12, "float64": 26}
#: 2**32 divided by the golden ratio: its multiples lie evenly, at whichever distance they are taken
GOLDEN = 2654435769


#: (start, stop), in elements
Window: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class SparseVector:
    """Elements of a bucket: int32 indices, ascending and unique, and as many values."""

    indices: Indices
    values: Values

    def __len__(self) -> int:
        return self.indices.size

    def __getitem__(self, some: Any) -> SparseVector:
        """Returns the elements that a slice or a mask selects."""
        return SparseVector(self.indices[some], self.values[some])

    def __add__(self, other: SparseVector) -> SparseVector:
        """Adds two vectors, values at equal indices; a + b and b + a have the same bits."""
        if not len(other):
            return self
        if not len(self):
            return other
        indices = np.concatenate([self.indices, other.indices])
        return SparseVector(*sum_duplicates(indices, np.concatenate([self.values, other.values]))[:2])

    def split_largest(self, k: int) -> tuple[SparseVector, SparseVector]:
        """Returns the k elements of largest magnitude, and the rest; of equal ones the lowest indices."""
        if len(self) <= k:
            return self, self[:0]
        if k == 0:
            return self[:0], self
        values = np.ascontiguousarray(self.values)
        keys = np.abs(values).view(bits_dtype(values.dtype))
        smallest, larger = kth_of(keys, k, values.itemsize * 8 - 1)
        kept = keys > smallest
        kept[np.flatnonzero(keys == smallest)[: k - larger]] = True
        return self[kept], self[~kept]

    def cut(self, start: int, stop: int) -> SparseVector:
        """Returns views of the elements whose index is in [start, stop)."""
        return self[slice(*np.searchsorted(self.indices, (start, stop)))]

    def rounded(self, wire: WireFormat) -> tuple[SparseVector, Values | None]:
        """Returns the vector as the wire format rounds it, and the rounding errors (None if exact)."""
        values = wire.round(self.values)
        if values is self.values:
            return self, None
        return SparseVector(self.indices, values), self.values - values


def not_among(indices: Indices, others: Indices) -> NDArray[np.bool_]:
    """Returns a mask of the indices that are not among `others`; both are ascending.

    Example:
        >>> not_among(np.array([1, 3, 5], np.int32), np.array([3, 4], np.int32))
        array([ True, False,  True])
    """
    return np.append(others, -1)[np.searchsorted(others, indices)] != indices


def split_exactly(values: Values, num_parts: int, part: int) -> Values:
    """Returns addend number `part` of `num_parts` nearly equal ones, which add up to the values exactly."""
    if num_parts == 1:
        return values
    equal = values / values.dtype.type(num_parts)
    if num_parts & (num_parts - 1) == 0:
        return equal
    bits = equal.view(bits_dtype(values.dtype))
    bits &= ~bits.dtype.type((1 << _SHARE_BITS[values.dtype.name]) - 1)
    return values - values.dtype.type(num_parts - 1) * equal if part == 0 else equal


def round_for_wire(vector: SparseVector, accumulator: Accumulator, wire: WireFormat) -> SparseVector:
    """Rounds a vector's values to the wire format; adds the rounding errors to this rank's accumulator."""
    seen, error = vector.rounded(wire)
    if error is not None:
        accumulator.add(vector.indices, error)
    return seen


def keeps_discards(step: int) -> bool:
    """True in one step of 16, in which a rank keeps the partial sums that it drops, in its residual.

    If dropped values always returned to their ranks, two ranks whose gradients cancel at an element, as those
    of different data do in the end, would both select it for ever. The steps follow no period, so that every
    block that takes turns has its turn in some of them.
    """
    return (step + 1) * GOLDEN % 2**32 < 2**28


def cut_and_pack(
    parts: Sequence[SparseVector], report: FoldReport, info: BucketInfo, wire: WireFormat
) -> tuple[tuple[Words, ...], Values | None]:
    """Rounds each part of a vector and encodes it as a message; returns messages and rounding errors."""
    messages, errors = [], []
    for part in parts:
        seen, error = part.rounded(wire)
        messages.append(pack(seen.indices, seen.values, report, wire, info.num_elements))
        errors.append(np.zeros_like(part.values) if error is None else error)
    return tuple(messages), None if wire.exact else np.concatenate(errors)


def reduce_in_regions(
    vector: SparseVector, regions: Sequence[Window], report: FoldReport, info: BucketInfo, wire: WireFormat
) -> Synchronization[tuple[SparseVector, SparseSum, Values | None]]:
    """Sums regions up by an all-to-all to their owners; returns own sum, messages, rounding errors."""
    messages, error = cut_and_pack([vector.cut(*region) for region in regions], report, info, wire)
    arrived = yield AllToAll(messages)
    gathered = unpack_sum(np.concatenate(arrived), info.size, wire, info.num_elements, info.value_dtype)
    total, begin = SparseVector(np.empty(0, np.int32), np.empty(0, info.value_dtype)), 0
    for count in gathered.counts:
        total += SparseVector(gathered.indices, gathered.values)[begin : begin + count]
        begin += int(count)
    return total, gathered, error


def region_traffic(count: int, info: BucketInfo, wire: WireFormat) -> Traffic:
    """Declares the bytes of `reduce_in_regions`: least if all elements lie in this rank's own region."""
    words = [wire.message_words(number, info.num_elements, info.value_dtype) for number in (0, count)]
    others = info.size - 1
    # written plainly, elements cost the same in whichever message they are
    plain = wire.is_plain(info.value_dtype)
    most = others * words[0] + words[1] - words[0] if plain else others * words[1]
    return Traffic(AllToAll, 4 * others * words[0], 4 * most if others else 0)
