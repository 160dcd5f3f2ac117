"""Medians over repetitions of what ranks measured, and bytes on the wire."""

import pytest

from benchmarks.common.samples import summarize, timed
from benchmarks.common.wire import Round, counters, wire_bytes
from horovod_sparse.cost import AlphaBeta


def _sample(started, ended, **changes):
    numbers = {"cpu": 0.5, "own": 0.25, "sent": 100, "received": 100, "interval": 1.0}
    return {
        **numbers,
        "started": started,
        "ended": ended,
        "parts": {"fold": 0.1},
        "facts": {},
        **changes,
    }


def test_a_repetition_lasts_from_the_first_start_to_the_last_end():
    ranks = [[_sample(10.0, 11.0)], [_sample(10.5, 12.0)]]
    found = summarize(ranks)
    assert found["seconds"]["median"] == 2.0
    assert found["slowest_seconds"]["median"] == 1.5


def test_medians_are_over_repetitions_of_means_over_ranks():
    first = [_sample(0.0, 1.0, sent=100), _sample(0.0, 1.0, sent=1000), _sample(0.0, 1.0, sent=10)]
    second = [_sample(0.0, 3.0, sent=300), _sample(0.0, 1.0, sent=3000), _sample(0.0, 2.0, sent=30)]
    found = summarize([first, second])
    assert found["bytes_sent"] == 200
    assert found["seconds"] == {"median": 2.0, "low": 1.5, "high": 2.5}
    assert found["repetitions"] == 3
    # ranks had 2.0, 1.0 and 1.5 seconds on average, and 0.1 of them folded
    assert found["parts"]["other"] == pytest.approx(1.4)


def test_only_what_lies_between_the_barriers_is_timed():
    order = []
    sample = timed(lambda: order.append("run"), lambda: order.append("barrier"))
    assert order == ["barrier", "run", "barrier"]
    assert sample.started <= sample.ended
    assert sample.interval >= sample.ended - sample.started


@pytest.mark.parametrize("size", [2, 4, 8])
def test_bytes_sent_by_all_are_bytes_received_by_all(size):
    messages = [100 * (rank + 1) for rank in range(size)]
    received = [AlphaBeta.allgather(messages, rank).bytes_received for rank in range(size)]
    mean = [Round("AllGather", round(sum(messages) / size))]
    assert wire_bytes(mean, size) == pytest.approx(sum(received) / size, abs=size)
    assert wire_bytes([Round("AllReduce", 800)], size) == AlphaBeta.allreduce(800, size).bytes_received
    assert wire_bytes([Round("AllToAll", 700), Round("Exchange", 50)], size) == 750


def test_the_loopback_does_not_count():
    table = "\n\n lo: 1000 1 0 0 0 0 0 0 1000 1\neth0: 20 1 0 0 0 0 0 0 3 1\neth1: 7 1 0 0 0 0 0 0 5 1\n"
    found = counters(table)
    assert (found.sent, found.received) == (8, 27)
