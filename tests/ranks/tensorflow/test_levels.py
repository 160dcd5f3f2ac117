"""Two levels on TensorFlow's tensors: dense within hosts, sparse between them. Hosts are what a test says."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from horovod_sparse.feedback import recipe
from horovod_sparse.merging import Plan
from horovod_sparse.tensorflow.state import StateKeeper
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer
from horovod_sparse.tensorflow.tensors import numpy_dtype

pytestmark = [pytest.mark.tensorflow, pytest.mark.hosts]

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


def keeper_of(synchronizer):
    keeper = StateKeeper()
    keeper.attach(synchronizer)
    return keeper


def total_held(synchronizer):
    """The sum over ranks of what waits for each variable."""
    entry = keeper_of(synchronizer).state_dict()
    return [
        hvd.allreduce(
            tf.constant(entry["residuals"][name]), op=hvd.Sum, name=f"held.{next(_numbers)}"
        ).numpy()
        for name in synchronizer.names
    ]


def test_entries_that_ranks_of_a_host_swap_lose_nothing_where_all_start_anew(rank, size):
    """Only the first host's states start anew by themselves; then all do, and what waits for others stays."""
    first, synchronize = made(recipe("exdyna", density=0.05))
    for step in range(3):
        synchronize(gradients(rank, step))
    held, everyone = (
        total_held(first),
        hvd.allgather_object(keeper_of(first).state_dict(), name=f"swapped.{next(_numbers)}"),
    )
    second, again = made(recipe("exdyna", density=0.05))
    nothing = [np.zeros(shape, np.float32) for shape in SHAPES]
    again(nothing)
    keeper_of(second).load_state_dict(everyone[{0: 1, 1: 0}.get(rank, rank)])
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
    synchronizer.plan_anew(Plan((synchronizer.names,)))
    variables = [synchronizer.facts[name][1] for name in synchronizer.names]
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
    cases = ((2, 100, False), (2, 2_000_000, size in (4, 6)))
    for number, num_elements, two in cases:
        monkeypatch.setenv("HOROVOD_SPARSE_RANKS_PER_HOST", str(number))
        synchronizer = GradientSynchronizer(
            recipe("topk", density=0.05), levels="auto", name=f"levels{next(_numbers)}"
        )
        variable = tf.Variable(tf.zeros(num_elements))
        synchronizer.synchronize([tf.ones(num_elements)], [variable], 0.5)
        assert (synchronizer.topology is not None) == two, (number, num_elements)
