"""Messages whose lengths repeat: how much room they have, and what becomes of what has none."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from horovod_sparse.errors import UnknownNameError
from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import Recorder, SimulatedCluster
from horovod_sparse.sparsifiers.capacity import Capacity

_NUM_ELEMENTS, _NUM_STEPS = 20_000, 24


def lengths_of(cluster: SimulatedCluster, gradients: Any) -> list[tuple[tuple[int, ...], ...]]:
    """Bytes of every rank in every round, step by step."""
    lengths = []
    for step in gradients:
        cluster.recorder = Recorder()
        cluster.synchronize([*step])
        lengths.append(tuple(tuple(sent) for sent in cluster.recorder.bytes_sent))
    return lengths


def noisy(size: int, num_steps: int = _NUM_STEPS) -> Any:
    """Gradients that ranks share in part, float32 [P, n] for each step."""
    generator = np.random.default_rng(size)
    signal = generator.laplace(size=_NUM_ELEMENTS).astype(np.float32)
    for _ in range(num_steps):
        yield signal + generator.standard_normal((size, _NUM_ELEMENTS), np.float32)


def changes(lengths: list[tuple[tuple[int, ...], ...]]) -> int:
    """How often lengths changed, the first step apart."""
    return sum(now != before for before, now in itertools.pairwise(lengths[1:]))


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "micro"},
        {"name": "exdyna"},
        {"name": "dgc"},
        {"name": "sidco"},
        {"name": "micro", "values": "int8", "indices": "gaps"},
    ],
    ids=lambda arguments: "-".join(arguments.values()),
)
def test_lengths_repeat(arguments: dict[str, Any], size: int) -> None:
    """All ranks' messages have one length, which hardly ever changes; as exact ones it does in every step."""
    measured, exact = (
        lengths_of(
            SimulatedCluster(recipe(density=0.01, capacity=capacity, **arguments), _NUM_ELEMENTS, size),
            noisy(size),
        )
        for capacity in ("measured", "exact")
    )
    assert changes(measured) <= 5
    assert changes(exact) > 20
    assert all(len(set(rounds[0])) == 1 for rounds in measured[1:])
    # on average of all steps and ranks, in all rounds
    assert np.mean([np.sum(sent) for sent in measured]) < 2 * np.mean([np.sum(sent) for sent in exact])


@pytest.mark.parametrize("name", ["micro", "dgc"])
def test_what_has_no_room_comes_later(name: str) -> None:
    """One rank's gradient becomes larger: the largest elements go first, nothing is lost, all is sent."""
    cluster = SimulatedCluster(recipe(name, density=0.01), _NUM_ELEMENTS, 2)
    for step in noisy(2, 12):
        sums = cluster.synchronize([*step])
    room = sums[0].rooms[0]
    assert room
    gradients = np.zeros((2, _NUM_ELEMENTS), np.float32)
    gradients[0] = 1000.0 * (1 + np.arange(_NUM_ELEMENTS) % 7)
    held = np.sum(cluster.residuals(), axis=0, dtype=np.float64) + gradients.sum(0)
    sum_ = cluster.synchronize([*gradients.copy()])[0]
    assert sum_.counts.max() <= room
    applied = np.zeros(_NUM_ELEMENTS)
    np.add.at(applied, sum_.indices, sum_.values.astype(np.float64))
    left = np.sum(cluster.residuals(), axis=0, dtype=np.float64)
    np.testing.assert_allclose(applied + left, held, rtol=1e-5, atol=1e-2)


def test_a_full_message_is_told_and_grows() -> None:
    """MiCRO's window wants more than fits; room grows until it does."""
    cluster = SimulatedCluster(recipe("micro", density=0.01), _NUM_ELEMENTS, 2)
    for step in noisy(2, 12):
        cluster.synchronize([*step])
    for bucket in cluster.buckets:
        bucket.state.selections = Capacity(0.25, 0.25, 0.0, 16)  # half of what windows give
    overflows, rooms = [], []
    for step in noisy(2, 12):
        sums = cluster.synchronize([*step])
        overflows.append(max(sum_.facts["overflow"] for sum_ in sums))
        rooms.append(sums[0].rooms[0])
    assert overflows[0] > 0
    assert overflows[-1] == 0
    assert rooms[-1] > rooms[0]


def test_ranks_that_differ_much_send_what_they_have() -> None:
    """All large elements are in one window: room for them on all ranks would double the round and more."""
    num_elements = 400_000
    cluster = SimulatedCluster(recipe("micro", density=0.1), num_elements, 4)
    generator = np.random.default_rng(0)
    for _ in range(6):
        gradients = generator.standard_normal((4, num_elements), np.float32)
        gradients[:, 100_000:] *= 1e-3
        sums = cluster.synchronize([*gradients])
    assert sums[0].rooms[0] == 0
    assert "overflow" not in sums[0].facts


def test_density_1_and_the_papers_rule_have_no_room() -> None:
    """At density 1 all is sent, zeros too; the papers' rule sends all hits."""
    for arguments in ({"density": 1.0}, {"density": 0.01, "threshold": "paper"}):
        cluster = SimulatedCluster(recipe("exdyna", **arguments), 1000, 2)
        for _ in range(3):
            sums = cluster.synchronize([np.ones(1000, np.float32), np.zeros(1000, np.float32)])
        assert sums[0].rooms == ()
    with pytest.raises(UnknownNameError, match="capacity"):
        recipe("micro", capacity=1.5)
