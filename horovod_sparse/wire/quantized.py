"""All elements of a rank, a few bits each, as one int32 buffer.

Layout, in 32-bit words: the first four are those of a selection's message (`horovod_sparse.wire.message`),
with the length negative and n for the count; then a tag, and what `Quantization` says::

    4  tag        code of the quantizer, and the low 24 bits of n
    5  units      of all groups, float32 or float64
    .  codes      for every 32 elements one word for each bit

All ranks' messages are of one length, which n and the quantizer alone decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays import FoldReport, Values
from horovod_sparse.errors import MessageError
from horovod_sparse.kernels.host.quantize import decode_sum
from horovod_sparse.kernels.quantization import NORMS, WORD, Quantization
from horovod_sparse.wire.format import HEADER_WORDS, tagged
from horovod_sparse.wire.message import begun, decoded_once

#: words in front of the units
HEADER = HEADER_WORDS + 1


def quantized_words(code: Quantization, num_elements: int, dtype: Any) -> int:
    return HEADER + code.num_words(num_elements, np.dtype(dtype))


def blank(code: Quantization, num_elements: int, dtype: Any, report: FoldReport) -> NDArray[np.int32]:
    """A message whose units and codes are still to be written, from word `HEADER` on."""
    length = quantized_words(code, num_elements, dtype)
    return begun(length, num_elements, report, _tag(code, num_elements))


def _tag(code: Quantization, num_elements: int) -> int:
    # 128 to 255 is no selection's code; groups of another length are met by the message's
    return tagged(0x80 | (code.levels * len(NORMS) + NORMS.index(code.norm)) % 0x80, num_elements)


@dataclass(frozen=True)
class QuantizedSum:
    """What an allgather of such messages brought: as `Gathered`, and units and codes of every rank."""

    values: Values
    words: NDArray[np.int32]
    first_nonfinite: dict[int, int]
    norms: NDArray[np.float64]


def sum_quantized(
    buffer: NDArray[np.int32], size: int, code: Quantization, num_elements: int, dtype: Any, *, votes: bool
) -> QuantizedSum:
    """Decodes an allgathered buffer into the sum over ranks, in their order."""
    asked = "quantized", size, code, num_elements, np.dtype(dtype), votes
    return decoded_once(buffer, asked, lambda words: _sum(words, size, code, num_elements, dtype, votes))


def _sum(
    buffer: NDArray[np.int32], size: int, code: Quantization, num_elements: int, dtype: Any, votes: bool
) -> QuantizedSum:
    words = np.ascontiguousarray(buffer)
    length = quantized_words(code, num_elements, dtype)
    if words.dtype != np.int32 or words.shape != (size * length,):
        raise MessageError(
            f"{words.size} words arrived, {size} messages of {length} words are those of {code} and a bucket "
            f"of {num_elements} elements; all ranks must use the same sparsifier, dtype and model"
        )
    messages = words.reshape(size, length)
    wanted = np.array([-length, num_elements, _tag(code, num_elements)])
    wrong = (messages[:, [0, 1, HEADER_WORDS]] != wanted).any(1)
    wrong |= (messages[:, 2] < 0) | (messages[:, 2] > num_elements + 1)
    if wrong.any():
        raise MessageError(
            f"the message of rank {int(np.argmax(wrong))} is not one of {code} and a bucket of "
            f"{num_elements} elements; all ranks must use the same version, sparsifier, dtype and model"
        )
    values = np.empty(num_elements, dtype)
    bodies = messages[:, HEADER:]
    if votes:
        bodies, code = majority(bodies, code, num_elements, values.dtype), voted(code)
        decode_sum(bodies.reshape(-1), 1, 0, code, values)
        units = bodies[:, : code.unit_words(num_elements, values.dtype)].reshape(-1).view(values.dtype)
        values *= values.dtype.type(size)
    else:
        units = decode_sum(words, size, HEADER, code, values)
    if not ((units >= 0) & np.isfinite(units)).all():
        raise MessageError(
            "a unit of some rank's message is below 0 or no number: it was damaged, or the ranks do not have "
            "the same model"
        )
    marks = messages[:, 2]
    return QuantizedSum(
        values=values,
        words=bodies,
        first_nonfinite={rank: int(marks[rank]) - 1 for rank in np.flatnonzero(marks).tolist()},
        norms=np.ascontiguousarray(messages[:, 3]).view(np.float32).astype(np.float64),
    )


#: words that are counted at once, in cache
_CHUNK = 8192


def voted(code: Quantization) -> Quantization:
    """How the signs of a majority are written, of which a tie is 0: one level, in the ranks' groups."""
    return Quantization(levels=1, group=code.group)


def majority(
    bodies: NDArray[np.int32], code: Quantization, num_elements: int, dtype: np.dtype[Any]
) -> NDArray[np.int32]:
    """The sign that most ranks have for each element, times the mean of the ranks' units; 0 in a tie."""
    size, at = bodies.shape[0], code.unit_words(num_elements, dtype)
    written = voted(code)
    found = np.empty(written.num_words(num_elements, dtype), np.int32)
    units = np.ascontiguousarray(bodies[:, :at]).view(dtype).reshape(size, -1)
    found[:at] = (units / size).sum(0, dtype=dtype).view(np.int32)
    codes, signs = found[at:].view(np.uint32).reshape(-1, written.planes), bodies[:, at:].view(np.uint32)
    for start in range(0, signs.shape[1], _CHUNK):
        ours = np.ascontiguousarray(signs[:, start : start + _CHUNK]).view(np.uint8)
        below = sum(np.unpackbits(one, bitorder="little").astype(np.int32) for one in ours)
        for plane, chosen in enumerate((2 * below > size, 2 * below != size)):
            words = np.packbits(chosen, bitorder="little").view(np.uint32)
            codes[start : start + _CHUNK, plane] = words
    filled = -num_elements % WORD
    if filled:
        codes[-1] &= np.uint32(0xFFFFFFFF) >> np.uint32(filled)
    return found.reshape(1, -1)
