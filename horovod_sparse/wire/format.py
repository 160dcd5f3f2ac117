"""How a selection is written: which values, which indices, rounded up to which length."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.arrays.protocol import Values
from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.wire.codecs import INDEX_CODECS, VALUE_CODECS, IndexCodec, ValueCodec

#: Length, count, health and norm; see `horovod_sparse.wire.message`.
HEADER_WORDS = 4


@dataclass(frozen=True)
class WireFormat:
    """How a selection is written into a message; the same on all ranks.

    Args:
        values: "exact" (or None; as the accumulator has them), "float64", "float32", "float16",
            "bfloat16", or "int8" (with a float32 scale per 64 values).
        indices: "int32" (any order), or for ascending ones "block16" or "gaps" (bit-packed).
        quantum: elements that the payload is rounded up to. A length that repeats from step to step
            stays in Horovod's response cache; a changed one costs an extra negotiation.

    Raises:
        UnknownNameError: no such way to write values or indices.
        ArgumentError: quantum is not a whole number from 1.

    Example:
        >>> WireFormat("float16", "gaps").message_bytes(25_600, 25_600_000, np.float32) / 25_600
        3.495...
    """

    values: str | None = "exact"
    indices: str = "int32"
    quantum: int = 1

    def __post_init__(self) -> None:
        if self.values is None:
            object.__setattr__(self, "values", "exact")
        if self.values not in ("exact", *VALUE_CODECS):
            raise UnknownNameError("way to write values", str(self.values), ["exact", *VALUE_CODECS])
        if self.indices not in INDEX_CODECS:
            raise UnknownNameError("way to write indices", str(self.indices), INDEX_CODECS)
        check_count("quantum", self.quantum, "a whole number of elements, 1 or more")

    @property
    def exact(self) -> bool:
        """Whether no value is ever changed, whatever dtype the accumulator has."""
        return self.values in ("exact", "float64")

    @property
    def ascending(self) -> bool:
        """Whether indices must be ascending."""
        return self.indices != "int32"

    def round(self, values: Values) -> Values:
        """What the receivers will see; the difference belongs back into the residual.

        Args:
            values: float32 or float64 [count]. What is not finite comes out finite, unless `exact`.

        Returns:
            The same dtype, bit for bit what every rank decodes; the argument itself where nothing
            changes. For float32, values - round(values) is exact, unless a value saturated.

        Example:
            >>> WireFormat("float16").round(np.array([0.1, 1e6], np.float32))
            array([9.9975586e-02, 6.5504000e+04], dtype=float32)
        """
        codec = self.value_codec(values.dtype)
        if codec is None or self.exact or self.values == _name_of(values.dtype):
            return values
        words = np.empty(codec.num_words(values.size), np.uint32)
        codec.encode(np.ascontiguousarray(values), words)
        rounded = np.empty(values.shape, values.dtype)
        codec.decode(words, rounded)
        return rounded

    def message_words(self, count: int, num_elements: int, dtype: Any) -> int:
        """Length of a message, header and padding included, in 32-bit words; exact.

        Args:
            count: selected elements.
            num_elements: n of the bucket.
            dtype: of the accumulator, or None where only indices are sent.

        Example:
            >>> WireFormat().message_words(3, 100, np.float32), WireFormat().message_words(3, 100, None)
            (10, 7)
        """
        padded = -(-count // self.quantum) * self.quantum
        codec = self.value_codec(dtype)
        payload = self.index_codec.num_words(padded, num_elements)
        return self.header_words(dtype) + payload + (0 if codec is None else codec.num_words(padded))

    def message_bytes(self, count: int, num_elements: int, dtype: Any) -> int:
        """Length of a message in bytes; what `Traffic.bytes_sent` declares."""
        return 4 * self.message_words(count, num_elements, dtype)

    def header_words(self, dtype: Any) -> int:
        """Four, and a fifth that names the format unless messages are plain."""
        return HEADER_WORDS + (not self.is_plain(dtype))

    def is_plain(self, dtype: Any) -> bool:
        """Whether indices are int32 and values stand there as the accumulator has them."""
        return self.indices == "int32" and (
            dtype is None or self.values == "exact" or self.values == _name_of(dtype)
        )

    @property
    def index_codec(self) -> IndexCodec:
        """What writes the indices."""
        return INDEX_CODECS[self.indices]

    def value_codec(self, dtype: Any) -> ValueCodec | None:
        """What writes values of an accumulator's dtype; None for None.

        Raises:
            ArgumentError: the dtype is neither float32 nor float64.
        """
        if dtype is None:
            return None
        name = _name_of(dtype)
        if name not in ("float32", "float64"):
            raise ArgumentError("values", name, "float32 or float64, as accumulators have them")
        return VALUE_CODECS[name if self.values in (None, "exact") else self.values]

    def tag(self, num_elements: int, dtype: Any) -> int:
        """The fifth header word, as int32: the codecs' codes, and 24 bits of n.

        Ranks whose format or bucket differs find out before they decode.
        """
        codec = self.value_codec(dtype)
        code = 1 + (0 if codec is None else codec.code) + 8 * self.index_codec.code
        word = code | (num_elements & 0xFFFFFF) << 8
        return word - 2**32 if word >= 2**31 else word


@functools.lru_cache(maxsize=32)
def _name_of(dtype: Any) -> str:
    """The name of a dtype. NumPy puts it together in Python anew whenever it is asked."""
    return np.dtype(dtype).name
