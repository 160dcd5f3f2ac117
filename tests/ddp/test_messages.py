"""Requests carried out through torch.distributed: messages of any length, in any order of lengths."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_sparse.collectives import AllGather, AllReduce, AllToAll, Broadcast, Exchange
from horovod_sparse.ddp.collectives import Carrier

#: words, step after step: below and above what the other end expects, and nothing
LENGTHS = [0, 1, 1023, 1024, 1025, 5000, 7500, 7501, 3, 0, 200_000, 900, 900, 150_000, 400_000, 1]


def words(sender: int, receiver: int, step: int) -> np.ndarray:
    """What one rank says to another: of another length for each."""
    length = LENGTHS[(step + 3 * sender + 5 * receiver) % len(LENGTHS)]
    return np.random.default_rng([sender, receiver, step]).integers(-(2**31), 2**31, length).astype(np.int32)


@pytest.fixture(name="carrier", scope="module")
def _carrier() -> Carrier:
    return Carrier(None)


@pytest.mark.controllers
def test_everyone_gets_every_message(carrier, rank, size):
    for step in range(len(LENGTHS)):
        own = words(rank, 0, step)
        own.flags.writeable = False
        found = carrier(AllGather(own))
        np.testing.assert_array_equal(found, np.concatenate([words(r, 0, step) for r in range(size)]))


@pytest.mark.controllers
def test_messages_between_pairs(carrier, rank, size):
    for step in range(2 * len(LENGTHS)):
        to, source = (rank + 1 + step) % size, (rank - 1 - step) % size
        found = carrier(Exchange({to: words(rank, to, step)}, (source,)))
        assert list(found) == [source]
        np.testing.assert_array_equal(found[source], words(source, rank, step))
        own = tuple(words(rank, r, step) for r in range(size))
        for r, message in enumerate(carrier(AllToAll(own))):
            np.testing.assert_array_equal(message, words(r, rank, step))


@pytest.mark.controllers
def test_sums_and_broadcasts_beside_them(carrier, rank, size):
    for step in range(3):
        total = carrier(AllReduce(np.full(5, rank + step, np.float64)))
        assert total.tolist() == [sum(r + step for r in range(size))] * 5
        found = carrier(Broadcast(np.full(3, rank, np.int32), size - 1))
        assert found.tolist() == [size - 1] * 3
        carrier(AllGather(words(rank, 1, step)))


@pytest.mark.controllers
def test_pairs_may_have_had_other_numbers_of_messages(carrier, rank, size):
    """As where hosts have different numbers of ranks."""
    for step in range(5):
        if rank < 2:
            found = carrier(Exchange({1 - rank: words(rank, 1 - rank, step)}, (1 - rank,)))
            np.testing.assert_array_equal(found[1 - rank], words(1 - rank, rank, step))
    found = carrier(AllGather(words(rank, 0, 6)))
    np.testing.assert_array_equal(found, np.concatenate([words(r, 0, 6) for r in range(size)]))
