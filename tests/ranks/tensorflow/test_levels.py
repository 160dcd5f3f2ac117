"""Two levels on TensorFlow's tensors: dense within hosts, sparse between them. Hosts are what a test says."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from horovod_sparse.cli.ranks import Ranks
from horovod_sparse.cost import choose_levels
from horovod_sparse.errors import NonFiniteGradientError, StateMismatchError, UnknownNameError
from horovod_sparse.feedback import recipe
from horovod_sparse.frontend.calibration import Extent, calibration
from horovod_sparse.frontend.shared_memory import MEMORY_VARIABLE, lends
from horovod_sparse.merging import Plan
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import TopK
from horovod_sparse.tensorflow.state import load, save
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer
from horovod_sparse.tensorflow.tensors import numpy_dtype
from horovod_sparse.topology import Topology
from support.cases import CASES, case_id
from support.keras_models import fit, keras, make_model

pytestmark = pytest.mark.tensorflow

SHAPES = [(13, 11), (), (3, 4, 5), (97,)]
_numbers = iter(range(10**6))


@pytest.fixture(autouse=True)
def per_host(monkeypatch, size):
    """Two ranks on a host, or all of them where that leaves a host with fewer."""
    number = 2 if size % 2 == 0 else size
    monkeypatch.setenv("HOROVOD_SPARSE_RANKS_PER_HOST", str(number))
    return number


def gradients(rank: int, step: int, dtype: str = "float32") -> list[np.ndarray]:
    """Whose sums are exact in any order."""
    generator = np.random.default_rng([rank, step])
    return [(generator.integers(-96, 97, shape) / 32).astype(numpy_dtype(dtype)) for shape in SHAPES]


def made(chosen, dtype: str = "float32", **arguments):
    """A synchronizer, and what synchronizes the gradients of a step."""
    variables = [tf.Variable(tf.zeros(shape, dtype)) for shape in SHAPES]
    arguments = {"levels": "host", "average": False, "name": f"levels{next(_numbers)}", **arguments}
    synchronizer = GradientSynchronizer(chosen, **arguments)

    @tf.function
    def synchronize(given):
        return synchronizer.synchronize(given, variables, tf.constant(0.5))

    return synchronizer, lambda given: [sum_.numpy() for sum_ in synchronize([tf.constant(g) for g in given])]


def flat(synchronizer, arrays, names):
    positions = [list(synchronizer.names).index(name) for name in names]
    return np.concatenate([np.asarray(arrays[i]).reshape(-1) for i in positions])


def total_held(synchronizer):
    """The sum over ranks of what waits for each variable."""
    entry = save(synchronizer)
    return [
        hvd.allreduce(
            tf.constant(entry["residuals"][name]), op=hvd.Sum, name=f"held.{next(_numbers)}"
        ).numpy()
        for name in synchronizer.names
    ]


def _check(rank, size, per_host, chosen, dtype="float32", **arguments):
    synchronizer, synchronize = made(chosen, dtype, **arguments)
    topology, clusters = Topology.regular(size // per_host, per_host), None
    for step in range(4):
        sums = synchronize(gradients(rank, step, dtype))
        if clusters is None:
            wholes = [part.bucket.whole for part in synchronizer.sparse]
            clusters = [
                SimulatedCluster(chosen, one.num_elements, size, dtype, name=one.name, topology=topology)
                for one in wholes
            ]
        for part, cluster in zip(synchronizer.sparse, clusters, strict=True):
            given = [flat(synchronizer, gradients(peer, step, dtype), part.names) for peer in range(size)]
            expected = cluster.step(given, 0.5).astype(numpy_dtype(dtype))
            assert np.array_equal(flat(synchronizer, sums, part.names), expected)
            assert np.array_equal(
                part.bucket.accumulator.values(), cluster.buckets[rank].accumulator.values()
            )
            assert part.bucket.last.bytes_inside == cluster.buckets[rank].last.bytes_inside > 0
            assert part.bucket.last.bytes_by_round == cluster.buckets[rank].last.bytes_by_round
    assert synchronizer.topology == topology and lends(synchronizer.sparse)
    return synchronizer


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_shared_memory_gives_the_bits_that_messages_give(monkeypatch, rank, dtype):
    found = {}
    for memory in ("0", "1"):
        monkeypatch.setenv(MEMORY_VARIABLE, memory)
        synchronizer, synchronize = made(recipe("topk", density=0.2), dtype)
        sums = []
        for step in range(3):
            generator = np.random.default_rng([rank, step])
            sums += synchronize(
                [generator.standard_normal(shape).astype(numpy_dtype(dtype)) for shape in SHAPES]
            )
        assert lends(synchronizer.sparse) == (memory == "1")
        found[memory] = [*sums, *(part.bucket.accumulator.values() for part in synchronizer.sparse)]
    assert all(np.array_equal(one, other) for one, other in zip(found["0"], found["1"], strict=True))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_the_simulation(rank, size, per_host, case):
    if size < 4 and case.recipe.sparsifier.name not in ("topk", "exdyna"):
        pytest.skip("one host alone: the others have their launch of 4 ranks")
    synchronizer = _check(rank, size, per_host, case.at(0.2))
    shard = synchronizer.sparse[0].bucket.accumulator.values().size
    assert shard == -(-sum(int(np.prod(shape)) for shape in SHAPES) // per_host), "1 / L of the residual"


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_types_equal_the_simulation(rank, size, per_host, dtype):
    _check(rank, size, per_host, recipe("exdyna", density=0.2), dtype)


def test_many_buckets_equal_the_simulation(rank, size, per_host):
    """Of one element among them, of which all ranks but one of a host have nothing."""
    synchronizer = _check(rank, size, per_host, recipe("topk", density=0.2), bucket_bytes=1)
    assert len(synchronizer.parts) == len(SHAPES)


def test_rounds_in_a_loop_equal_the_simulation(monkeypatch, rank, size, per_host):
    """As in elastic training, where functions are traced once."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    synchronizer = _check(rank, size, per_host, recipe("spardl", density=0.2))
    assert all(part.task.looped for part in synchronizer.sparse)


def test_one_density_is_the_average(rank, size):
    _, synchronize = made(recipe("topk", density=1.0), average=True)
    found = synchronize(gradients(rank, 0))
    for i, values in enumerate(found):
        wanted = sum(gradients(peer, 0)[i] for peer in range(size)) / size
        np.testing.assert_allclose(values, wanted, atol=1e-6)


@pytest.mark.parametrize("policy", ["raise", "zero"])
def test_every_rank_raises_and_the_host_goes_on(rank, size, per_host, policy):
    synchronizer, synchronize = made(recipe("exdyna", density=0.2), on_nonfinite=policy)
    synchronize(gradients(rank, 0))
    sick, last_host = gradients(rank, 1), range(size - per_host, size)
    if rank == size - 1:
        sick[3][5] = np.nan
    before = [part.bucket.accumulator.values().copy() for part in synchronizer.sparse]
    if policy == "raise":
        with pytest.raises(tf.errors.OpError, match="NonFiniteGradientError"):
            synchronize(sick)
        assert isinstance(synchronizer.last_error, NonFiniteGradientError)
        assert set(synchronizer.last_error.where) == set(last_host)
    else:
        assert all(np.isfinite(values).all() for values in synchronize(sick))
        assert synchronizer.telemetry.num_dropped == 1
    if policy == "raise" and rank in last_host:
        for part, values in zip(synchronizer.sparse, before, strict=True):
            np.testing.assert_allclose(part.bucket.accumulator.values(), values, atol=1e-6)
    assert all(np.isfinite(values).all() for values in synchronize(gradients(rank, 2)))


@pytest.mark.parametrize("way", [("flat", "host"), ("host", "flat"), ("host", "host")], ids="-".join)
def test_a_checkpoint_loads_at_other_levels_with_nothing_lost(rank, size, way):
    first, synchronize = made(recipe("topk", density=0.05), levels=way[0])
    for step in range(3):
        synchronize(gradients(rank, step))
    entry, held = save(first), total_held(first)
    second, again = made(recipe("topk", density=0.05), levels=way[1])
    nothing = [np.zeros(shape, np.float32) for shape in SHAPES]
    again(nothing)
    load(second, entry)
    applied = again(nothing)
    for was, now, found in zip(held, total_held(second), applied, strict=True):
        np.testing.assert_allclose(now + found, was, rtol=1e-6, atol=1e-5)
    if way == ("host", "host"):
        for part, other in zip(first.sparse, second.sparse, strict=True):
            assert part.bucket.state.step + 1 == other.bucket.state.step
    for part in second.sparse:
        assert getattr(part.bucket, "elsewhere", None) is None, "all have what is theirs"


def test_entries_that_ranks_of_a_host_swap_lose_nothing_where_all_start_anew(rank, size):
    """Only the first host's states start anew by themselves; then all do, and what waits for others stays."""
    first, synchronize = made(recipe("exdyna", density=0.05))
    for step in range(3):
        synchronize(gradients(rank, step))
    held, everyone = total_held(first), hvd.allgather_object(save(first), name=f"swapped.{next(_numbers)}")
    second, again = made(recipe("exdyna", density=0.05))
    nothing = [np.zeros(shape, np.float32) for shape in SHAPES]
    again(nothing)
    load(second, everyone[{0: 1, 1: 0}.get(rank, rank) if size > 1 else rank])
    applied = again(nothing)
    for was, now, found in zip(held, total_held(second), applied, strict=True):
        np.testing.assert_allclose(now + found, was, rtol=1e-6, atol=1e-5)
    for part in second.sparse:
        assert getattr(part.bucket, "elsewhere", None) is None, "all have what is theirs"


def test_another_plan_has_other_shards_and_loses_nothing(rank, size):
    synchronizer, synchronize = made(recipe("topk", density=0.05), bucket_bytes=1)
    for step in range(2):
        synchronize(gradients(rank, step))
    held = total_held(synchronizer)
    synchronizer.replan(Plan((synchronizer.names,)))
    variables = [synchronizer.bucketing._facts[name][1] for name in synchronizer.names]
    nothing = [tf.zeros(shape) for shape in SHAPES]
    applied = synchronizer.synchronize(nothing, variables, 0.5)
    for was, now, found in zip(held, total_held(synchronizer), applied, strict=True):
        np.testing.assert_allclose(now + found.numpy(), was, rtol=1e-6, atol=1e-5)


def test_a_variable_that_is_left_out_gets_its_share_back(rank, size):
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    synchronizer = GradientSynchronizer(
        recipe("topk", density=0.5), average=False, levels="host", name=f"levels{next(_numbers)}"
    )
    synchronizer.synchronize([tf.constant(one) for one in gradients(rank, 0)], variables, 0.5)
    held = total_held(synchronizer)
    synchronizer.synchronize([tf.zeros(shape) for shape in SHAPES[:3]], variables[:3], 0.5)
    np.testing.assert_allclose(total_held(synchronizer)[3], held[3], rtol=1e-6, atol=1e-5)


def test_auto_uses_two_levels_where_hosts_are_alike_and_it_is_faster(monkeypatch, rank, size):
    cases = ((size, 2_000_000, False), (1, 2_000_000, False), (2, 100, False), (2, 2_000_000, size in (4, 6)))
    for number, num_elements, two in cases:
        monkeypatch.setenv("HOROVOD_SPARSE_RANKS_PER_HOST", str(number))
        synchronizer = GradientSynchronizer(
            recipe("topk", density=0.05), levels="auto", name=f"levels{next(_numbers)}"
        )
        variable = tf.Variable(tf.zeros(num_elements))
        synchronizer.synchronize([tf.ones(num_elements)], [variable], 0.5)
        assert (synchronizer.topology is not None) == two, (number, num_elements)


def test_a_tape_and_an_optimizer_take_the_argument(rank, size):
    compression = hvd.Compression.topk(density=1.0)
    x = tf.Variable([1.0, 2.0])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(x * x) * tf.cast(hvd.rank() + 1, tf.float32)
        tape = hvd.DistributedGradientTape(tape, compression=compression, levels="host")
        return tape.gradient(y, [x])

    mean = (size + 1) / 2
    np.testing.assert_allclose(step()[0].numpy(), [2.0 * mean, 4.0 * mean], rtol=1e-6)
    assert compression.synchronizer.topology is not None
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression="exdyna:density=0.1", levels="host"
    )
    model = make_model(seed=0)
    fit(model, optimizer, rank % 3, size, epochs=1)  # there is data for three
    gathered = hvd.allgather_object([weights.tolist() for weights in model.get_weights()])
    assert all(theirs == gathered[0] for theirs in gathered)


def test_what_cannot_be_is_refused(rank, size):
    with pytest.raises(UnknownNameError, match=r"levels.*auto, flat, host"):
        made(recipe("topk"), levels="two")
    levels = "flat" if rank == 0 else "host"
    synchronizer = GradientSynchronizer(recipe("topk"), levels=levels, name=f"levels{next(_numbers)}")
    with pytest.raises(StateMismatchError, match="levels differs"):
        synchronizer.synchronize([tf.ones(100)], [tf.Variable(tf.zeros(100))], 0.5)


def test_what_auto_decides_by_is_measured(size, per_host):
    """Both levels, as a training's requests travel."""
    if size < 4:
        pytest.skip("takes two hosts of two ranks")
    ranks = Ranks("tensorflow")
    topology = ranks.topology()
    assert topology == Topology.regular(size // per_host, per_host)
    extent = Extent((64, 1024, 4096), (1000, 2000, 4000), repetitions=2, budget_seconds=1.0)
    coroutine = calibration(ranks.where(), [TopK()], extent=extent, topology=topology)
    profile = ranks.carry_out(coroutine, name="calibration", topology=topology)
    assert (profile.num_hosts, profile.per_host) == (size // per_host, per_host)
    assert sorted(profile.levels["host"]) == ["allgather", "reducescatter"]
    assert all(fit.fixed_seconds + fit.seconds_per_unit > 0 for fit in profile.levels["across"].values())
    choice = choose_levels(TopK(), 10**6, profile.num_hosts, per_host, profile=profile)
    assert "by the profile" in choice.reason and choice.host_seconds > 0
