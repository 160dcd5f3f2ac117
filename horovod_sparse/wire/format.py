"""Defines how a selection is written: which values, which indices, rounded up to which length."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays import Values
from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.wire.codecs import INDEX_CODECS, VALUE_CODECS, IndexCodec, ValueCodec

#: Length, count, and a note; see `horovod_sparse.wire.message`.
HEADER_WORDS = 6


@dataclass(frozen=True)
class WireFormat:
    """How a selection is written into a message; the same on all ranks.

    Args:
        values: "exact" (as the accumulator has them), "float64", "float32", "float16",
            "bfloat16", or "2bit" (with two magnitudes per 64 values).
        indices: "int32" (any order), or for ascending ones "gaps" (bit-packed).
        quantum: elements that the payload is rounded up to. A length that repeats from step to step
            stays in Horovod's response cache; a changed one costs an extra negotiation.
        capacity: elements that the payload has room for at least, whatever is in it.

    Example:
        >>> WireFormat("float16", "gaps").message_bytes(25_600, 25_600_000, np.float32) / 25_600
        3.495...
    """

    values: str = "exact"
    indices: str = "int32"
    quantum: int = 1
    capacity: int = 0

    def __post_init__(self) -> None:
        if self.values not in ("exact", *VALUE_CODECS):
            raise UnknownNameError("way to write values", str(self.values), ["exact", *VALUE_CODECS])
        if self.indices not in INDEX_CODECS:
            raise UnknownNameError("way to write indices", str(self.indices), INDEX_CODECS)
        check_count("quantum", self.quantum, "a whole number of elements, 1 or more")
        check_count("capacity", self.capacity, "a whole number of elements, 0 or more", low=0)

    @functools.cached_property
    def exact(self) -> bool:
        """Whether no value is ever changed, whatever dtype the accumulator has."""
        return self.values in ("exact", "float64")

    @property
    def ascending(self) -> bool:
        """Whether indices must be ascending."""
        return self.indices != "int32"

    def padded(self, count: int) -> int:
        """Returns the number of elements that a payload of `count` has room for.

        Example:
            >>> WireFormat(quantum=8, capacity=20).padded(3), WireFormat(quantum=8, capacity=20).padded(30)
            (24, 32)
        """
        return -(-max(count, self.capacity) // self.quantum) * self.quantum

    def round(self, values: Values) -> Values:
        """Returns the values that receivers will see; the difference belongs back into the residual.

        Example:
            >>> WireFormat("float16").round(np.array([0.1, 1e6], np.float32))
            array([9.9975586e-02, 6.5504000e+04], dtype=float32)
        """
        if self.exact or self.values == _name_of(values.dtype):
            return values
        return self.decode_values(self.encode_values(values), values.size, values.dtype)

    def num_value_words(self, count: int, dtype: Any) -> int:
        """Returns the length of the values alone, in 32-bit words."""
        return self.value_codec(dtype).num_words(count)

    def encode_values(self, values: Values) -> NDArray[np.int32]:
        """Writes values alone as words, for rounds whose indices all ranks know."""
        words = np.empty(self.num_value_words(values.size, values.dtype), np.uint32)
        self.value_codec(values.dtype).encode(np.ascontiguousarray(values), words)
        return words.view(np.int32)

    def decode_values(self, words: NDArray[np.int32], count: int, dtype: Any) -> Values:
        """Reads words that `encode_values` has written."""
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
        """Whether indices are int32 and values stand there as the accumulator has them."""
        return self.indices == "int32" and (
            dtype is None or self.values == "exact" or self.values == _name_of(dtype)
        )

    def value_codec(self, dtype: Any) -> ValueCodec:
        """Returns the codec for values of an accumulator's dtype."""
        name = _name_of(dtype)
        if name not in ("float32", "float64"):
            raise ArgumentError("values", name, "float32 or float64, as accumulators have them")
        return VALUE_CODECS[name if self.values == "exact" else self.values]


class Sections(NamedTuple):
    """Borders of a message of some number of elements, in words."""

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
    """Returns an int32 of eight bits that say how a payload is written, and the low 24 of n."""
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
    ends = header + index_words, header + index_words + value_words, header + sum(words(format.padded(count)))
    return Sections(tag, header, *ends, index_codec, value_codec)


@functools.lru_cache(maxsize=32)
def _name_of(dtype: Any) -> str:
    """Returns a dtype's name, which NumPy puts together in Python at every call."""
    return np.dtype(dtype).name
