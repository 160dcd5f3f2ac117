"""Which host a rank is on, as Horovod tells it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from horovod_sparse.frontend.levels import RANKS_VARIABLE, own_place


def horovod(counts: list[int], rank: int, where: str) -> SimpleNamespace:
    """What Horovod's binding says on a rank of hosts of so many ranks; a cross rank counts by local rank."""
    places = [(host, local) for host, count in enumerate(counts) for local in range(count)]
    host, local = places[rank]
    cross = [other for other, at in places if at == local].index(host)
    asked = {"is_homogeneous": lambda: len(set(counts)) == 1}
    told = {"local_rank": lambda: local, "cross_rank": lambda: cross, "rank": lambda: rank}
    if where == "binding":
        return SimpleNamespace(**told, **asked)
    return SimpleNamespace(**told, mpi_ops=SimpleNamespace(**asked))


@pytest.mark.parametrize("where", ["binding", "mpi_ops"])
def test_ranks_of_unequal_hosts_are_on_their_own(where: str, monkeypatch) -> None:
    """Rank 4, alone at its place on its host, was taken for one of the first host's."""
    monkeypatch.delenv(RANKS_VARIABLE, raising=False)
    found = []
    for rank, host in enumerate("aabbb"):
        monkeypatch.setenv("HOROVOD_HOSTNAME", host)
        found.append(own_place(horovod([2, 3], rank, where)))
    assert [place for _, place in found] == [0, 1, 0, 1, 2]
    assert len({name for name, _ in found[:2]}) == len({name for name, _ in found[2:]}) == 1
    assert found[0][0] != found[4][0]
    alike = [own_place(horovod([2, 2], rank, where)) for rank in range(4)]
    assert alike == [("host 0", 0), ("host 0", 1), ("host 1", 0), ("host 1", 1)]
