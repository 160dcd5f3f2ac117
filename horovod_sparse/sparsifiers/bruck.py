"""Bruck's all-gather among some ranks, of messages of any length, as exchanges between pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.collectives import Exchange, Synchronization
from horovod_sparse.errors import MessageError
from horovod_sparse.sparsifiers.mail import ceil_log2

__all__ = ["bruck_all_gather", "bruck_bags"]

Words = NDArray[np.int32]


def bruck_bags(num_members: int) -> list[int]:
    """How many messages a member sends in each round: all it holds, or what the other still lacks.

    Example:
        >>> bruck_bags(6)
        [1, 2, 2]
    """
    return [min(1 << stage, num_members - (1 << stage)) for stage in range(ceil_log2(num_members))]


def bruck_all_gather(message: Words, members: Sequence[int], me: int) -> Synchronization[list[Words]]:
    """Every member's message, for every member, in ``ceil(log2 m)`` rounds for any number m.

    In round t a member sends what it holds to the member 2**t before it, and receives from the member
    2**t behind it. One word per message says how long it is.

    Args:
        message: of this member.
        members: their ranks.
        me: which of them this rank is.

    Returns:
        The messages in the order of the members.

    Source: Bruck et al., TPDS 1997.
    """
    m, held = len(members), [message]
    for stage, num_sent in enumerate(bruck_bags(m)):
        distance = 1 << stage
        target, source = members[(me - distance) % m], members[(me + distance) % m]
        arrived = yield Exchange({target: _framed(held[:num_sent])}, (source,))
        held += _unframed(arrived[source], num_sent)
    return [held[(member - me) % m] for member in range(m)]


def _framed(messages: Sequence[Words]) -> Words:
    lengths = np.array([message.size for message in messages], np.int32)
    return np.concatenate([lengths, *messages])


def _unframed(words: Words, num_messages: int) -> list[Words]:
    lengths = words[:num_messages]
    if words.size < num_messages or (lengths < 0).any() or int(lengths.sum()) + num_messages != words.size:
        raise MessageError(
            f"{words.size} words arrived that are not {num_messages} messages; all ranks must use the same "
            "version, sparsifier and arguments"
        )
    return np.split(words[num_messages:], np.cumsum(lengths, dtype=np.int64)[:-1])
