"""teams="auto", timed: every candidate gets its steps, all ranks settle alike, nothing is lost meanwhile."""

import copy
from typing import Any

import numpy as np
import pytest

from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.feedback import Bucket, recipe
from horovod_sparse.feedback.state import from_plain, to_plain
from horovod_sparse.simulation import Recorder, run_lockstep
from horovod_sparse.sparsifiers import BucketInfo, SparDL
from horovod_sparse.sparsifiers.spardl import spardl, teams
from horovod_sparse.sparsifiers.spardl.teams import candidates_of
from support.gradients import layered
from support.sampling import rest_nightly

_N = 600


def buckets_of(size: int, **arguments: Any) -> list[Bucket]:
    arguments = {"density": 0.05, "teams": "auto"} | arguments
    return [
        Bucket(
            BucketInfo("b", _N, rank, size), recipe("spardl", **arguments), HostAccumulator(_N), timed=True
        )
        for rank in range(size)
    ]


class Clock:
    """Tells every rank how long a step took, by rank and by the teams and the gather of the step.

    All ranks look at it when they start, in order, and again in order when they end.
    """

    def __init__(self, buckets: list[Bucket], seconds: Any) -> None:
        self.size, self.seconds = len(buckets), seconds
        self.looks, self.used = 0, (0, "")

    def begin(self, teams: int, gather: str) -> None:
        """A step."""
        self.looks, self.used = 0, (teams, gather)

    def perf_counter(self) -> float:
        turn, rank = divmod(self.looks, self.size)
        self.looks += 1
        return float(self.seconds(rank, *self.used)) if turn else 0.0


def run_steps(
    buckets: list[Bucket], num_steps: int, monkeypatch: pytest.MonkeyPatch, seconds: Any, seed: int = 0
) -> list[tuple[float, float, int]]:
    """(teams, on_trial, rounds) of every step; checks law 1 and law 2 on the way."""
    size = len(buckets)
    clock = Clock(buckets, seconds)
    monkeypatch.setattr(spardl, "time", clock)
    monkeypatch.setattr(teams, "time", clock)
    generator = np.random.default_rng([seed, size])
    held = [bucket.accumulator.values().copy() for bucket in buckets]
    wanted, applied, magnitude = np.sum(held, axis=0, dtype=np.float64), np.zeros(_N), np.zeros(_N)
    magnitude += np.abs(wanted)
    seen = []
    for _ in range(num_steps):
        sparsifier, state, info = buckets[0].recipe.sparsifier, buckets[0].state, buckets[0].info
        trials = sparsifier._trials(info) if sparsifier.density_at(state.step) == sparsifier.density else None
        plan = sparsifier._plan(info, copy.deepcopy(state), trials)
        clock.begin(plan.teams, plan.gather)
        gradients = layered(generator, (size, _N)).astype(np.float32)
        wanted += gradients.sum(0, dtype=np.float64)
        magnitude += np.abs(gradients).sum(0, dtype=np.float64)
        recorder = Recorder()
        sums = run_lockstep([b.step(g) for b, g in zip(buckets, gradients.copy(), strict=True)], recorder)
        for other in sums[1:]:
            assert other.indices.tobytes() == sums[0].indices.tobytes()
            assert other.values.tobytes() == sums[0].values.tobytes()
        np.add.at(applied, sums[0].indices, sums[0].values.astype(np.float64))
        residual = np.sum([b.accumulator.values() for b in buckets], axis=0, dtype=np.float64)
        allowed = 4 * num_steps * size * np.finfo(np.float32).eps * magnitude
        assert (np.abs(applied + residual - wanted) <= allowed).all(), (
            "a residual was lost when teams changed"
        )
        facts = buckets[0].last.facts
        assert buckets[0].last.kinds_by_round == [kind.__name__ for kind in recorder.kinds]
        seen.append((facts["teams"], facts.get("on_trial", 0.0), len(recorder.kinds)))
    return seen


@pytest.mark.parametrize("size", rest_nightly([4, 6, 8, 12], [6]))
def test_every_candidate_is_timed_and_the_fastest_stays(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    buckets = buckets_of(size, trial_steps=3)
    candidates = candidates_of(buckets[0].recipe.sparsifier._by_cost(buckets[0].info), "auto")
    assert 2 <= len(candidates) <= 4
    for winner in candidates:
        buckets = buckets_of(size, trial_steps=3)

        def seconds(rank: int, teams: int, gather: str, winner: Any = winner) -> float:
            # one rank is slow with everything; the fastest candidate takes half of that of the others
            wins = (teams, gather) == (winner.teams, winner.gather)
            return (6.0 if rank == size - 1 else 1.0) * (0.5 if wins else 1.0)

        seen = run_steps(buckets, 3 * len(candidates) + 2, monkeypatch, seconds)
        trial = [teams for teams, on_trial, _ in seen[:-3]]
        assert trial == [float(one.teams) for one in candidates for _ in range(3)][:-1]
        # the ranks agree once, behind the last step of the trial, by one more round
        plan = SparDL(teams=candidates[-1].teams, gather=candidates[-1].gather)
        assert seen[-3][2] == len(plan.rounds(size)) + 1
        assert {(b.state.teams, b.state.gather) for b in buckets} == {(winner.teams, winner.gather)}
        plan = SparDL(teams=winner.teams, gather=winner.gather)
        assert seen[-2:] == [(float(winner.teams), 0.0, len(plan.rounds(size)))] * 2


def test_ranks_that_see_it_differently_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank is fastest with another one; what counts is the slowest rank."""
    buckets = buckets_of(4, trial_steps=2)
    candidates = candidates_of(buckets[0].recipe.sparsifier._by_cost(buckets[0].info), "auto")
    order = {(one.teams, one.gather): number for number, one in enumerate(candidates)}

    def seconds(rank: int, teams: int, gather: str) -> float:
        number = order[teams, gather]
        return {0: 1.0 if rank else 9.0, 1: 4.0, 2: 5.0 - rank}.get(number, 8.0)

    run_steps(buckets, 2 * len(candidates) + 1, monkeypatch, seconds)
    assert {(b.state.teams, b.state.gather) for b in buckets} == {(candidates[1].teams, candidates[1].gather)}


def test_the_model_stays_where_nothing_is_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets = buckets_of(4, trial_steps=2)
    candidates = candidates_of(buckets[0].recipe.sparsifier._by_cost(buckets[0].info), "auto")
    first = (candidates[0].teams, candidates[0].gather)
    run_steps(buckets, 2 * len(candidates), monkeypatch, lambda _, *used: 1.0 if used == first else 0.97)
    assert (buckets[0].state.teams, buckets[0].state.gather) == first


def test_a_checkpoint_keeps_what_was_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets = buckets_of(4, trial_steps=2)
    run_steps(buckets, 8, monkeypatch, lambda _, teams, __: float(teams))
    assert buckets[0].state.teams == 1
    resumed = buckets_of(4, trial_steps=2)
    for old, new in zip(buckets, resumed, strict=True):
        fresh = new.recipe.sparsifier.init(new.info)
        new.state = from_plain(fresh, to_plain(old.state))
        new.accumulator.assign(old.accumulator.values())
    assert run_steps(resumed, 3, monkeypatch, None, seed=9) == run_steps(
        buckets, 3, monkeypatch, None, seed=9
    )
    for old, new in zip(buckets, resumed, strict=True):
        assert old.accumulator.values().tobytes() == new.accumulator.values().tobytes()
        assert old.state == new.state
