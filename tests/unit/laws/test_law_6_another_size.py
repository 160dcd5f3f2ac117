"""Law 6 at another number of ranks: what all ranks hold back together is kept, wherever it lay.

SparDL and gTop-k leave residuals on ranks that did not make them, and with other ranks there are other
teams: so law 1 is checked over both runs together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_sparse.frontend.state import redistributed
from horovod_sparse.simulation import SimulatedCluster
from support.cases import CASES, Case, case_id
from support.gradients import layered

_N, _STEPS = 300, 4


def entries_of(cluster: SimulatedCluster) -> list[dict[str, Any]]:
    """What every rank saves, as far as `redistributed` looks at it."""
    size = len(cluster.buckets)
    return [
        {
            "rank": rank,
            "size": size,
            "residuals": {"b": bucket.accumulator.values().copy()},
            "companions": [{"b": companion.copy()} for companion in bucket.accumulator.companions],
        }
        for rank, bucket in enumerate(cluster.buckets)
    ]


def means(cluster: SimulatedCluster) -> np.ndarray:
    """Over ranks: of the values, and of what a feedback keeps beside them, [1 + companions, n]."""
    kept = [(bucket.accumulator.values(), *bucket.accumulator.companions) for bucket in cluster.buckets]
    return np.mean(kept, axis=0, dtype=np.float64)


@pytest.mark.parametrize("case", [case for case in CASES if not case.loses_mass], ids=case_id)
@pytest.mark.parametrize(("old_size", "size"), [(6, 4), (4, 6), (6, 1), (2, 8), (5, 3)])
def test_nothing_is_lost_on_the_way_to_another_size(case: Case, old_size: int, size: int) -> None:
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
