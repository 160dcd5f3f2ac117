"""One selection as one int32 buffer, so that a round is one collective, and fuses with others.

Layout, in 32-bit words::

    0  length     words of the whole message, header and padding included
    1  count      number of selected elements
    2  nonfinite  1 + position of the first NaN or Inf in this rank's gradient, 0 if there is none
    3  norm       float32 bits of the L2 norm of the residual that this rank began the step with
    4  indices    count words, ascending
    .  values     count words (float32) or 2 * count words (float64), or none
    .  padding    zeros up to a multiple of the quantum

That is a plain message. In any other format (`WireFormat`) the length is negative, and one more word
comes before the indices::

    0  length     minus the words of the whole message
    4  tag        which codecs wrote the payload, and the low 24 bits of n
    5  indices    as their codec writes them
    .  values     as their codec writes them, or none
    .  padding    zeros up to the length of a multiple of the quantum

So a rank that expects another format, or another bucket, raises instead of decoding rubbish.

The length in front makes concatenated messages separable, so an allgather of unequal lengths needs
no second exchange of sizes. The two words for health and norm save a collective of their own; the
mean of the norms is the global error of ExDyna, Eq. (1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays.protocol import FoldReport, Indices, Values
from horovod_sparse.errors import ArgumentError, MessageError
from horovod_sparse.wire.format import HEADER_WORDS, WireFormat
from horovod_sparse.wire.gathered import Gathered, unpack_sum

__all__ = ["HEADER_WORDS", "Message", "message_words", "pack", "unpack", "unpack_one"]


@dataclass(frozen=True)
class Message:
    """What one rank sent.

    Attributes:
        indices: int32 [count], ascending positions within the bucket.
        values: float [count], or None where only indices were sent.
        first_nonfinite: position of the sender's first NaN or Inf, -1 if there is none.
        norm: L2 norm of the sender's residual before it added this step's gradient, rounded to float32.
    """

    indices: Indices
    values: Values | None
    first_nonfinite: int
    norm: float


def message_words(count: int, words_per_value: int, quantum: int = 1) -> int:
    """Length of a message in 32-bit words.

    Args:
        count: selected elements.
        words_per_value: 0 (indices only), 1 (float32) or 2 (float64).
        quantum: elements that the payload is rounded up to.

    Example:
        >>> message_words(3, 1), message_words(3, 1, quantum=1024)
        (10, 2052)
    """
    padded = -(-count // quantum) * quantum
    return HEADER_WORDS + padded * (1 + words_per_value)


def pack(
    indices: Indices,
    values: Values | None,
    report: FoldReport,
    *,
    quantum: int = 1,
    format: WireFormat | None = None,
    num_elements: int | None = None,
) -> NDArray[np.int32]:
    """Puts a selection into one fresh buffer.

    Args:
        indices: int32 [count].
        values: float32 or float64 [count], or None to send indices only.
        report: of the fold that made the accumulator; travels in the header.
        quantum: elements that the payload is rounded up to. A length that repeats from step to
            step stays in Horovod's response cache; a changed one costs an extra negotiation.
        format: how to write it, its quantum included; by default plainly.
        num_elements: n of the bucket, which a format that is not plain needs.

    Returns:
        int32, as long as `WireFormat.message_words` says.

    Raises:
        ArgumentError: the format needs ascending indices, or n, or the arrays do not fit each other.

    Example:
        >>> message = pack(np.array([2, 5], np.int32), np.array([1.0, -2.0], np.float32), FoldReport())
        >>> unpack_one(message, np.float32).values
        array([ 1., -2.], dtype=float32)
    """
    format = format or WireFormat(quantum=quantum)
    dtype, count = None if values is None else values.dtype, indices.size
    if values is not None and values.shape != indices.shape:
        raise ArgumentError("values", f"shape {values.shape}", f"as many values as indices, {indices.shape}")
    plain = format.is_plain(dtype)
    if num_elements is None and not plain:
        raise ArgumentError("num_elements", None, f"n of the bucket, which {format} needs")
    n = num_elements or 0
    codec = format.value_codec(dtype)
    length = format.message_words(count, n, dtype)

    buffer = np.empty(length, np.int32)
    buffer[:3] = length if plain else -length, count, report.first_nonfinite + 1
    norm = min(math.sqrt(report.carried_square_norm), float(np.finfo(np.float32).max))
    buffer[3:4].view(np.float32)[0] = norm
    if not plain:
        buffer[HEADER_WORDS] = format.tag(n, dtype)
    words, end = buffer.view(np.uint32), format.header_words(dtype)
    start, end = end, end + format.index_codec.num_words(count, n)
    format.index_codec.encode(indices, n, words[start:end])
    if values is not None and codec is not None:
        start, end = end, end + codec.num_words(count)
        codec.encode(np.ascontiguousarray(values), words[start:end])
    buffer[end:] = 0
    return buffer


def unpack_one(
    buffer: NDArray[np.int32], dtype: np.dtype | type | None, num_elements: int | None = None
) -> Message:
    """Reads the message at the start of a buffer.

    Args:
        buffer: int32, starting with a message.
        dtype: of the values, or None where only indices were sent.
        num_elements: n of the bucket, to refuse indices outside of it.

    Returns:
        The message; its arrays are views into the buffer.

    Raises:
        MessageError: if lengths or indices are impossible.
    """
    words_per_value = 0 if dtype is None else np.dtype(dtype).itemsize // 4
    length, count = (int(buffer[0]), int(buffer[1])) if buffer.size >= HEADER_WORDS else (0, -1)
    if count < 0 or not HEADER_WORDS + count * (1 + words_per_value) <= length <= buffer.size:
        raise MessageError(
            f"a message of {buffer.size} words claims {length} words and {count} elements; "
            "all ranks must use the same version, sparsifier and dtype"
        )
    indices = buffer[HEADER_WORDS : HEADER_WORDS + count]
    if (
        count
        and num_elements is not None
        and not 0 <= int(indices.min()) <= int(indices.max()) < num_elements
    ):
        raise MessageError(
            f"a message holds indices outside [0, {num_elements}); do all ranks have the same model?"
        )
    values = None
    if dtype is not None:
        start = HEADER_WORDS + count
        words = buffer[start : start + count * words_per_value]
        # a float64 view needs 8-byte alignment in numba; an odd start is copied
        values = (words if words.ctypes.data % np.dtype(dtype).itemsize == 0 else words.copy()).view(dtype)
    return Message(indices, values, int(buffer[2]) - 1, float(buffer[3:4].view(np.float32)[0]))


def unpack(
    buffer: NDArray[np.int32],
    size: int,
    dtype: np.dtype | type | None,
    num_elements: int | None = None,
    *,
    format: WireFormat | None = None,
) -> Sequence[Message]:
    """Splits an allgathered buffer into the messages of all ranks.

    Args:
        buffer: int32, `size` messages one behind the other.
        size: number of ranks.
        dtype: of the values, or None where only indices were sent.
        num_elements: n of the bucket, to refuse indices outside of it; a format needs it.
        format: how the messages are written; by default plainly, in any quantum.

    Returns:
        `size` messages in rank order.

    Raises:
        MessageError: if the buffer does not hold exactly `size` messages.
    """
    if format is not None:
        if num_elements is None:
            raise ArgumentError("num_elements", None, f"n of the bucket, which {format} needs")
        return _split(unpack_sum(buffer, size, format, num_elements, dtype))
    messages, start = [], 0
    for _ in range(size):
        messages.append(unpack_one(buffer[start:], dtype, num_elements))
        start += int(buffer[start])
    if start != buffer.size:
        raise MessageError(f"{buffer.size} words arrived, {start} belong to the messages of {size} ranks")
    return messages


def _split(gathered: Gathered) -> Sequence[Message]:
    ends = np.cumsum(gathered.counts)
    return [
        Message(
            gathered.indices[end - count : end],
            None if gathered.values is None else gathered.values[end - count : end],
            gathered.first_nonfinite.get(rank, -1),
            float(norm),
        )
        for rank, (end, count, norm) in enumerate(zip(ends, gathered.counts, gathered.norms, strict=True))
    ]
