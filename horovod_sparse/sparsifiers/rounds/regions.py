"""A sparse reduce-scatter by direct messages: every rank owns a region, all send it what lies there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from horovod_sparse.arrays import FoldReport, Values
from horovod_sparse.collectives import AllToAll, Synchronization, Words
from horovod_sparse.sparsifiers.base import BucketInfo, Traffic
from horovod_sparse.sparsifiers.rounds.sparse_vectors import SparseVector, added, cut, empty, rounded
from horovod_sparse.wire import Gathered, WireFormat, pack, unpack_sum

#: (start, stop), in elements
Window: TypeAlias = tuple[int, int]


def cut_and_pack(
    parts: Sequence[SparseVector], report: FoldReport, info: BucketInfo, wire: WireFormat
) -> tuple[tuple[Words, ...], Values | None]:
    """Messages of consecutive parts of a vector, each rounded by itself, as its receiver will see it."""
    messages, errors = [], []
    for part in parts:
        seen, error = rounded(part, wire)
        messages.append(pack(seen.indices, seen.values, report, format=wire, num_elements=info.num_elements))
        errors.append(np.zeros_like(part.values) if error is None else error)
    return tuple(messages), None if wire.exact else np.concatenate(errors)


def reduce_in_regions(
    vector: SparseVector, regions: Sequence[Window], report: FoldReport, info: BucketInfo, wire: WireFormat
) -> Synchronization[tuple[SparseVector, Gathered, Values | None]]:
    """Sums up all ranks' vectors, each rank in its own region, by one all-to-all."""
    messages, error = cut_and_pack([cut(vector, *region) for region in regions], report, info, wire)
    arrived = yield AllToAll(messages)
    gathered = unpack_sum(np.concatenate(arrived), info.size, wire, info.num_elements, info.value_dtype)
    total, begin = empty(info.value_dtype), 0
    for count in gathered.counts:
        if gathered.values is not None:
            here = slice(begin, begin + count)
            total = added(total, SparseVector(gathered.indices[here], gathered.values[here]))
        begin += int(count)
    return total, gathered, error


def split_traffic(count: int, info: BucketInfo, wire: WireFormat) -> Traffic:
    """Declared cost of that: nothing leaves if all is in the own region, all if nothing is."""
    words = [wire.message_words(number, info.num_elements, info.value_dtype) for number in (0, count)]
    others = info.size - 1
    # written plainly, elements cost the same in whichever message they are
    plain = wire.is_plain(info.value_dtype) and wire.quantum == 1
    most = others * words[0] + words[1] - words[0] if plain else others * words[1]
    return Traffic(AllToAll, 4 * others * words[0], 4 * most if others else 0)
