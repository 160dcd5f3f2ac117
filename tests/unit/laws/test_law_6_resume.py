"""Law 6: save, load, continue = never stopped, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from horovod_sparse.errors import StateMismatchError
from horovod_sparse.feedback import Progress
from horovod_sparse.feedback.state import from_plain, to_plain
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import BucketInfo, MiCRO
from support.cases import CASES, Case, case_id
from support.gradients import layered
from support.history import Scenario, random_gradients, run


def saved(cluster: SimulatedCluster) -> list[dict[str, Any]]:
    """What each rank would write to its checkpoint, through text, so that no object is shared."""
    return [
        {
            "state": json.loads(json.dumps(to_plain(bucket.state, array=np.ndarray.tolist))),
            **bucket.progress.to_plain(),
            "residual": bucket.accumulator.values().tobytes(),
            "companions": [companion.tobytes() for companion in bucket.accumulator.companions],
        }
        for bucket in cluster.buckets
    ]


def restored(case: Case, scenario: Scenario, checkpoints: list[dict[str, Any]]) -> SimulatedCluster:
    cluster = SimulatedCluster(case.recipe, scenario.num_elements, scenario.size, scenario.dtype)
    for bucket, checkpoint in zip(cluster.buckets, checkpoints, strict=True):
        bucket.restart(Progress.from_plain(checkpoint, checkpoint["state"]["step"]))
        bucket.state = from_plain(bucket.state, checkpoint["state"])
        bucket.accumulator.assign(np.frombuffer(checkpoint["residual"], bucket.info.value_dtype))
        for companion, values in zip(bucket.accumulator.companions, checkpoint["companions"], strict=True):
            companion[...] = np.frombuffer(values, bucket.info.value_dtype)
    return cluster


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize(
    "scenario", [Scenario(1, 50), Scenario(3, 2000), Scenario(4, 200, "float64")], ids=str
)
def test_resume_is_invisible(case: Case, scenario: Scenario) -> None:
    gradients = random_gradients(Scenario(scenario.size, scenario.num_elements, num_steps=9), layered)
    whole = run(case.recipe, scenario, gradients)

    first = run(case.recipe, scenario, gradients[:5])
    second = run(
        case.recipe,
        scenario,
        gradients[5:],
        cluster=restored(case, scenario, saved(first.cluster)),
    )
    for step, expected in zip(second.steps, whole.steps[5:], strict=True):
        for sum_, other in zip(step.sums, expected.sums, strict=True):
            assert sum_.indices.tobytes() == other.indices.tobytes()
            assert sum_.values.tobytes() == other.values.tobytes()
            assert sum_.facts == other.facts
        assert [r.tobytes() for r in step.residuals] == [r.tobytes() for r in expected.residuals]


@pytest.mark.parametrize("case", [case for case in CASES if not case.loses_mass], ids=case_id)
def test_a_fresh_state_is_noticed(case: Case) -> None:
    """Everything that `saved` holds matters: without it the run goes on differently."""
    scenario = Scenario(3, 2000, num_steps=9)
    gradients = random_gradients(scenario, layered)
    whole = run(case.recipe, scenario, gradients)
    fresh = run(case.recipe, scenario, gradients[5:])
    assert fresh.steps[0].residuals[0].tobytes() != whole.steps[5].residuals[0].tobytes()


def test_a_state_of_an_earlier_version_loads() -> None:
    """What was added since begins as in a fresh state; anything else that is missing is an error."""
    state = MiCRO().init(BucketInfo("w", 8))
    state.step, state.threshold.correction = 7, 2.0
    plain = to_plain(state)
    for name in ("ahead", "paused"):
        del plain["threshold"][name]
    assert from_plain(MiCRO().init(BucketInfo("w", 8)), plain) == state
    del plain["threshold"]["correction"]
    with pytest.raises(StateMismatchError, match="correction"):
        from_plain(state, plain)
