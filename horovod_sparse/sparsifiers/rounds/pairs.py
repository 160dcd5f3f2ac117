"""Messages between pairs of ranks: a sparse vector and notes behind it, and Bruck's all-gather of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from horovod_sparse.arrays import FoldReport
from horovod_sparse.collectives import Exchange, Synchronization, Words
from horovod_sparse.errors import MessageError
from horovod_sparse.sparsifiers.base import BucketInfo, SparseSum
from horovod_sparse.sparsifiers.rounds.sparse_vectors import SparseVector
from horovod_sparse.wire import Notes, WireFormat, note_of, pack, unpack_sum


def ceil_log2(number: int) -> int:
    """Returns the least m with 2**m >= number."""
    return (number - 1).bit_length()


#: see `wire.note`
_WORDS_PER_NOTE = 4


def mail_words(count: int, num_notes: int, info: BucketInfo, wire: WireFormat) -> int:
    """Returns the length, in 32-bit words, of a message of `count` elements and `num_notes` ranks' notes."""
    return wire.message_words(count, info.num_elements, info.value_dtype) + _WORDS_PER_NOTE * num_notes


class Mail:
    """Writes and reads the messages between pairs of ranks in one step: a sparse vector, then ranks' notes.

    Both sides can compute which ranks' notes a message carries, so notes contain no rank; receiving one twice
    changes nothing.
    """

    def __init__(self, report: FoldReport, info: BucketInfo, wire: WireFormat) -> None:
        self._info, self._wire = info, wire
        self._notes = np.zeros((info.size, _WORDS_PER_NOTE), np.int32)
        self._notes[info.rank] = note_of(report)

    def write(self, vector: SparseVector, ranks: Sequence[int] = ()) -> Words:
        """Returns a message that holds a vector (its values are rounded) and the notes of these ranks."""
        n = self._info.num_elements
        words = pack(vector.indices, vector.values, FoldReport(), self._wire, n)
        return np.concatenate([words, self._notes[list(ranks)].reshape(-1)])

    def read(self, words: Words, ranks: Sequence[int] = ()) -> SparseVector:
        """Returns a message's vector, and stores its notes, which are those of the given ranks."""
        end = words.size - _WORDS_PER_NOTE * len(ranks)
        if end < 0:
            raise MessageError(f"a message of {words.size} words is too short: use one version on all ranks")
        gathered = unpack_sum(words[:end], 1, self._wire, self._info.num_elements, self._info.value_dtype)
        self._notes[list(ranks)] = words[end:].reshape(-1, _WORDS_PER_NOTE)
        return SparseVector(gathered.indices, gathered.values)

    def sum_of(self, vector: SparseVector, num_selected: int) -> SparseSum:
        """Returns a step's final vector as a `SparseSum`, with the notes of all ranks read until then."""
        counts = np.full(len(self._notes), num_selected, np.int64)
        return SparseSum(vector.indices, vector.values, counts, Notes.of(self._notes))


def bruck_counts(num_members: int) -> list[int]:
    """Returns how many messages a member sends in each round of Bruck's all-gather."""
    return [min(1 << stage, num_members - (1 << stage)) for stage in range(ceil_log2(num_members))]


def bruck_all_gather(message: Words, members: Sequence[int], me: int) -> Synchronization[list[Words]]:
    """Returns every member's message to every member, in ``ceil(log2 m)`` rounds for any number m.

    In round t a member sends what it holds to the member 2**t before it. One word per message says its
    length. Source: Bruck et al., TPDS 1997.
    """
    m, messages = len(members), [message]
    for stage, num_sent in enumerate(bruck_counts(m)):
        distance = 1 << stage
        target, source = members[(me - distance) % m], members[(me + distance) % m]
        lengths = np.array([message.size for message in messages[:num_sent]], np.int32)
        arrived = yield Exchange({target: np.concatenate([lengths, *messages[:num_sent]])}, (source,))
        messages += _split_messages(arrived[source], num_sent)
    return [messages[(member - me) % m] for member in range(m)]


def _split_messages(words: Words, num_messages: int) -> list[Words]:
    lengths = words[:num_messages]
    if words.size < num_messages or (lengths < 0).any() or int(lengths.sum()) + num_messages != words.size:
        raise MessageError(
            f"{words.size} words arrived that are not {num_messages} messages; all ranks must use the same "
            "version, sparsifier and arguments"
        )
    return np.split(words[num_messages:], np.cumsum(lengths, dtype=np.int64)[:-1])
