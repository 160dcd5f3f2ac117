"""Every row's sums on four ranks are those of a recorded run, whose rules were once worked by hand.

    PYTHONPATH=.:tests python tests/unit/sparsifiers/test_golden.py

records anew what a change is meant to change: look at the difference before you commit it.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_sparse.errors import StateMismatchError
from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import SparseSum
from horovod_sparse.thresholds import Sketch
from support.cases import CASES, Case, case_id
from support.gradients import dyadic
from support.laws import Scenario, random_gradients, run

RECORDED = Path(__file__).with_name("golden.json")
SCENARIO = Scenario(4, 48, num_steps=5)


def found(case: Case) -> list[list[list[float]]]:
    """Returns of each step the sum's indices (of a whole sum none), its values, and its facts by name."""
    history = run(case.recipe, SCENARIO, random_gradients(SCENARIO, dyadic))
    sums: list[Any] = [step.sums[0] for step in history.steps]
    return [
        [
            [] if getattr(one, "whole", False) else one.indices.tolist(),
            [float(f"{value:.7g}") for value in one.values],
            [float(f"{one.facts[name]:.7g}") for name in sorted(one.facts)],
        ]
        for one in sums
    ]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_sums_are_those_of_the_recorded_run(case: Case) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert case_id(case) in recorded, "a new row: record its run by the command above"
    steps = recorded[case_id(case)]
    for (indices, *numbers), (wanted, *expected) in zip(found(case), steps, strict=True):
        assert indices == wanted
        for one, other in zip(numbers, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def pairs(sum_: SparseSum) -> list[tuple[int, float]]:
    return [(int(index), float(value)) for index, value in zip(sum_.indices, sum_.values, strict=True)]


def test_topk_on_two_ranks() -> None:
    # n = 5, density 0.4: k = 2.
    cluster = SimulatedCluster(recipe("topk", density=0.4), num_elements=5, size=2)
    # Step 1. Rank 0 has (5, -1, 2, 0, -3): its two largest magnitudes are 5 and -3, at 0 and 4.
    #         Rank 1 has (-2, 1, 4, 4, 1): 4 and 4, at 2 and 3.
    first = cluster.synchronize([floats(5, -1, 2, 0, -3), floats(-2, 1, 4, 4, 1)])[0]
    assert pairs(first) == [(0, 5.0), (4, -3.0), (2, 4.0), (3, 4.0)]
    # What was sent is gone, each rank's own only.
    assert [residual.tolist() for residual in cluster.residuals()] == [[0, -1, 2, 0, 0], [-2, 1, 0, 0, 1]]
    # Step 2 with gradients (1, -1, 0, 0, 1) and (-1, 0, 0, 0, 1):
    #   rank 0 accumulates (1, -2, 2, 0, 1): -2 at 1 and 2 at 2.
    #   rank 1 accumulates (-3, 1, 0, 0, 2): -3 at 0 and 2 at 4.
    second = cluster.step([floats(1, -1, 0, 0, 1), floats(-1, 0, 0, 0, 1)])
    assert second.tolist() == [-3, -2, 2, 0, 2]
    assert [residual.tolist() for residual in cluster.residuals()] == [[1, 0, 0, 0, 1], [0, 1, 0, 0, 0]]
    # Step 3 without a gradient: rank 0 holds two ones, at 0 and 4; rank 1 a one at 1 and, its other
    # places being all 0, the first of them, 0. Index 0 comes twice; the sum adds both up.
    third = cluster.synchronize([np.zeros(5, np.float32), np.zeros(5, np.float32)])[0]
    assert pairs(third) == [(0, 1.0), (4, 1.0), (0, 0.0), (1, 1.0)]
    assert not np.any(cluster.residuals())


def test_micro_sends_what_others_hold_too() -> None:
    # n = 4, P = 2, density 0.25: k = 1; parts [0, 2) and [2, 4). The threshold is each rank's own largest.
    cluster = SimulatedCluster(recipe("micro", density=0.25), num_elements=4, size=2)
    # Step 1: rank 0 has (8, 1, 2, 0), threshold 8, searches part 0: selects 0.
    #         rank 1 has (3, 1, 4, 9), threshold 9, searches part 1: selects 3.
    # Both send at 0 and 3: 8 + 3 and 0 + 9; both clear 0 and 3.
    first = cluster.synchronize([floats(8, 1, 2, 0), floats(3, 1, 4, 9)])[0]
    assert pairs(first) == [(0, 11.0), (3, 9.0)]
    assert [residual.tolist() for residual in cluster.residuals()] == [[0, 1, 2, 0], [0, 1, 4, 0]]
    # The union had 2 elements, k is 1: one too many, so in step 2 nobody sends, and no turn is used up.
    # Step 3, parts swapped, gradients 0: rank 0's threshold is 2, searches part 1: selects 2.
    #         rank 1's threshold is 4, searches part 0, where it holds (0, 1): selects nothing.
    nothing = [np.zeros(4, np.float32), np.zeros(4, np.float32)]
    assert pairs(cluster.synchronize(nothing)[0]) == []
    third = cluster.synchronize(nothing)[0]
    assert pairs(third) == [(2, 6.0)]
    assert third.counts.tolist() == [1, 0]
    assert [residual.tolist() for residual in cluster.residuals()] == [[0, 1, 0, 0], [0, 1, 0, 0]]


def test_telemetry_of_exdyna() -> None:
    # n = 8, P = 2, density 0.5: k = 4. Blocks of one element, parts [0, 4) and [4, 8).
    cluster = SimulatedCluster(recipe("exdyna", density=0.5, rebalance="none", threshold=Sketch()), 8, 2)
    # Rank 0: (9, 8, 7, 1, 6, 5, 0, 0): the fourth largest is 6; in its part [0, 4) 9, 8, 7 pass: 3.
    # Rank 1: (9, 8, 7, 6, 5, 1, 1, 0): the fourth largest is 6; in its part [4, 8) nothing passes: 0.
    gradients = [floats(9, 8, 7, 1, 6, 5, 0, 0), floats(9, 8, 7, 6, 5, 1, 1, 0)]
    sum_ = cluster.synchronize(gradients)[0]
    assert sum_.counts.tolist() == [3, 0]
    # Eq. (5): f = P * max / sum = 2 * 3 / 3 = 2.  Eq. (6): |k - k'| / n = |4 - 3| / 8.
    assert sum_.facts == {"threshold": 6.0, "imbalance": 2.0, "density_error": 0.125}
    last = cluster.buckets[0].last
    assert (last.num_target, last.num_selected, last.num_received) == (4, 3, 3)
    # Eq. (1): the first step began with empty residuals.
    assert last.global_error == 0.0
    # Held back: rank 0 (0, 0, 0, 1, 6, 5, 0, 0), norm sqrt(62); rank 1 (0, 0, 0, 6, 5, 1, 1, 0), sqrt(63).
    norms = [bucket.last.residual_norm for bucket in cluster.buckets]
    assert norms == pytest.approx([62**0.5, 63**0.5], rel=1e-6)
    # So the next step begins with a global error of their mean; a rank tells its norm to 8 bits.
    cluster.synchronize([np.zeros(8, np.float32), np.zeros(8, np.float32)])
    assert cluster.buckets[1].last.global_error == pytest.approx((62**0.5 + 63**0.5) / 2, rel=2**-8)


@pytest.mark.parametrize("blocks", [(5, -5, 0), (0, 6, -6)])
def test_other_bounds_on_one_rank_are_found_out_by_all(blocks: tuple[int, ...]) -> None:
    found = 0
    for rank in range(3):
        cluster, generator = SimulatedCluster(recipe("exdyna", density=0.1), 600, 3), np.random.default_rng(1)
        steps = generator.standard_normal((5, 3, 600)).astype(np.float32)
        for step in steps[:4]:
            cluster.step(list(step))
        state = cluster.buckets[rank].state
        moved = state.partitions.num_blocks + np.array(blocks)
        partitions = replace(state.partitions, num_blocks=moved)
        cluster.buckets[rank].state = replace(state, partitions=partitions)
        ends = cluster.synchronize(list(steps[4]), keep_errors=True)
        errors = [end for end in ends if isinstance(end, StateMismatchError)]
        assert len(errors) in (0, 3)
        found += bool(errors)
        if not errors:
            assert np.unique(ends[0].indices).size == ends[0].indices.size
    assert found


if __name__ == "__main__":
    rows = (f"{json.dumps(case_id(case))}: {json.dumps(found(case))}" for case in CASES)
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
