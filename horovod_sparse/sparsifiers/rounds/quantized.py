"""The round of quantizers: one allgather of every rank's elements, a few bits each, in one int32 buffer.

Layout, in 32-bit words: the first six are those of a selection's message (`horovod_sparse.wire.message`),
with the length negative and n for the count; then a tag, and what `Quantization` says::

    6  tag        code of the quantizer, and the low 24 bits of n
    7  units      of all groups, float32 or float64
    .  codes      for every 32 elements one word for each bit

All ranks' messages are of one length, which n and the quantizer alone decide.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays import Accumulator, FoldReport, Values
from horovod_sparse.collectives import AllGather, Synchronization
from horovod_sparse.errors import ArgumentError, MessageError
from horovod_sparse.kernels.quantization import Quantization, decode_sum
from horovod_sparse.sparsifiers.base import BucketInfo, Sparsifier, SparsifierState, Traffic, WholeSum
from horovod_sparse.wire import HEADER_WORDS, Notes
from horovod_sparse.wire.message import empty_message, format_tag

#: words in front of the units
HEADER = HEADER_WORDS + 1


def quantized_words(code: Quantization, num_elements: int, dtype: Any) -> int:
    return HEADER + code.num_words(num_elements, np.dtype(dtype))


def blank_message(code: Quantization, num_elements: int, dtype: Any, report: FoldReport) -> NDArray[np.int32]:
    """Returns a message whose header is written; the caller writes units and codes, from word `HEADER` on."""
    length = quantized_words(code, num_elements, dtype)
    return empty_message(length, num_elements, report, _format_word(code, num_elements))


def _format_word(code: Quantization, num_elements: int) -> int:
    # 128 to 255 is no selection's code; groups of another length are met by the message's
    return format_tag(0x80 | code.levels, num_elements)


def sum_quantized(
    buffer: NDArray[np.int32], size: int, code: Quantization, num_elements: int, dtype: Any
) -> tuple[Values, Notes]:
    """Decodes an allgathered buffer into the sum over ranks, and the ranks' notes."""
    words = np.ascontiguousarray(buffer)
    length = quantized_words(code, num_elements, dtype)
    if words.dtype != np.int32 or words.shape != (size * length,):
        raise MessageError(
            f"{words.size} words arrived, must be {size} messages of {length} words ({code}, a bucket of "
            f"{num_elements} elements): all ranks must use the same sparsifier, dtype and model"
        )
    messages = words.reshape(size, length)
    wanted = np.array([-length, num_elements, _format_word(code, num_elements)])
    wrong = (messages[:, [0, 1, HEADER_WORDS]] != wanted).any(1)
    wrong |= (messages[:, 2] < 0) | (messages[:, 2] > num_elements + 1)
    if wrong.any():
        raise MessageError(
            f"the message of rank {int(np.argmax(wrong))} is not encoded by {code} for a bucket of "
            f"{num_elements} elements: all ranks must use the same version, sparsifier, dtype and model"
        )
    values = np.empty(num_elements, dtype)
    units = decode_sum(messages[:, HEADER:], code, values)
    if not ((units >= 0) & np.isfinite(units)).all():
        raise MessageError(
            "a rank's message has a unit that is negative or not finite: it was damaged, or ranks have "
            "different models"
        )
    return values, Notes.of(messages[:, 2:HEADER_WORDS])


@dataclass(frozen=True, kw_only=True)
class Quantizer(Sparsifier):
    """Base of algorithms that send all elements in a few bits each; rounding errors stay in the residual."""

    density_scope: ClassVar[Literal["per rank", "global"]] = "global"
    has_density: ClassVar[bool] = False

    density: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        planes = self.quantization.code_bits  # which checks its arguments
        given = {"density": 1.0, "values": "exact", "indices": "int32", "schedule": None}
        for name, only in given.items():
            if getattr(self, name) != only:
                allowed = f"{only!r}: {self.name} sends every element, in {planes} bits"
                raise ArgumentError(name, getattr(self, name), allowed)

    @property
    @abc.abstractmethod
    def quantization(self) -> Quantization:
        """Returns the encoding: the number of levels and the length of groups."""

    def key(self, info: BucketInfo, step: int) -> int:
        """Returns the 64-bit seed of this rank's random rounding in a step; 0 without random rounding."""
        return 0

    def synchronize(
        self, accumulator: Accumulator, state: SparsifierState, info: BucketInfo
    ) -> Synchronization[tuple[WholeSum, SparsifierState]]:
        n, dtype, code = info.num_elements, info.value_dtype, self.quantization
        key = self.key(info, state.step)
        message = blank_message(code, n, dtype, accumulator.report)
        accumulator.quantize(code, key, message[HEADER:])
        gathered = yield AllGather(message)
        values, notes = sum_quantized(gathered, info.size, code, n, dtype)
        return WholeSum(values, np.full(info.size, n), notes), state

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        """Declares a header, the units of groups, and every element's bits, the same in every step."""
        words = quantized_words(self.quantization, info.num_elements, info.value_dtype)
        return (Traffic(AllGather, 4 * words),)
