"""Tensors that are summed sparsely, by our allreduce and by Horovod's with our compressor."""

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from horovod_sparse.errors import ArgumentError, NonFiniteGradientError, StateMismatchError, UnsupportedError
from horovod_sparse.tensorflow import Compression, SparseCompressor
from support.cases import CASES, on_ranks
from support.stateless import check_compressed, check_sum

pytestmark = pytest.mark.controllers
TOP = Compression.topk(density=0.25)


def summed(array: np.ndarray, recipe, name: str, **arguments) -> np.ndarray:
    half = array.dtype == np.uint16
    tensor = tf.bitcast(tf.constant(array), tf.bfloat16) if half else tf.constant(array)
    total = hvd.allreduce(tensor, name=name, op=hvd.Sum, compression=SparseCompressor(recipe), **arguments)
    return (tf.bitcast(total, tf.uint16) if half else total).numpy()


def in_graph(array: np.ndarray, recipe, name: str) -> np.ndarray:
    compressor, given = SparseCompressor(recipe), tf.constant(array)

    @tf.function
    def run(tensor):
        return [hvd.allreduce(tensor, name=name, op=hvd.Sum, compression=compressor) for _ in range(2)]

    first, second = run(given)
    assert (first.numpy() == second.numpy()).all() and (run(given)[0].numpy() == first.numpy()).all()
    return first.numpy()


@pytest.mark.parametrize("case", on_ranks())
def test_a_sum_is_the_simulators_and_loses_only_what_is_not_sent(rank, size, case):
    for sum_ in (summed, in_graph):
        check_sum(case, sum_, range(size), rank)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_dtype_is_summed_as_the_simulator_does(rank, size, dtype):
    check_sum(CASES[0], summed, range(size), rank, dtype)


def test_the_ranks_of_a_process_set_sum_among_themselves(rank, size, process_set):
    some = process_set(range(1, size))
    if rank == 0:
        with pytest.raises(ArgumentError, match="process_set"):
            hvd.allreduce(tf.ones(2), compression=TOP, process_set=some)
    else:

        def within(array, recipe, name):
            return summed(array, recipe, name, process_set=some)

        check_sum(CASES[0], within, range(1, size), rank)


@pytest.mark.parametrize("case", on_ranks())
def test_horovods_allreduce_sums_what_each_rank_would_send(rank, size, case):
    for graph in (False, True):

        def by_horovod(array, recipe, name, graph=graph):
            compressor = SparseCompressor(recipe)

            def run(tensor):
                return stock.allreduce(tensor, name=name, op=stock.Sum, compression=compressor)

            return (tf.function(run) if graph else run)(tf.constant(array)).numpy()

        check_compressed(case, by_horovod, size, rank)


def test_shapes_factors_and_what_is_not_sparsified(rank, size):
    for tensor in (tf.constant(3.0), tf.reshape(tf.range(6.0), [2, 3]), tf.zeros([0, 3])):
        total = hvd.allreduce(
            tensor, compression="topk:density=1.0", prescale_factor=2.0, postscale_factor=0.25
        )
        assert total.shape == tensor.shape and (total.numpy() == 0.5 * tensor.numpy()).all()
    for name, compressor in (("whole", TOP), ("none", Compression.none)):
        total = hvd.allreduce(tf.fill([3], 2), name=name, op=hvd.Sum, compression=compressor)
        assert total.numpy().tolist() == [2 * size] * 3
        totals = stock.grouped_allreduce([tf.range(4.0), tf.ones(3)], op=stock.Sum, compression=compressor)
        assert totals[0][3] == 3 * size and totals[1][0] == size


def test_what_goes_wrong_is_named(rank, size):
    given = tf.constant([1.0, np.nan if rank == size - 1 else 1.0, 1.0, 1.0])
    with pytest.raises(NonFiniteGradientError, match=f"rank {size - 1}: "):
        hvd.allreduce(given, compression=TOP)
    assert np.isnan(stock.allreduce(given, name="nan", compression=TOP).numpy()).tolist() == [0, 1, 0, 0]
    with pytest.raises(StateMismatchError, match=r"shape differs: .*ranks \[0\] have \[4\]"):
        hvd.allreduce(tf.ones([4 + rank]), compression=TOP)
    with pytest.raises(tf.errors.OpError, match=r"shape differs: .*ranks \[0\] have \[4\]"):
        tf.function(lambda given: hvd.allreduce(given, name="shapes", compression=TOP))(tf.ones([4 + rank]))
    with pytest.raises(ArgumentError, match="op='Min' is not allowed: give Average or Sum"):
        hvd.allreduce(given, compression=TOP, op=hvd.Min)
    with pytest.raises(UnsupportedError, match="op=Adasum cannot"):
        hvd.allreduce(given, compression=TOP, op=hvd.Adasum)
    for allreduce in (hvd.allreduce, stock.allreduce):
        variable = tf.Variable(tf.ones(4))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(allreduce(variable, name="gradient", compression=TOP))
        with pytest.raises(UnsupportedError, match="requires a gradient"):
            tape.gradient(loss, variable)
