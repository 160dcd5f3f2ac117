"""Law 6: save, load, continue = never stopped, bit for bit; at another size, or anew, nothing is lost."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from horovod_sparse.errors import CollectiveMismatchError, HorovodSparseError, StateMismatchError
from horovod_sparse.feedback import Progress
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.sparsifiers.micro import MiCRO
from horovod_sparse.topology import Topology
from horovod_sparse.training.encoding import from_plain, to_plain
from horovod_sparse.training.parts import progress_after_agreement
from horovod_sparse.training.state import redistributed
from support import laws
from support.cases import CASES, Case, case_id
from support.gradients import dyadic, layered
from support.laws import Scenario, random_gradients, run
from support.sampling import rows_by

_KEEPING = [case for case in CASES if not case.loses_mass]
_N, _STEPS, _NUM_STEPS = 300, 4, 3


def saved(cluster: SimulatedCluster) -> list[dict[str, Any]]:
    return [
        {
            "state": json.loads(json.dumps(to_plain(bucket.state, array=np.ndarray.tolist))),
            "progress": to_plain(bucket.progress),
            "residual": bucket.accumulator.values().tobytes(),
            "companions": [companion.tobytes() for companion in bucket.accumulator.companions],
        }
        for bucket in cluster.buckets
    ]


def restored(case: Case, scenario: Scenario, checkpoints: list[dict[str, Any]]) -> SimulatedCluster:
    cluster = SimulatedCluster(case.recipe, scenario.num_elements, scenario.size, scenario.dtype)
    for bucket, checkpoint in zip(cluster.buckets, checkpoints, strict=True):
        bucket.restart(from_plain(Progress(), checkpoint["progress"]))
        bucket.state = from_plain(bucket.state, checkpoint["state"])
        bucket.accumulator.assign(np.frombuffer(checkpoint["residual"], bucket.info.value_dtype))
        for companion, values in zip(bucket.accumulator.companions, checkpoint["companions"], strict=True):
            companion[...] = np.frombuffer(values, bucket.info.value_dtype)
    return cluster


@rows_by(
    "case,scenario", CASES, [Scenario(1, 50), Scenario(3, 2000), Scenario(4, 200, "float64")], ids=case_id
)
def test_resume_is_invisible(case: Case, scenario: Scenario) -> None:
    gradients = random_gradients(Scenario(scenario.size, scenario.num_elements, num_steps=9), layered)
    whole = run(case.recipe, scenario, gradients)

    first = run(case.recipe, scenario, gradients[:5])
    second = run(case.recipe, scenario, gradients[5:], cluster=restored(case, scenario, saved(first.cluster)))
    for step, expected in zip(second.steps, whole.steps[5:], strict=True):
        for sum_, other in zip(step.sums, expected.sums, strict=True):
            assert sum_.indices.tobytes() == other.indices.tobytes()
            assert sum_.values.tobytes() == other.values.tobytes()
            assert sum_.facts == other.facts
        assert [r.tobytes() for r in step.residuals] == [r.tobytes() for r in expected.residuals]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_step_changes_nothing_in_the_state_that_it_began_with(case: Case) -> None:
    scenario = Scenario(3, 200, num_steps=3)
    cluster = run(case.recipe, scenario, random_gradients(scenario)).cluster
    before = [(bucket.state, saved(cluster)[rank]["state"]) for rank, bucket in enumerate(cluster.buckets)]
    run(case.recipe, scenario, random_gradients(scenario, seed=1), cluster=cluster)
    for bucket, (state, told) in zip(cluster.buckets, before, strict=True):
        assert to_plain(state, array=np.ndarray.tolist) == told
        assert bucket.state.step == state.step + 3


def test_a_state_with_a_field_less_or_more_is_refused() -> None:
    state = MiCRO().init(BucketInfo("w", 8))
    for name in ("ahead", "correction"):
        plain = to_plain(state)
        assert from_plain(state, plain) == state
        del plain["threshold"][name]
        with pytest.raises(StateMismatchError, match=name):
            from_plain(state, plain)
    with pytest.raises(StateMismatchError, match="another version"):
        from_plain(state, to_plain(state) | {"unheard": 1})


def entries_of(cluster: SimulatedCluster) -> list[dict[str, Any]]:
    size = len(cluster.buckets)
    return [
        {
            "rank": rank,
            "size": size,
            "feedback": "error",
            "residuals": {"b": bucket.accumulator.values().copy()},
            "companions": [{"b": companion.copy()} for companion in bucket.accumulator.companions],
        }
        for rank, bucket in enumerate(cluster.buckets)
    ]


def means(cluster: SimulatedCluster) -> np.ndarray:
    kept = [(bucket.accumulator.values(), *bucket.accumulator.companions) for bucket in cluster.buckets]
    return np.mean(kept, axis=0, dtype=np.float64)


@rows_by("case,sizes", _KEEPING, [(6, 4), (4, 6), (6, 1), (2, 8), (5, 3)], ids=case_id)
def test_nothing_is_lost_on_the_way_to_another_size(case: Case, sizes: tuple[int, int]) -> None:
    old_size, size = sizes
    generator = np.random.default_rng([old_size, size])
    wanted, applied, magnitude = np.zeros(_N), np.zeros(_N), np.zeros(_N)
    cluster = SimulatedCluster(case.recipe, _N, old_size)
    for now in (old_size, size):
        if now != old_size:
            old, before = entries_of(cluster), means(cluster)
            cluster = SimulatedCluster(case.recipe, _N, now)
            for rank, bucket in enumerate(cluster.buckets):
                entry = redistributed(old[::-1], rank, now)
                bucket.accumulator.assign(entry["residuals"]["b"])
                for companion, values in zip(bucket.accumulator.companions, entry["companions"], strict=True):
                    companion[...] = values["b"]
            np.testing.assert_allclose(means(cluster), before, rtol=1e-6, atol=1e-6 * np.abs(before).max())
        for _ in range(_STEPS):
            gradients = layered(generator, (now, _N)).astype(np.float32)
            wanted += gradients.mean(0, dtype=np.float64)
            magnitude += np.abs(gradients).sum(0, dtype=np.float64)
            sum_ = cluster.synchronize(list(gradients))[0]
            np.add.at(applied, sum_.indices, sum_.values.astype(np.float64) / now)
    held = np.mean(cluster.residuals(), axis=0, dtype=np.float64)
    allowed = 8 * _STEPS * max(old_size, size) * np.finfo(np.float32).eps * magnitude
    assert (np.abs(applied + held - wanted) <= allowed).all()


@rows_by("case,size", CASES, [2, 3], ids=case_id)
def test_states_that_start_anew_in_the_middle_agree_and_lose_nothing(case: Case, size: int) -> None:
    scenario = Scenario(size, 60, num_steps=_NUM_STEPS)
    before = run(case.recipe, scenario, random_gradients(scenario, dyadic))
    cluster = run(case.recipe, scenario, random_gradients(scenario, dyadic, seed=1)).cluster
    for rank, (fresh, old) in enumerate(zip(cluster.buckets, before.cluster.buckets, strict=True)):
        zeros = np.zeros(scenario.num_elements, fresh.info.value_dtype)
        fresh.accumulator.assign(zeros if rank == 1 else old.accumulator.values())
        for mine, theirs in zip(fresh.accumulator.companions, old.accumulator.companions, strict=True):
            mine[:] = 0.0 if rank == 1 else theirs
        own = replace(old.progress, step=0 if rank == 1 else old.progress.step)
        fresh.restart(progress_after_agreement(own, old.progress.step))
    residuals = [residual for rank, residual in enumerate(before.cluster.residuals()) if rank != 1]
    held = np.sum(residuals, axis=0, dtype=np.float64)
    history = run(case.recipe, scenario, random_gradients(scenario, dyadic, seed=2), cluster=cluster)
    assert [bucket.state.step for bucket in cluster.buckets] == [2 * _NUM_STEPS] * size
    laws.sums_are_right(history)
    laws.replicas_agree(history)
    if case.exclusive:
        laws.exclusive_means_exclusive(history)
    if not case.loses_mass:
        history.gradients[0, 0] += held  # what was held when they started is there as if it had just come
        laws.nothing_is_lost(history)


@rows_by("case,by,hosts", CASES, [1, 2, 3], [None, (1, 4), (2, 2), (4, 1)], ids=case_id, each=2)
def test_a_rank_behind_is_an_error_on_every_rank(case: Case, by: int, hosts: tuple[int, int] | None) -> None:
    topology = None if hosts is None else Topology.regular(*hosts)
    cluster = SimulatedCluster(case.recipe, 400, 4, topology=topology)
    *steps, last = np.random.default_rng(0).standard_normal((6, 4, 400)).astype(np.float32)
    for step in steps:
        cluster.step(list(step))
    before = cluster.residuals()
    cluster.buckets[2].state = replace(cluster.buckets[2].state, step=5 - by)
    try:
        found = cluster.synchronize(list(last.copy()), keep_errors=True)
    except CollectiveMismatchError:  # in other rounds already: Horovod itself, or the deadline, says so
        assert hosts != (1, 4)
        return
    assert all(isinstance(error, HorovodSparseError) for error in found), found
    assert len({type(error) for error in found}) == 1
    column = [0] if hosts == (2, 2) else [0, 1, 3]
    told = f"ranks {column} at 5, ranks [2] at {5 - by}" in str(found[0])
    if hosts is not None:
        exclusive = hosts == (4, 1) and "in one another's parts" in str(found[0])
        assert isinstance(found[0], StateMismatchError) and (told or exclusive), found
    elif isinstance(found[0], StateMismatchError):
        assert told or "in one another's parts" in str(found[0]), found
    if case.loses_mass or case.recipe.feedback.num_companions:
        return
    if hosts is None and told:
        for bucket, held, given in zip(cluster.buckets, before, last, strict=True):
            np.testing.assert_array_equal(bucket.accumulator.values(), held + given)
    if hosts == (1, 4):
        np.testing.assert_allclose(sum(cluster.residuals()), sum(before) + last.sum(0), atol=1e-5)
