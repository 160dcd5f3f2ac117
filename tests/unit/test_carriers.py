"""Messages between pairs: what is delivered, what is refused, and which way is taken."""

import os

import numpy as np
import pytest

from horovod_sparse import carriers
from horovod_sparse.collectives import AllGather, AllReduce, Exchange, ReduceScatter, single_request
from horovod_sparse.errors import (
    CollectiveMismatchError,
    MessageError,
    StateMismatchError,
    UnsupportedError,
)
from horovod_sparse.simulation import Recorder, SimulatedCluster, run_lockstep
from horovod_sparse.simulation.lockstep import num_rounds
from horovod_sparse.topology import Topology
from horovod_sparse.training.engine import Task
from horovod_sparse.training.settings import check_transport
from support.cases import CASES, case_id
from support.sampling import rows_by


class Gloo:
    def is_initialized(self) -> bool:
        return True

    def mpi_enabled(self) -> bool:
        return False


def test_on_gloo_pairs_are_refused_and_nothing_else_is_chosen(monkeypatch):
    reasons = {"auto": "Horovod does not run on MPI", "alltoall": "HOROVOD_SPARSE_TRANSPORT says so"}
    for asked, reason in reasons.items():
        monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", asked)
        assert carriers.why_not_mpi(Gloo()) == reason
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", "pairs")
    for asks in (check_transport, carriers.why_not_mpi):
        with pytest.raises(UnsupportedError, match=r"HOROVOD_SPARSE_TRANSPORT=pairs needs .* --mpi"):
            asks(Gloo())


@pytest.mark.parametrize("kind", [AllReduce, ReduceScatter])
def test_lengths_that_differ_are_an_error(kind):
    """NumPy would add one element to each of two."""
    steps = [carriers.answer_by_exchanges(kind(np.ones(n)), rank, 2) for rank, n in enumerate((2, 4))]
    with pytest.raises(CollectiveMismatchError, match=r"rank 1 sent 16 bytes .* has 8"):
        run_lockstep(steps)


@pytest.mark.parametrize("where", ["start", "done", "result"])
def test_a_failing_transport_raises_in_result_alone(where):
    class Failing:
        def __getattr__(self, name):
            return lambda: os.stat("no way") if name == where else True

    def begin(request, name):
        return Failing() if where != "start" else os.stat("no way")

    handle = carriers.Rounds(begin, carriers.answer_by_exchanges(Exchange({}, (1,)), 0, 2), "x")
    assert handle.done()
    with pytest.raises(OSError):
        handle.result()


#: the last one's ranks are spread over hosts
TOPOLOGIES = [
    Topology.regular(2, 2),
    Topology.regular(3, 2),
    Topology.regular(1, 2),
    Topology.regular(2, 1),
    Topology(((0, 2), (1, 3))),
]


@rows_by("case,topology", CASES, TOPOLOGIES, ids=case_id)
def test_sums_and_residuals_are_those_of_levels(case, topology):
    size, n = topology.size, 101
    levels, pairs = (SimulatedCluster(case.at(0.2), n, size, topology=topology) for _ in range(2))
    generator = np.random.default_rng(0)
    for _ in range(3):
        drawn = (generator.integers(-96, 97, (size, n)) / 32).astype(np.float32)
        expected = levels.synchronize([one.copy() for one in drawn], 0.5)
        recorder = Recorder()
        steps = [
            carriers.run_over_hosts(bucket.step(one.copy(), 0.5), topology, rank)
            for rank, (bucket, one) in enumerate(zip(pairs.buckets, drawn, strict=True))
        ]
        found = run_lockstep(steps, recorder)
        for one, other in zip(expected, found, strict=True):
            assert np.array_equal(levels.dense(one), levels.dense(other))
        sparsifier = pairs.buckets[0].recipe.sparsifier
        rounds = sparsifier.rounds(topology.num_hosts)
        assert tuple(recorder.kinds) == carriers.rounds_over_hosts(rounds, topology)
        assert set(recorder.kinds) <= {Exchange}
    for one, other in zip(levels.residuals(), pairs.residuals(), strict=True):
        assert np.array_equal(one, other)


def _work(rank: int, number: int):
    """Gathers, sums, and gathers again, fewer times in higher tasks; task 3 fails on every rank."""
    found = []
    for turn in range(3 - number % 3):
        found.append((yield AllGather(np.arange(rank + number, dtype=np.int32))))
        sent = np.full(6000 * (number + 1), rank + turn, [np.float32, float][number % 2])
        found.append((yield AllReduce(sent)))
    if number == 3:
        raise StateMismatchError("on all ranks")
    return found


def test_tasks_side_by_side_get_what_each_gets_alone_in_fewer_collectives():
    tasks = [[Task(str(number)) for number in range(5)] for _ in range(3)]
    batches = [
        [(task, _work(rank, number)) for number, task in enumerate(own)] for rank, own in enumerate(tasks)
    ]
    together = Recorder()
    run_lockstep([carriers.side_by_side(batch, len(batches)) for batch in batches], together)
    # task 0's sums are tiny; float64 of tasks 1 and 3 three times, float32 of tasks 2 and 4 twice
    assert together.total(0).rounds == 6 * num_rounds("allgather", 3) + 5 * num_rounds("allreduce", 3)
    for number in (0, 1, 2, 4):
        alone = run_lockstep([_work(rank, number) for rank in range(3)])
        for rank, expected in enumerate(alone):
            for one, other in zip(tasks[rank][number].value(), expected, strict=True):
                np.testing.assert_array_equal(one, other)
    with pytest.raises(StateMismatchError, match="on all ranks"):
        tasks[0][3].value()


def test_a_sum_goes_from_each_rank_to_all_where_few_ranks_have_few_bytes():
    small = AllReduce(np.zeros(10_000, np.float32))
    kinds = [type(next(carriers._gather_tiny_sum(small, ranks))) for ranks in (2, 16)]
    assert kinds == [AllGather, AllReduce]


@pytest.mark.filterwarnings("error")
def test_a_tiny_sum_that_overflows_warns_of_nothing():
    batches = [[(Task("sum"), single_request(AllReduce(np.full(2, sign * np.inf))))] for sign in (1, -1)]
    run_lockstep([carriers.side_by_side(batch, len(batches)) for batch in batches])
    assert np.isnan(batches[0][0][0].value()).all()


def test_tasks_of_one_level_gather_and_sum_among_their_ranks():
    def work(rank: int, level: str):
        gathered = yield AllGather(np.array([rank], np.int32), level)
        return gathered.tolist(), (yield AllReduce(np.array([rank], float), level)).tolist()

    topology = Topology.regular(2, 2)
    tasks = [[Task(level) for level in ("all", "host", "host")] for _ in range(4)]
    batches = [[(task, work(rank, task.name)) for task in own] for rank, own in enumerate(tasks)]
    run_lockstep([carriers.side_by_side(batch, len(batches)) for batch in batches], topology=topology)
    assert [task.value() for task in tasks[3]] == [([0, 1, 2, 3], [6.0]), ([2, 3], [5.0]), ([2, 3], [5.0])]


def test_an_error_of_one_rank_alone_ends_all_tasks_of_its_batch():
    """Its messages would be taken for those of another task."""

    def work(is_damaged: bool):
        yield AllGather(np.zeros(1, np.int32))
        if is_damaged:
            raise MessageError("of one rank")
        yield AllGather(np.zeros(1, np.int32))

    recorder, batch = Recorder(), [(Task(str(one)), work(one)) for one in (True, False)]
    with pytest.raises(MessageError, match="of one rank"):
        run_lockstep([carriers.side_by_side(batch, 1)], recorder)
    assert recorder.kinds == [AllGather]
