"""All ranks stand alike after a start of Horovod, or start their states anew together."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from horovod_sparse.errors import DriftError, StateMismatchError
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.simulation import Recorder, run_lockstep
from horovod_sparse.tensors.layout import device_word_sums, replicated_arrays
from horovod_sparse.topology import RANKS_VARIABLE, Placement, own_position
from horovod_sparse.training.agreement import (
    COLUMNS,
    DriftCheck,
    RankStatus,
    ReplicatedArray,
    agreed_status,
    compare,
    differing_arrays,
    word_sums,
)
from horovod_sparse.training.settings import Settings

FACTS = (ParameterFacts("weight", 8), ParameterFacts("bias", 2))
ONE, TWO = Plan((("weight", "bias"),)), Plan((("weight",), ("bias",)))


def statuses(size=3, **changed):
    alike = [RankStatus(5, "a", (rank, size), ONE) for rank in range(size)]
    for field, values in changed.items():
        alike = [dataclasses.replace(one, **{field: value}) for one, value in zip(alike, values, strict=True)]
    return alike


def started(ranks):
    recorder = Recorder()
    first, *others = run_lockstep([agreed_status(status) for status in ranks], recorder)
    assert others == [first] * len(others)
    return first, len(recorder.kinds)


def test_ranks_with_equal_states_go_on() -> None:
    start, rounds = started(statuses())
    assert (start.resets, start.step, start.plan, start.reason, rounds) == (False, 5, ONE, "", 1)


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
    start, rounds = started(statuses(**changed))
    assert (start.resets, start.step, start.plan, start.reason, rounds) == (True, 5, ONE, reason, 2)


@pytest.mark.parametrize(("steps", "plan"), [((5, 5, 5), ONE), ((0, 7, 7), TWO)])
def test_the_plan_is_that_of_the_first_rank_that_is_furthest(steps, plan) -> None:
    start, rounds = started(statuses(step=steps, plan=(ONE, TWO, ONE)))
    assert (start.resets, start.step, start.plan, rounds) == (True, max(steps), plan, 2)


def refused(coroutines):
    ends = run_lockstep(coroutines, keep_errors=True)
    assert all(isinstance(end, StateMismatchError) for end in ends)
    (text,) = {str(end) for end in ends}
    return text


def test_all_settings_that_differ_are_named_on_all_ranks() -> None:
    given = [{"op": "Average", "passes": "1"}, {"op": "Sum", "passes": "2"}, {"passes": "1"}]
    text = refused([compare(one, FACTS) for one in given])
    assert text.startswith(
        "op differs: ranks [0] have Average, ranks [1] Sum, ranks [2] not given; "
        "passes differs: ranks [0, 2] have 1, ranks [1] 2; "
    )


def ranks_of(counts: list[int], rank: int, where: str) -> Placement:
    places = [(host, local) for host, count in enumerate(counts) for local in range(count)]
    host, local = places[rank]
    cross = [other for other, at in places if at == local].index(host)
    asked = {"is_homogeneous": lambda: len(set(counts)) == 1}
    told = {"local_rank": lambda: local, "cross_rank": lambda: cross, "rank": lambda: rank}
    told |= {"size": lambda: sum(counts)}
    binding = SimpleNamespace(**told, **asked)
    if where == "mpi_ops":
        binding = SimpleNamespace(**told, mpi_ops=SimpleNamespace(**asked))
    return Placement.of_horovod(binding, binding)


@pytest.mark.parametrize("where", ["binding", "mpi_ops"])
def test_ranks_of_unequal_hosts_find_their_own_host(where: str, monkeypatch) -> None:
    """Rank 4, alone at its place on its host, was taken for one of the first host's."""
    monkeypatch.delenv(RANKS_VARIABLE, raising=False)
    found = []
    for rank, host in enumerate("aabbb"):
        monkeypatch.setenv("HOROVOD_HOSTNAME", host)
        found.append(own_position(ranks_of([2, 3], rank, where)))
    assert [place for _, place in found] == [0, 1, 0, 1, 2]
    assert len({name for name, _ in found[:2]}) == len({name for name, _ in found[2:]}) == 1
    assert found[0][0] != found[4][0]
    alike = [own_position(ranks_of([2, 2], rank, where)) for rank in range(4)]
    assert alike == [("host 0", 0), ("host 0", 1), ("host 1", 0), ("host 1", 1)]


RANKS = 3


def arrays(rank: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    return {
        "weight": generator.standard_normal((70, 90)).astype(np.float32),
        "half": generator.standard_normal(1000).astype(np.float16),
        "step": np.array(7, np.int64),
        "odd": np.arange(13, dtype=np.uint8),
    }


def entries_of(held: dict[str, np.ndarray]) -> list[ReplicatedArray]:
    return [ReplicatedArray(*one) for one in held.items()]


def checked(everyone: list[dict[str, np.ndarray]]) -> list[Any]:
    runs = [DriftCheck(Settings(check_every=10)).compare(20, entries_of(held)) for held in everyone]
    return run_lockstep(runs, keep_errors=True)


def test_an_array_that_a_rank_lacks_is_a_difference() -> None:
    recorder = Recorder()
    run_lockstep([differing_arrays(entries_of(arrays(r))) for r in range(RANKS)], recorder)
    assert recorder.bytes_sent == [[8] * RANKS]
    everyone = [arrays(rank) for rank in range(RANKS)]
    del everyone[2]["half"]
    found = checked(everyone)
    assert all(isinstance(error, DriftError) and "half" in str(error) for error in found)
    assert "ranks [2] nothing" in str(found[0])
    everyone[2]["half"] = np.zeros(999, np.float16)
    assert all("half differs" in str(error) for error in checked(everyone))


@pytest.mark.parametrize("name", ["weight", "half", "step", "odd"])
def test_every_single_bit_counts(name: str) -> None:
    generator = np.random.default_rng(4)
    for _ in range(20):
        everyone = [arrays(rank) for rank in range(RANKS)]
        raw = everyone[1][name].reshape(-1).view(np.uint8)
        raw[generator.integers(raw.size)] ^= np.uint8(1 << generator.integers(8))
        for error in checked(everyone):
            assert isinstance(error, DriftError)
            assert str(error).startswith(f"after step 20 {name} differs: ranks [0, 2] have ")
            assert ", ranks [1] " in str(error)


def test_ranks_that_join_later_compare_after_the_same_steps() -> None:
    survivor, newcomer = (DriftCheck(Settings(check_every=10)) for _ in range(2))
    survivor.schedule_next(10)  # compared
    for check in (survivor, newcomer):
        check.compare_next(17)  # Horovod has started again
        assert check.next_step == 18  # after the first step of these ranks
        check.schedule_next(18)
        assert check.next_step == 20
    assert DriftCheck(Settings(check_every=0)).next_step == float("inf")


@pytest.mark.parametrize("size", [0, 1, 7, 8 * COLUMNS, 8 * COLUMNS + 3, 50_001])
def test_a_device_finds_the_same_sums(size: int) -> None:
    values = torch.from_numpy(np.random.default_rng(2).integers(0, 256, size + 1).astype(np.uint8))
    for start in (0, 1):
        piece = values[start : start + size]
        assert (device_word_sums(piece) == word_sums(piece.numpy())).all()


def test_all_of_an_optimizers_state_is_looked_at() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    for optimizer, wanted in (
        (torch.optim.Adam([weight]), {"exp_avg of w", "exp_avg_sq of w", "step of w", "betas of group 0"}),
        (torch.optim.LBFGS([weight]), {"old_dirs of w[0]", "func_evals of w", "lr of group 0"}),
    ):
        for _ in range(2):

            def closure(optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (weight**4).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        entries = {entry.name: entry for entry in replicated_arrays({"w": weight}, optimizer)}
        assert wanted <= set(entries)
