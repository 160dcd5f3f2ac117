"""Every law of tests/support/laws.py, read off a run of the hook itself: what each rank did, gathered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch.distributed as dist

from horovod_sparse.collectives import num_bytes_sent
from horovod_sparse.ddp import step as step_module
from horovod_sparse.ddp.collectives import Carrier
from horovod_sparse.pytorch.parts import SparseBucket
from horovod_sparse.simulation import Recorder
from support import laws
from support.cases import CASES, case_id
from support.history import History, Scenario, Step
from support.linear import dyadic
from support.replicas import Replica

NUM_ELEMENTS, NUM_STEPS = 900, 4


class _Noting(Carrier):
    """Notes what it is asked for."""

    requests: ClassVar[list[Any]] = []

    def __call__(self, request: Any) -> Any:
        self.requests.append((type(request), request.level, num_bytes_sent(request, self.rank)))
        return super().__call__(request)


def _gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def gradient(rank: int, step: int) -> np.ndarray:
    return dyadic((NUM_ELEMENTS,), "laws", rank, step)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_laws(case, rank, size, monkeypatch):
    sums: list[Any] = []
    apply = SparseBucket.apply

    def noting(part, scale):
        sums.append(part.task.result)
        return apply(part, scale)

    monkeypatch.setattr(SparseBucket, "apply", noting)
    monkeypatch.setattr(step_module, "Carrier", _Noting)
    monkeypatch.setattr(_Noting, "requests", [])
    replica = Replica({"weight": (NUM_ELEMENTS,)}, case.recipe, bucket_bytes=2**20)
    steps = []
    for step in range(NUM_STEPS):
        found = replica.step({"weight": gradient(rank, step)})["weight"].numpy()
        (bucket,) = (part.bucket for part in replica.sync.sparse)
        if step == 0:  # ranks agree before: the bucket's own come last
            _Noting.requests[:] = _Noting.requests[-len(bucket.recipe.sparsifier.rounds(size)) :]
        told = _gathered(
            (sums[-1], bucket.accumulator.residual().copy(), list(_Noting.requests), found, bucket.last)
        )
        _Noting.requests.clear()
        results, residuals, requests, gradients, lasts = (list(one) for one in zip(*told, strict=True))
        kinds = [kind for kind, _, _ in requests[0]]
        by_round = [[theirs[i][2] for theirs in requests] for i in range(len(kinds))]
        recorder = Recorder(kinds=kinds, levels=[level for _, level, _ in requests[0]], bytes_sent=by_round)
        steps.append(Step(results, residuals, recorder))
        for other in gradients:  # what is applied is that sum
            dense = np.zeros(NUM_ELEMENTS, np.float32)
            np.add.at(dense, results[0].indices, results[0].values / np.float32(size))
            np.testing.assert_allclose(other, dense, rtol=1e-6, atol=1e-7)
    states = _gathered((bucket.info, bucket.whole, bucket.state))
    buckets = [
        SimpleNamespace(info=info, whole=whole, state=state, recipe=bucket.recipe, last=last)
        for (info, whole, state), last in zip(states, lasts, strict=True)
    ]
    given = np.array([[gradient(r, step) for r in range(size)] for step in range(NUM_STEPS)])
    scenario = Scenario(size, NUM_ELEMENTS, num_steps=NUM_STEPS)
    laws.check_all(History(case.recipe, scenario, given, SimpleNamespace(buckets=buckets), steps), case)
