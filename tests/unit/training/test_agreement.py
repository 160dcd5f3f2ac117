"""All ranks stand alike after a start of Horovod, or start their states anew together."""

import dataclasses
from types import SimpleNamespace

import pytest

from horovod_sparse._version import __version__
from horovod_sparse.errors import StateMismatchError
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.simulation import Recorder, run_lockstep
from horovod_sparse.training.agreement import PROTOCOL, RankStatus, agreed_status, compared, declaration
from horovod_sparse.training.host_topology import RANKS_VARIABLE, Ranks, own_place

FACTS = (ParameterFacts("weight", 8), ParameterFacts("bias", 2))
ONE, TWO = Plan((("weight", "bias"),)), Plan((("weight",), ("bias",)))


def statuses(size=3, **changed):
    """Ranks that stand alike, but for what is changed: by field, a value for each rank."""
    alike = [RankStatus(5, "a", (rank, size), ONE, FACTS) for rank in range(size)]
    for field, values in changed.items():
        alike = [dataclasses.replace(one, **{field: value}) for one, value in zip(alike, values, strict=True)]
    return alike


def started(ranks):
    """What all ranks agree upon, and the number of collectives that took."""
    recorder = Recorder()
    first, *others = run_lockstep([agreed_status(status) for status in ranks], recorder)
    assert others == [first] * len(others)
    return first, len(recorder.kinds)


def test_ranks_that_stand_alike_go_on() -> None:
    start, rounds = started(statuses())
    assert (start.anew, start.step, start.plan, start.reason, rounds) == (False, 5, ONE, "", 1)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"step": (5, 0, 5)}, "ranks [0, 2] have done 5 steps, ranks [1] 0"),
        ({"step": (0, 5, 4)}, "ranks [0] have done 0 steps, ranks [1] 5, ranks [2] 4"),
        ({"digest": ("a", "a", "b")}, "states differ"),
        ({"made_for": ((0, 2), (1, 2), (2, 3))}, "rank 0 of 3 was rank 0 of 2"),
        ({"made_for": ((0, 3), (2, 3), (1, 3))}, "rank 1 of 3 was rank 2 of 3"),
    ],
)
def test_any_difference_makes_all_start_anew_at_the_furthest_step(changed, reason) -> None:
    start, rounds = started(statuses(**changed, told=[{"bucket": rank} for rank in range(3)]))
    assert (start.anew, start.step, start.plan, start.reason, rounds) == (True, 5, ONE, reason, 2)
    assert start.told == {"bucket": changed.get("step", (5,)).index(5)}


@pytest.mark.parametrize(("steps", "plan"), [((5, 5, 5), ONE), ((0, 7, 7), TWO)])
def test_the_plan_is_that_of_the_first_rank_that_is_furthest(steps, plan) -> None:
    start, rounds = started(statuses(step=steps, plan=(ONE, TWO, ONE)))
    assert (start.anew, start.step, start.plan, rounds) == (True, max(steps), plan, 2)


def refused(coroutines):
    ends = run_lockstep(coroutines, keep_errors=True)
    assert all(isinstance(end, StateMismatchError) for end in ends)
    (text,) = {str(end) for end in ends}
    return text


def test_all_settings_that_differ_are_named_on_all_ranks() -> None:
    given = [{"op": "Average", "passes": "1"}, {"op": "Sum", "passes": "2"}, {"passes": "1"}]
    text = refused([compared(one, FACTS) for one in given])
    assert text.startswith(
        "op differs: ranks [0] have Average, ranks [1] Sum, ranks [2] not given; "
        "passes differs: ranks [0, 2] have 1, ranks [1] 2; "
    )


@pytest.mark.parametrize(
    ("bias", "told"),
    [
        (ParameterFacts("bias", 3), "bias is [2,"),
        (ParameterFacts("bias", 2, shape=(2, 1)), r"bias is [2, 'float32', 0, 0.0, []] here and [2"),
        (ParameterFacts("bias", 2, "bfloat16"), "bias is [2, 'float32'"),
        (ParameterFacts("offset", 2), "bias is [2, 'float32', 0, 0.0, []] here and missing there"),
    ],
)
def test_another_model_is_refused_on_all_ranks(bias, told) -> None:
    other = (FACTS[0], bias)
    assert told in refused([compared({}, FACTS), compared({}, FACTS), compared({}, other)])
    assert told in refused([agreed_status(one) for one in statuses(parameters=(FACTS, FACTS, other))])


def test_ranks_of_another_protocol_are_refused() -> None:
    """Of two checkouts the package's version may be the same, and what ranks send each other another."""
    version = f"{__version__} (protocol {PROTOCOL})"
    assert declaration("topk", "engine", op="Sum") == {
        "compression": "topk",
        "engine": "engine",
        "HOROVOD_SPARSE_TRANSPORT": "auto",
        "op": "Sum",
        "version": version,
    }


def horovod(counts: list[int], rank: int, where: str) -> SimpleNamespace:
    """What Horovod's binding says on a rank of hosts of so many ranks; a cross rank counts by local rank."""
    places = [(host, local) for host, count in enumerate(counts) for local in range(count)]
    host, local = places[rank]
    cross = [other for other, at in places if at == local].index(host)
    asked = {"is_homogeneous": lambda: len(set(counts)) == 1}
    told = {"local_rank": lambda: local, "cross_rank": lambda: cross, "rank": lambda: rank}
    told |= {"size": lambda: sum(counts), "local_size": lambda: counts[host]}
    if where == "binding":
        return SimpleNamespace(**told, **asked)
    return SimpleNamespace(**told, mpi_ops=SimpleNamespace(**asked))


def ranks_of(hvd: SimpleNamespace) -> Ranks:
    return Ranks.of_horovod(hvd, hvd)


@pytest.mark.parametrize("where", ["binding", "mpi_ops"])
def test_ranks_of_unequal_hosts_are_on_their_own(where: str, monkeypatch) -> None:
    """Rank 4, alone at its place on its host, was taken for one of the first host's."""
    monkeypatch.delenv(RANKS_VARIABLE, raising=False)
    found = []
    for rank, host in enumerate("aabbb"):
        monkeypatch.setenv("HOROVOD_HOSTNAME", host)
        found.append(own_place(ranks_of(horovod([2, 3], rank, where))))
    assert [place for _, place in found] == [0, 1, 0, 1, 2]
    assert len({name for name, _ in found[:2]}) == len({name for name, _ in found[2:]}) == 1
    assert found[0][0] != found[4][0]
    alike = [own_place(ranks_of(horovod([2, 2], rank, where))) for rank in range(4)]
    assert alike == [("host 0", 0), ("host 0", 1), ("host 1", 0), ("host 1", 1)]
