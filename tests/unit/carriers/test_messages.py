"""Messages between pairs: what is delivered, what is refused, and which way is taken."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from horovod_sparse.carriers import pairs
from horovod_sparse.carriers.exchanges import Rounds, by_exchanges, over_hosts, rounds_over_hosts
from horovod_sparse.carriers.pairs import Pairs, agreed_transport, check_transport, usable_mpi
from horovod_sparse.collectives import Exchange, ReduceScatter
from horovod_sparse.errors import CollectiveMismatchError, UnsupportedError
from horovod_sparse.simulation import Recorder, SimulatedCluster, run_lockstep
from horovod_sparse.topology import Topology
from support.cases import CASES, case_id
from support.sampling import rows_by


class Mailboxes(Pairs):
    """Ranks of one process; what is sent lies in the receiver's box until it looks."""

    def __init__(self, ranks: list[Mailboxes]) -> None:
        super().__init__()
        self._ranks, self._rank, self._box = ranks, len(ranks), []
        ranks.append(self)

    def _send(self, peer, header, message):
        self._ranks[peer]._box.append((self._rank, header.copy(), message.copy()))
        return ()

    def progress(self):
        for source, header, message in self._box:
            self._inbox[self._key_in(header)][source] = message
        self._box.clear()

    def is_known(self):
        return True


def connected(size: int) -> list[Mailboxes]:
    ranks: list[Mailboxes] = []
    for _ in range(size):
        Mailboxes(ranks)
    return ranks


def words(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def everyone_says(ranks: list[Mailboxes], name: str, message: Callable[[int], np.ndarray]) -> list[Any]:
    """An exchange of all with all, under way."""
    others = [tuple(peer for peer in range(len(ranks)) if peer != rank) for rank in range(len(ranks))]
    return [
        one.start(Exchange(dict.fromkeys(others[rank], message(rank)), others[rank]), name, rank)
        for rank, one in enumerate(ranks)
    ]


def test_all_with_all_in_any_order():
    """Empty messages, large ones, of odd lengths; exchanges are taken in another order than they began in."""
    ranks = connected(3)
    sizes = [0, 1, 7, 300_001]
    begun = [
        everyone_says(ranks, f"x{size}", lambda rank, n=size: np.full(n, rank, np.int32)) for size in sizes
    ]
    for size, handles in reversed(list(zip(sizes, begun, strict=True))):
        for rank, handle in enumerate(handles):
            answer = handle.result()
            assert sorted(answer) == [peer for peer in range(3) if peer != rank]
            for peer, message in answer.items():
                assert message.dtype == np.int32 and message.flags.aligned and message.flags.writeable
                assert message.size == size and (message == peer).all()


def test_an_unawaited_message_is_an_error():
    ranks = connected(2)
    ranks[0].start(Exchange({1: words(1)}, ()), "x", 0)
    deaf = ranks[1].start(Exchange({}, ()), "x", 1)
    with pytest.raises(CollectiveMismatchError, match="sent to it too"):
        deaf.result()


class Gloo:
    """As much of Horovod's binding as is asked."""

    def is_initialized(self) -> bool:
        return True

    def mpi_enabled(self) -> bool:
        return False


def test_nothing_is_used_beside_gloo_unasked_and_pairs_are_refused(monkeypatch):
    reasons = {"auto": "Horovod does not run on MPI", "alltoall": "HOROVOD_SPARSE_TRANSPORT says so"}
    for asked, reason in reasons.items():
        monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", asked)
        assert usable_mpi(Gloo()) == (None, reason)
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", "pairs")
    for asks in (check_transport, usable_mpi):
        with pytest.raises(UnsupportedError, match=r"HOROVOD_SPARSE_TRANSPORT=pairs needs .* --mpi"):
            asks(Gloo())


def test_lengths_that_differ_are_an_error_of_result_alone():
    """NumPy would add one element to each of two; and hooks of a backward pass ask `done`."""
    ranks, lengths = connected(2), (2, 4)
    rounds = [
        Rounds(
            partial(one.start, rank=rank), by_exchanges(ReduceScatter(np.ones(lengths[rank])), rank, 2), "x"
        )
        for rank, one in enumerate(ranks)
    ]
    for one, sizes in zip(rounds, ((16, 8), (8, 16)), strict=True):
        until = time.monotonic() + 5.0
        while not one.done() and time.monotonic() < until:
            time.sleep(0.001)
        assert one.done()
        with pytest.raises(CollectiveMismatchError, match=rf"sent {sizes[0]} bytes .* has {sizes[1]}"):
            one.result()


def test_what_fails_below_is_an_error_of_result_alone(monkeypatch):
    ranks = connected(2)
    handle = ranks[0].start(Exchange({}, (1,)), "x", 0)
    monkeypatch.setattr(ranks[0], "progress", lambda: os.stat("no way"))
    assert handle.done()
    with pytest.raises(OSError):
        handle.result()


#: the last one's ranks are spread over hosts
TOPOLOGIES = [
    Topology.regular(2, 2),
    Topology.regular(3, 2),
    Topology.regular(1, 2),
    Topology.regular(2, 1),
    Topology(((0, 2), (1, 3))),
]


@rows_by("case,topology", CASES, TOPOLOGIES, ids=case_id)
def test_sums_and_residuals_are_those_of_levels(case, topology):
    size, n = topology.size, 101
    levels, pairs = (SimulatedCluster(case.at(0.2), n, size, topology=topology) for _ in range(2))
    generator = np.random.default_rng(0)
    for _ in range(3):
        drawn = (generator.integers(-96, 97, (size, n)) / 32).astype(np.float32)
        expected = levels.synchronize([one.copy() for one in drawn], 0.5)
        recorder = Recorder()
        steps = [
            over_hosts(bucket.step(one.copy(), 0.5), topology, rank)
            for rank, (bucket, one) in enumerate(zip(pairs.buckets, drawn, strict=True))
        ]
        found = run_lockstep(steps, recorder)
        for one, other in zip(expected, found, strict=True):
            assert np.array_equal(levels.dense(one), levels.dense(other))
        sparsifier = pairs.buckets[0].recipe.sparsifier
        rounds = sparsifier.rounds(topology.num_hosts)
        assert tuple(recorder.kinds) == rounds_over_hosts(rounds, topology)
        assert set(recorder.kinds) <= {Exchange}
    for one, other in zip(levels.residuals(), pairs.residuals(), strict=True):
        assert np.array_equal(one, other)


class Ranks:
    """A process set as seen by one of its ranks."""

    process_set_id, ranks = 0, (0, 1, 2)

    def __init__(self, rank: int) -> None:
        self.rank = lambda: rank


@pytest.mark.parametrize("where", ["able", "connected"])
def test_what_one_rank_cannot_no_rank_does(monkeypatch, where):
    """The agreement of three ranks, of which the last has no MPI, or cannot make a communicator."""
    made, able = ([(kind, "")] * 3 for kind in ("pairs", "mpi"))
    why = "no mpi4py" if where == "able" else "OSError: no"
    (able if where == "able" else made)[2] = (None, why)
    made, able = iter(made), iter(able)
    monkeypatch.setattr(pairs, "usable_mpi", lambda hvd: next(able))
    monkeypatch.setattr(pairs, "_connected", lambda mpi, ranks, number: next(made))

    def worked(rank):
        steps, answer = agreed_transport(None, Ranks(rank), 0), None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = request.work() if isinstance(request, pairs.Blocking) else (yield request)

    chosen = run_lockstep([worked(rank) for rank in range(3)])
    told = [f"Horovod's all-to-all (rank 2: {why})"] * 2 + [f"Horovod's all-to-all ({why})"]
    assert [(one.pairs, one.words) for one in chosen] == [(None, words) for words in told]
