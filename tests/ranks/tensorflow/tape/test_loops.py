"""Loops that users write: computed twice, in graphs, bound by hand, and looked into by a switch."""

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from conformance.engine import replicas_agree, run, same
from conformance.engines_tensorflow import TAPES


def weights(count):
    drawn = np.random.default_rng(0)
    return [tf.Variable(drawn.normal(size=(6, 6), scale=0.4).astype(np.float32)) for _ in range(count)]


#: of the steps
GRAPH = [True, pytest.param(False, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("graph", GRAPH)
def test_layers_that_are_computed_again_train_alike(graph, rank, everywhere):
    results = []
    for again in (False, True):
        variables, compression = weights(3), hvd.Compression.topk(density=0.2)

        def layer(x, weight):
            return tf.tanh(x @ weight)

        def loss_of(x, variables=variables, layer=layer, again=again):
            for weight in variables:
                own = lambda x, weight=weight: layer(x, weight)  # noqa: E731
                x = tf.recompute_grad(own)(x) if again else own(x)
            return tf.reduce_sum(x * x)

        def step(number, variables=variables, compression=compression, loss_of=loss_of):
            with tf.GradientTape() as local:
                loss = loss_of(tf.cos(tf.range(12.0) * (1.0 + rank) + number)[:, None] * tf.ones([1, 6]))
            tape = hvd.DistributedGradientTape(local, compression=compression)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.05 * gradient)

        taken = tf.function(step) if graph else step
        for number in range(4):
            taken(tf.constant(float(number)))
        assert compression.telemetry.num_steps == 4
        results.append(np.concatenate([variable.numpy().reshape(-1) for variable in variables]))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6, atol=1e-7)
    assert (everywhere(results[1]) == results[1]).all()


def test_a_loop_in_a_graph_synchronizes_every_pass(rank, size):
    variable = tf.Variable(tf.zeros([64]))
    compression = hvd.Compression.exdyna(density=0.25)
    synchronizer = compression.bind(process_set=hvd.global_process_set, average=False)

    @tf.function
    def loop(count):
        for i in tf.range(count):
            gradient = tf.fill([64], tf.cast(i + 1, tf.float32))
            variable.assign_add(synchronizer.synchronize([gradient], [variable])[0])

    loop(tf.constant(5))
    assert synchronizer.step == 5
    part = synchronizer.sparse[0]
    mean = hvd.allreduce(tf.constant(part.bucket.accumulator.values()), op=hvd.Sum, name="held").numpy()
    assert np.array_equal(variable.numpy() + mean, np.full(64, 15.0 * size, np.float32)), "law 1"


def test_the_same_bucket_twice_in_one_graph_is_done_in_order(rank, size):
    variable = tf.Variable(tf.zeros([64]))
    compression = hvd.Compression.topk(density=1.0)
    synchronizer = compression.bind(process_set=hvd.global_process_set, average=False)

    @tf.function
    def twice(first, second):
        return [synchronizer.synchronize([gradient], [variable])[0] for gradient in (first, second)]

    for _ in range(3):
        first, second = twice(tf.ones([64]), tf.fill([64], 2.0))
        assert first.numpy()[0] == size and second.numpy()[0] == 2 * size
    assert synchronizer.step == 6


@pytest.mark.parametrize("tape", ["graph", "stock"])
def test_a_tape_trains_as_without_it(rank, size, tape):
    made = next(one for one in TAPES if one.name == tape)
    expected, training = made.train("exdyna:density=0.2"), made.train("exdyna:density=0.2")
    run(expected, made, range(2))
    tf.config.run_functions_eagerly(True)
    try:
        run(training, made, range(2))
    finally:
        tf.config.run_functions_eagerly(False)
    assert same(training, expected) and replicas_agree(made, training)
