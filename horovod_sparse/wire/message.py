"""Encodes a selection as one int32 buffer, so that a round is one collective.

Layout, in 32-bit words::

    0  length     words of the whole message, header and padding included
    1  count      number of selected elements
    2  nonfinite  1 + position of the first NaN or Inf in this rank's gradient, 0 if there is none
    3  norm       float32 bits of the L2 norm of the residual that this rank began the step with
    4  step       number of synchronizations that this rank has done, modulo 2^24
    5  projection float32 bits of how far this rank's gradient leans along a direction that ranks share
    6  indices    count words, ascending
    .  values     count words (float32) or 2 * count words (float64), or none
    .  padding    zeros up to the room that the format asks for (`WireFormat.capacity`)

That is a plain message. In any other format (`WireFormat`) the length is negative, and one more word
comes before the indices::

    0  length     minus the words of the whole message
    6  tag        which codecs wrote the payload, and the low 24 bits of n
    7  indices    as their codec writes them
    .  values     as their codec writes them, or none
    .  padding    zeros up to the length of as many elements as there is room for

So a rank that expects another format, or another bucket, raises instead of decoding rubbish.

The length in front makes concatenated messages separable, so an allgather of unequal lengths needs
no second exchange of sizes. Words 2 to 5, a note (`Notes`), save a collective of their own. A mark of NaN
or Inf makes all ranks cancel the step; the mean of the norms is the global error of ExDyna, Eq. (1); numbers
of steps tell ranks that have come apart, and projections how alike gradients are. Rounds without such headers
carry notes, too.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays import FoldReport, Indices, Values
from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError, MessageError, UnknownNameError
from horovod_sparse.kernels.host.scatter import find_outside
from horovod_sparse.wire.codecs import INDEX_CODECS, VALUE_CODECS, IndexCodec, ValueCodec

#: length, count, and a note
HEADER_WORDS = 6
#: the largest magnitude in a note; steps are counted modulo this: float32 holds all below it
_LARGEST, _STEPS = float(np.finfo(np.float32).max), 1 << 24


@dataclass(frozen=True)
class WireFormat:
    """Defines how a selection is encoded in a message; equal on all ranks.

    Args:
        values: "exact" (as the accumulator has them), "float64", "float32", "float16",
            "bfloat16", or "2bit" (with two magnitudes per 64 values).
        indices: "int32" (any order), or for ascending ones "gaps" (bit-packed).
        capacity: elements that the payload has room for at least, whatever is in it.

    Example:
        >>> WireFormat("float16", "gaps").message_bytes(25_600, 25_600_000, np.float32) / 25_600
        3.495...
    """

    values: str = "exact"
    indices: str = "int32"
    capacity: int = 0

    def __post_init__(self) -> None:
        if self.values not in ("exact", *VALUE_CODECS):
            raise UnknownNameError("wire format of values", str(self.values), ["exact", *VALUE_CODECS])
        if self.indices not in INDEX_CODECS:
            raise UnknownNameError("wire format of indices", str(self.indices), INDEX_CODECS)
        check_count("capacity", self.capacity, "a whole number of elements, 0 or more", low=0)

    @functools.cached_property
    def exact(self) -> bool:
        """True if encoding never changes a value, whatever the accumulator's dtype is."""
        return self.values in ("exact", "float64")

    @property
    def ascending(self) -> bool:
        """True if indices must be ascending."""
        return self.indices != "int32"

    def round(self, values: Values) -> Values:
        """Returns the values after encoding and decoding; the caller adds the difference to the residual.

        Example:
            >>> WireFormat("float16").round(np.array([0.1, 1e6], np.float32))
            array([9.9975586e-02, 6.5504000e+04], dtype=float32)
        """
        if self.exact or self.values == _dtype_name(values.dtype):
            return values
        return self.decode_values(self.encode_values(values), values.size, values.dtype)

    def num_value_words(self, count: int, dtype: Any) -> int:
        """Returns how many words `count` encoded values take, without header and indices."""
        return self.value_codec(dtype).num_words(count)

    def encode_values(self, values: Values) -> NDArray[np.int32]:
        """Encodes values without header and indices, for rounds whose indices all ranks know."""
        words = np.empty(self.num_value_words(values.size, values.dtype), np.uint32)
        self.value_codec(values.dtype).encode(np.ascontiguousarray(values), words)
        return words.view(np.int32)

    def decode_values(self, words: NDArray[np.int32], count: int, dtype: Any) -> Values:
        """Decodes words that `encode_values` wrote."""
        values = np.empty(count, dtype)
        self.value_codec(dtype).decode(np.ascontiguousarray(words).view(np.uint32), values)
        return values

    def message_words(self, count: int, num_elements: int, dtype: Any) -> int:
        """Returns the exact length of a message, header and padding included, in 32-bit words."""
        return sections(self, count, num_elements, dtype).length

    def message_bytes(self, count: int, num_elements: int, dtype: Any) -> int:
        """Returns the length of a message in bytes, as `Traffic.bytes_sent` declares it."""
        return 4 * self.message_words(count, num_elements, dtype)

    def is_plain(self, dtype: Any) -> bool:
        """True if indices travel as int32, and values in the accumulator's dtype."""
        return self.indices == "int32" and (
            dtype is None or self.values == "exact" or self.values == _dtype_name(dtype)
        )

    def value_codec(self, dtype: Any) -> ValueCodec:
        """Returns the codec that encodes values of the accumulator's dtype."""
        name = _dtype_name(dtype)
        if name not in ("float32", "float64"):
            raise ArgumentError("values", name, "float32 or float64, as accumulators have them")
        return VALUE_CODECS[name if self.values == "exact" else self.values]


class Sections(NamedTuple):
    """Positions, in words, of a message's header, indices, values and padding; and its codecs."""

    #: seventh word of the header: the codecs' codes, and 24 bits of n, so that ranks whose format or bucket
    #: differs find out before they decode. None where messages are plain and have six words.
    tag: int | None
    #: where the header ends and indices begin
    header: int
    #: where indices end and values begin
    indices: int
    #: where values end and padding begins
    values: int
    #: of the whole message
    length: int
    index_codec: IndexCodec
    #: None where only indices are sent
    value_codec: ValueCodec | None


def format_tag(code: int, num_elements: int) -> int:
    """Returns the header's tag: eight bits that name the encoding, and the low 24 bits of n."""
    word = code | (num_elements & 0xFFFFFF) << 8
    return word - 2**32 if word >= 2**31 else word


# asked for by every sender once, and by every receiver once for each rank's message
@functools.lru_cache(maxsize=1024)
def sections(format: WireFormat, count: int, num_elements: int, dtype: Any) -> Sections:
    index_codec = INDEX_CODECS[format.indices]
    value_codec = None if dtype is None else format.value_codec(dtype)

    def words(count: int) -> tuple[int, int]:
        of_values = 0 if value_codec is None else value_codec.num_words(count)
        return index_codec.num_words(count, num_elements), of_values

    tag, header = None, HEADER_WORDS
    if not format.is_plain(dtype):
        code = 1 + (0 if value_codec is None else value_codec.code) + 8 * index_codec.code
        tag, header = format_tag(code, num_elements), HEADER_WORDS + 1
    index_words, value_words = words(count)
    ends = (
        header + index_words,
        header + index_words + value_words,
        header + sum(words(max(count, format.capacity))),
    )
    return Sections(tag, header, *ends, index_codec, value_codec)


@functools.lru_cache(maxsize=32)
def _dtype_name(dtype: Any) -> str:
    """Returns a dtype's name, cached, since NumPy composes it in Python at every call."""
    return np.dtype(dtype).name


@dataclass(frozen=True)
class Notes:
    """The reports of all ranks about a step: NaN or Inf, residual norm, number of steps, `projection`.

    Attributes:
        first_nonfinite: rank -> position of its first NaN or Inf, for ranks that have one.
        norms: float64 [P], L2 norm of the residual that every rank began the step with, float32 on the way;
            None where the messages carried no notes.
        steps: int64 [P], synchronizations that every rank has done, modulo 2^24.
        projections: float64 [P], `FoldReport.projection` of every rank, float32 on the way.

    Example:
        >>> reports = [FoldReport(carried_square_norm=4.0, projection=-1.5), FoldReport(first_nonfinite=7)]
        >>> notes = Notes.of(np.stack([note_of(report) for report in reports]))
        >>> notes.first_nonfinite, notes.norms, notes.projections
        ({1: 7}, array([2., 0.]), array([-1.5,  0. ]))
    """

    first_nonfinite: dict[int, int] = field(default_factory=dict)
    norms: NDArray[np.float64] | None = None
    steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    projections: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, notes: NDArray[np.int32]) -> Notes:
        """Decodes notes, one row for every rank, as `note_of` encodes them."""
        notes = np.ascontiguousarray(notes)
        floats = notes.view(np.float32).astype(np.float64)
        marks = {rank: int(notes[rank, 0]) - 1 for rank in np.flatnonzero(notes[:, 0] > 0).tolist()}
        return cls(marks, floats[:, 1], notes[:, 2].astype(np.int64), floats[:, 3])


def note_of(report: FoldReport) -> NDArray[np.int32]:
    """Encodes a fold's report as four words: words 2 to 5 of a message's header."""
    words = np.array([report.first_nonfinite + 1, 0, report.step % _STEPS, 0], np.int32)
    norm, projection = math.sqrt(report.carried_square_norm), max(-_LARGEST, report.projection)
    words.view(np.float32)[1::2] = min(norm, _LARGEST), min(projection, _LARGEST)
    return words


def pack(
    indices: Indices, values: Values | None, report: FoldReport, format: WireFormat, num_elements: int
) -> NDArray[np.int32]:
    """Encodes a selection from a bucket of n elements as one new buffer.

    Example:
        >>> some = np.array([2, 5], np.int32), np.array([1.0, -2.0], np.float32)
        >>> unpack_sum(pack(*some, FoldReport(), WireFormat(), 9), 1, WireFormat(), 9, np.float32).values
        array([ 1., -2.], dtype=float32)
    """
    dtype, count = None if values is None else values.dtype, indices.size
    if values is not None and values.shape != indices.shape:
        raise ArgumentError("values", f"shape {values.shape}", f"as many values as indices, {indices.shape}")
    at = sections(format, count, num_elements, dtype)
    buffer = empty_message(at.length, count, report, at.tag)
    if at.tag is None:  # a plain message
        buffer[at.header : at.indices] = indices
        if values is not None:
            buffer[at.indices : at.values].view(values.dtype)[:] = values
    else:
        words = buffer.view(np.uint32)
        at.index_codec.encode(indices, num_elements, words[at.header : at.indices])
        if values is not None and at.value_codec is not None:
            at.value_codec.encode(np.ascontiguousarray(values), words[at.indices : at.values])
    buffer[at.values :] = 0
    return buffer


def empty_message(length: int, count: int, report: FoldReport, tag: int | None) -> NDArray[np.int32]:
    """Returns a message of `length` words in which only the header is written."""
    buffer = np.empty(length, np.int32)
    buffer[0], buffer[1] = length if tag is None else -length, count
    buffer[2:HEADER_WORDS] = note_of(report)
    if tag is not None:
        buffer[HEADER_WORDS] = tag
    return buffer


@dataclass
class SparseSum:
    """A sum over ranks as indices and values; values at equal indices still have to be added up.

    Attributes:
        indices: int32; an index may stand more than once.
        values: as long, float32 or float64; None where only indices were sent.
        counts: int64 [P], elements selected by each rank.
        notes: all ranks' `Notes`.
        facts: the algorithm's own telemetry (threshold, imbalance, ...).
    """

    #: whether the values are those of all elements, in their order (`WholeSum`)
    whole: ClassVar[bool] = False

    indices: Indices
    values: Any
    counts: NDArray[Any]
    notes: Notes = field(default_factory=Notes)
    facts: dict[str, float] = field(default_factory=dict)


def unpack_sum(
    buffer: NDArray[np.int32], size: int, format: WireFormat, num_elements: int, dtype: Any
) -> SparseSum:
    """Decodes all ranks' messages into one array of indices and one of values, not yet added up.

    Every index and every value is written once, to where the sum needs it.

    Example:
        >>> from horovod_sparse.arrays import FoldReport
        >>> gaps = WireFormat(indices="gaps")
        >>> one = pack(np.array([2, 5], np.int32), None, FoldReport(), gaps, 9)
        >>> unpack_sum(np.concatenate([one, one]), 2, gaps, 9, None).indices
        array([2, 5, 2, 5], dtype=int32)
    """
    if buffer.dtype != np.int32 or buffer.ndim != 1:
        raise MessageError(f"gathered messages must be a row of int32, not {buffer.dtype} {buffer.shape}")
    buffer = np.ascontiguousarray(buffer)
    heads = _read_headers(buffer, size, format, num_elements, dtype)
    words, total = buffer.view(np.uint32), sum(count for _, count, _, _ in heads)
    indices, values = np.empty(total, np.int32), None if dtype is None else np.empty(total, dtype)

    starts, begin = np.array([start for start, *_ in heads], np.int64), 0
    for rank, (start, count, _, at) in enumerate(heads):
        here = slice(begin, begin + count)
        body = words[start + at.header : start + at.indices]
        rest = words[start + at.indices : start + at.values]
        if at.tag is None:  # a plain message
            indices[here] = body.view(np.int32)
            sound = find_outside(indices[here], num_elements) < 0
            if values is not None:
                values[here] = rest.view(dtype)
        else:
            sound = at.index_codec.decode(body, num_elements, indices[here])
        if not sound:
            raise MessageError(
                f"the message of rank {rank} does not hold {count} "
                f"{'ascending ' if format.ascending else ''}indices within [0, {num_elements}): "
                "it was damaged, or the ranks do not have the same model"
            )
        if values is not None and at.tag is not None and at.value_codec is not None:
            at.value_codec.decode(rest, values[here])
        begin += count
    return SparseSum(
        indices=indices,
        values=values,
        counts=np.array([count for _, count, _, _ in heads], np.int64),
        notes=Notes.of(buffer[starts[:, None] + np.arange(2, HEADER_WORDS)]),
    )


def _read_headers(
    buffer: NDArray[np.int32], size: int, format: WireFormat, num_elements: int, dtype: Any
) -> list[tuple[int, int, int, Sections]]:
    """Returns each message's start, count, NaN mark and sections; raises if a header breaks the format."""
    tag, header = sections(format, 0, num_elements, dtype)[:2]
    heads, start = [], 0
    for rank in range(size):
        if start + header > buffer.size:
            raise MessageError(f"{buffer.size} words end before rank {rank}'s message: use one version")
        length, count, mark = buffer[start : start + 3].tolist()
        if (length > 0) != (tag is None) or (tag is not None and int(buffer[start + HEADER_WORDS]) != tag):
            raise MessageError(
                f"the message of rank {rank} is not a {format} of a bucket of {num_elements} elements; "
                "all ranks must use the same version, sparsifier, wire format, dtype and model"
            )
        length, at = abs(length), sections(format, max(count, 0), num_elements, dtype)
        if (
            count < 0
            or not 0 <= mark <= num_elements + 1  # that of a rank which refuses the step: see FoldReport
            or length > buffer.size - start
            or length != at.length
        ):
            raise MessageError(
                f"the message of rank {rank} claims {length} words and {count} elements, which no {format} "
                f"of a bucket of {num_elements} elements has: it was damaged, or versions differ"
            )
        heads.append((start, count, mark, at))
        start += length
    if start != buffer.size:
        raise MessageError(f"{buffer.size} words for {size} ranks, {start} are messages: use one version")
    return heads
