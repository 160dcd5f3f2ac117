"""The second half of sparsifiers whose ranks all know the same indices: the sum of values there."""

from __future__ import annotations

import math

import numpy as np

from horovod_sparse.arrays.protocol import Accumulator, FoldReport, Indices, Values
from horovod_sparse.collectives import AllGather, AllReduce, AllToAll, Request, Synchronization
from horovod_sparse.sparsifiers.base import BucketInfo, SparseSum, Traffic
from horovod_sparse.sparsifiers.rounds.regions import Window, equal_part
from horovod_sparse.wire import WireFormat

#: behind the values of an allreduce: a column of these per rank, which only that rank fills
_NUMBERS_PER_RANK = 3
#: a position is sent as two numbers below this, which float32 holds exactly
_HALF = 1 << 16
#: in front of a part's values: position of what is not finite, and the norm
_HEALTH_WORDS = 2


def sum_at(
    accumulator: Accumulator,
    indices: Indices,
    counts: np.ndarray,
    info: BucketInfo,
    wire: WireFormat,
    *,
    ask_health: bool = True,
) -> Synchronization[SparseSum]:
    """Sums everyone's values at indices that all ranks know, and clears them.

    Exact values take one allreduce. Rounded values must not be rounded again at every addition, where
    nobody keeps the error: each rank adds up one part of them (all-to-all), rounds the sum, keeps that
    error too, and the parts are gathered. The bytes are those of an allreduce of the rounded values.

    Args:
        accumulator: of this rank.
        indices: int32, the same on all ranks, unique.
        counts: int [P], how many of them each rank selected.
        info: the facts of the bucket.
        wire: how values are written.
        ask_health: False where an earlier round has told whose gradient is not finite.

    Returns:
        The sum, with the health of all ranks if that was asked for.
    """
    values = accumulator.take(indices)
    accumulator.clear(indices)
    if wire.exact:
        return (yield from _allreduce(accumulator, indices, values, counts, info, wire, ask_health))
    return (yield from _reduce_in_parts(accumulator, indices, values, counts, info, wire, ask_health))


def sum_rounds(wire: WireFormat) -> tuple[type[Request], ...]:
    """The rounds of `sum_at`."""
    return (AllReduce,) if wire.exact else (AllToAll, AllGather)


def sum_traffic(
    num_indices: int, info: BucketInfo, wire: WireFormat, *, ask_health: bool = True
) -> tuple[Traffic, ...]:
    """Declared cost of `sum_at`: values, and what the header of a message would have carried."""
    if wire.exact:
        padded = -(-num_indices // wire.quantum) * wire.quantum
        health = _NUMBERS_PER_RANK * info.size if ask_health else 0
        return (Traffic(AllReduce, (padded + health) * info.value_dtype.itemsize),)
    words = [
        wire.num_value_words(stop - start, info.value_dtype) for start, stop in _parts(num_indices, info.size)
    ]
    health = _HEALTH_WORDS if ask_health else 0
    sent = sum(health + count for rank, count in enumerate(words) if rank != info.rank)
    return (Traffic(AllToAll, 4 * sent), Traffic(AllGather, 4 * words[info.rank]))


def _allreduce(
    accumulator: Accumulator,
    indices: Indices,
    values: Values,
    counts: np.ndarray,
    info: BucketInfo,
    wire: WireFormat,
    ask_health: bool,
) -> Synchronization[SparseSum]:
    k = indices.size
    padded = -(-k // wire.quantum) * wire.quantum
    buffer = np.zeros(padded + (_NUMBERS_PER_RANK * info.size if ask_health else 0), values.dtype)
    buffer[:k] = values
    if ask_health:
        _own_column(accumulator.report, info, buffer[padded:].reshape(_NUMBERS_PER_RANK, info.size))
    summed = yield AllReduce(buffer)
    sum_ = SparseSum(indices, summed[:k], counts)
    if ask_health:
        columns = summed[padded:].reshape(_NUMBERS_PER_RANK, info.size).astype(np.float64)
        sum_.first_nonfinite = _sick((columns[0] * _HALF + columns[1]).astype(np.int64))
        sum_.norms = columns[2]
    return sum_


def _own_column(report: FoldReport, info: BucketInfo, columns: Values) -> None:
    """Health and norm of this rank, zeros for the others; summed up, those of all ranks."""
    columns[:, info.rank] = *divmod(report.first_nonfinite + 1, _HALF), _norm(report)


def _norm(report: FoldReport) -> float:
    return min(math.sqrt(report.carried_square_norm), float(np.finfo(np.float32).max))


def _sick(marks: np.ndarray) -> dict[int, int]:
    """Rank -> position, from 1 + position of every rank, or 0."""
    return {rank: int(mark) - 1 for rank, mark in enumerate(marks) if mark > 0}


def _reduce_in_parts(
    accumulator: Accumulator,
    indices: Indices,
    values: Values,
    counts: np.ndarray,
    info: BucketInfo,
    wire: WireFormat,
    ask_health: bool,
) -> Synchronization[SparseSum]:
    parts = _parts(indices.size, info.size)
    health = np.zeros(_HEALTH_WORDS if ask_health else 0, np.int32)
    if ask_health:
        health[0] = accumulator.report.first_nonfinite + 1
        health[1:].view(np.float32)[0] = _norm(accumulator.report)
    messages = []
    for start, stop in parts:
        words = wire.encode_values(values[start:stop])
        seen = wire.decode_values(words, stop - start, values.dtype)
        messages.append(np.concatenate([health, words]))
        accumulator.add(indices[start:stop], values[start:stop] - seen)
    arrived = yield AllToAll(tuple(messages))

    start, stop = parts[info.rank]
    total = np.zeros(stop - start, values.dtype)
    for message in arrived:
        total += wire.decode_values(message[health.size :], stop - start, values.dtype)
    words = wire.encode_values(total)
    accumulator.add(indices[start:stop], total - wire.decode_values(words, total.size, values.dtype))
    gathered = yield AllGather(words)

    summed, begin = np.empty(indices.size, values.dtype), 0
    for start, stop in parts:
        length = wire.num_value_words(stop - start, values.dtype)
        summed[start:stop] = wire.decode_values(gathered[begin : begin + length], stop - start, values.dtype)
        begin += length
    sum_ = SparseSum(indices, summed, counts)
    if ask_health:
        heads = np.stack([message[:_HEALTH_WORDS] for message in arrived])
        sum_.first_nonfinite = _sick(heads[:, 0])
        sum_.norms = np.ascontiguousarray(heads[:, 1]).view(np.float32).astype(np.float64)
    return sum_


def _parts(num_indices: int, size: int) -> list[Window]:
    return [equal_part(num_indices, size, part) for part in range(size)]
