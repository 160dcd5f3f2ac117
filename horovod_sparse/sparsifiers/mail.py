"""Messages between two ranks: a sparse vector, and notes behind it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays.protocol import FoldReport, Values
from horovod_sparse.errors import MessageError
from horovod_sparse.sparsifiers.base import BucketInfo
from horovod_sparse.sparsifiers.notes import WORDS_PER_NOTE, Notes
from horovod_sparse.sparsifiers.sparse_vectors import SparseVector
from horovod_sparse.wire import WireFormat, pack, unpack_sum

__all__ = ["Mail", "ceil_log2", "mail_words", "rounded"]


def ceil_log2(number: int) -> int:
    """The least m with 2**m >= number.

    Example:
        >>> [ceil_log2(number) for number in (1, 2, 3, 4, 5)]
        [0, 1, 2, 2, 3]
    """
    return (number - 1).bit_length()


def mail_words(count: int, num_notes: int, info: BucketInfo, wire: WireFormat) -> int:
    """Length of a message in 32-bit words.

    Args:
        count: elements.
        num_notes: ranks whose notes are in it.
        info: the facts of the bucket.
        wire: how elements are written.
    """
    return wire.message_words(count, info.num_elements, info.value_dtype) + WORDS_PER_NOTE * num_notes


class Mail:
    """Writes and reads the messages of one rank in one step.

    Args:
        report: of this rank's fold, for its note.
        info: the facts of the bucket.
        wire: how elements are written.
    """

    def __init__(self, report: FoldReport, info: BucketInfo, wire: WireFormat) -> None:
        self.notes = Notes(report, info.rank, info.size)
        self._info, self._wire = info, wire

    def write(self, vector: SparseVector, ranks: Sequence[int] = ()) -> NDArray[np.int32]:
        """One message: the vector, whose values must have been rounded, and the notes of some ranks."""
        n = self._info.num_elements
        words = pack(vector.indices, vector.values, FoldReport(), format=self._wire, num_elements=n)
        return np.concatenate([words, self.notes.write(ranks)]) if ranks else words

    def read(self, words: NDArray[np.int32], ranks: Sequence[int] = ()) -> SparseVector:
        """The vector of a message; takes in its notes, which are those of the same ranks.

        Raises:
            MessageError: it is not such a message.
        """
        end = words.size - WORDS_PER_NOTE * len(ranks)
        if end < 0:
            raise MessageError(f"a message of {words.size} words cannot hold the notes of {len(ranks)} ranks")
        gathered = unpack_sum(words[:end], 1, self._wire, self._info.num_elements, self._info.value_dtype)
        self.notes.read(words[end:], ranks)
        if gathered.values is None:
            raise MessageError("a message without values")
        return SparseVector(gathered.indices, gathered.values)


def rounded(vector: SparseVector, wire: WireFormat) -> tuple[SparseVector, Values | None]:
    """A vector as receivers will see it, and what that takes away (None: nothing)."""
    values = wire.round(vector.values)
    if values is vector.values:
        return vector, None
    return SparseVector(vector.indices, values), vector.values - values
