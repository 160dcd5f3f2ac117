"""The sum of all ranks' values at indices that every rank knows: a last round of several algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from horovod_sparse.arrays import Accumulator, FoldReport, Indices, Values
from horovod_sparse.collectives import AllGather, AllReduce, AllToAll, Synchronization, rank_part
from horovod_sparse.sparsifiers.base import BucketInfo, SparseSum, Traffic
from horovod_sparse.sparsifiers.rounds.sparse_vectors import Window
from horovod_sparse.wire import Notes, WireFormat, note_of

#: behind the values of an allreduce: a column of these per rank, which only that rank fills
_NUMBERS_PER_RANK = 5
#: a position is sent as two numbers below this, which float32 holds exactly
_HALF = 1 << 16
#: a note in front of a part's values: see `wire.note`
_NOTE_WORDS = 4
#: the values summed up, and the notes of all ranks (none if not asked for)
_Sum: TypeAlias = tuple[Values, Notes]


def sum_at(
    accumulator: Accumulator,
    indices: Indices,
    counts: np.ndarray,
    info: BucketInfo,
    wire: WireFormat,
    *,
    with_notes: bool = True,
) -> Synchronization[SparseSum]:
    """Sums all ranks' accumulators at the same indices, and clears them there; `counts` only travel on.

    Exact values take one allreduce. Rounded values must not be rounded again at every addition: each rank
    adds up one part of them (all-to-all), rounds the sum, keeps that error, and the parts are gathered: as
    many bytes.
    """
    values = accumulator.remove(indices)
    if wire.exact:
        report = accumulator.report if with_notes else None
        summed, notes = yield from _allreduce(values, report, info)
    else:
        summed, notes = yield from _sum_in_parts(accumulator, indices, values, info, wire, with_notes)
    return SparseSum(indices, summed, counts, notes)


def sum_traffic(
    num_indices: int, info: BucketInfo, wire: WireFormat, *, with_notes: bool = True
) -> tuple[Traffic, ...]:
    """Declares the collectives of `sum_at`: the values, and each rank's note if `with_notes`."""
    if wire.exact:
        note = _NUMBERS_PER_RANK * info.size if with_notes else 0
        return (Traffic(AllReduce, (num_indices + note) * info.value_dtype.itemsize),)
    words = [
        wire.num_value_words(stop - start, info.value_dtype)
        for start, stop in _windows_by_rank(num_indices, info.size)
    ]
    note = _NOTE_WORDS if with_notes else 0
    sent = sum(note + count for rank, count in enumerate(words) if rank != info.rank)
    return (Traffic(AllToAll, 4 * sent), Traffic(AllGather, 4 * words[info.rank]))


def _allreduce(values: Values, report: FoldReport | None, info: BucketInfo) -> Synchronization[_Sum]:
    k = values.size
    buffer = np.zeros(k + (_NUMBERS_PER_RANK * info.size if report is not None else 0), values.dtype)
    buffer[:k] = values
    if report is not None:  # this rank's column; summed up, those of all ranks
        columns = buffer[k:].reshape(_NUMBERS_PER_RANK, info.size)
        own = note_of(report)
        norm, projection = own.view(np.float32)[1::2]
        columns[:, info.rank] = *divmod(own[0], _HALF), norm, own[2], projection
    summed = yield AllReduce(buffer)
    if report is None:
        return summed[:k], Notes()
    high, low, norms, steps, projections = summed[k:].reshape(_NUMBERS_PER_RANK, -1).astype(np.float64)
    notes = np.empty((info.size, _NOTE_WORDS), np.int32)
    notes[:, ::2] = np.stack([high * _HALF + low, steps], 1)
    notes.view(np.float32)[:, 1::2] = np.stack([norms, projections], 1)
    return summed[:k], Notes.of(notes)


def _sum_in_parts(
    accumulator: Accumulator,
    indices: Indices,
    values: Values,
    info: BucketInfo,
    wire: WireFormat,
    with_notes: bool,
) -> Synchronization[_Sum]:
    parts = _windows_by_rank(indices.size, info.size)
    note = note_of(accumulator.report) if with_notes else np.zeros(0, np.int32)
    messages = []
    for start, stop in parts:
        words = wire.encode_values(values[start:stop])
        seen = wire.decode_values(words, stop - start, values.dtype)
        messages.append(np.concatenate([note, words]))
        accumulator.add(indices[start:stop], values[start:stop] - seen)
    arrived = yield AllToAll(tuple(messages))

    start, stop = parts[info.rank]
    total = np.zeros(stop - start, values.dtype)
    with np.errstate(over="ignore"):  # all ranks refuse an infinite sum
        for message in arrived:
            total += wire.decode_values(message[note.size :], stop - start, values.dtype)
    summed, error = yield from gather_parts(total, parts, info, wire)
    accumulator.add(indices[start:stop], error)
    notes = Notes.of(np.stack([message[: note.size] for message in arrived])) if with_notes else Notes()
    return summed, notes


def gather_parts(
    values: Values, parts: Sequence[Window], info: BucketInfo, wire: WireFormat
) -> Synchronization[tuple[Values, Values]]:
    """Allgathers a vector of which each rank has a part; returns it, and this part's rounding errors."""
    gathered = yield AllGather(wire.encode_values(values))
    whole, begin = np.empty(parts[-1][1], values.dtype), 0
    for start, stop in parts:
        end = begin + wire.num_value_words(stop - start, values.dtype)
        whole[start:stop] = wire.decode_values(gathered[begin:end], stop - start, values.dtype)
        begin = end
    return whole, values - whole[slice(*parts[info.rank])]


def _windows_by_rank(num_indices: int, size: int) -> list[Window]:
    return [rank_part(num_indices, rank, size) for rank in range(size)]
