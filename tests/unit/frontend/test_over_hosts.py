"""Two levels by messages between pairs of ranks: the same bits, in the rounds that a graph is traced for."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_sparse.collectives import AllReduce, Exchange
from horovod_sparse.frontend.transport import over_hosts, rounds_over_hosts
from horovod_sparse.simulation import Recorder, SimulatedCluster, run_lockstep
from horovod_sparse.topology import Topology
from support.cases import CASES, case_id

#: the last one's ranks are spread over hosts
TOPOLOGIES = [
    Topology.regular(2, 2),
    Topology.regular(3, 2),
    Topology.regular(1, 2),
    Topology.regular(2, 1),
    Topology(((0, 2), (1, 3))),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: repr(topology.hosts))
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_sums_and_residuals_are_those_of_levels(case, topology):
    size, n = topology.size, 101
    levels, pairs = (SimulatedCluster(case.at(0.2), n, size, topology=topology) for _ in range(2))
    generator = np.random.default_rng(0)
    for _ in range(3):
        drawn = (generator.integers(-96, 97, (size, n)) / 32).astype(np.float32)
        expected = levels.synchronize([one.copy() for one in drawn], 0.5)
        recorder = Recorder()
        steps = [
            over_hosts(bucket.step(one.copy(), 0.5), topology, rank)
            for rank, (bucket, one) in enumerate(zip(pairs.buckets, drawn, strict=True))
        ]
        found = run_lockstep(steps, recorder)
        for one, other in zip(expected, found, strict=True):
            assert np.array_equal(levels.dense(one), levels.dense(other))
        sparsifier = pairs.buckets[0].recipe.sparsifier
        rounds = sparsifier.rounds(topology.num_hosts)
        assert tuple(recorder.kinds) == rounds_over_hosts(rounds, topology)
        assert set(recorder.kinds) <= {Exchange}
    for one, other in zip(levels.residuals(), pairs.residuals(), strict=True):
        assert np.array_equal(one, other)


def test_a_request_of_all_ranks_stays_one():
    def rank(value):
        total = yield AllReduce(np.array([value]))
        return float(total[0])

    recorder = Recorder()
    topology = Topology.regular(2, 2)
    run_lockstep([over_hosts(rank(1.0), topology, number) for number in range(4)], recorder)
    assert recorder.kinds == [AllReduce]
