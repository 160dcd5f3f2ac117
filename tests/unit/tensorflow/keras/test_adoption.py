"""Optimizers of Keras that a feedback does a part of the work of; with one rank."""

import copy

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import horovod_sparse.tensorflow as hvd_tf  # noqa: E402
import horovod_sparse.tensorflow.keras as hvd  # noqa: E402
from horovod_sparse.errors import ArgumentError, UnsupportedError  # noqa: E402

pytestmark = pytest.mark.tensorflow
keras = tf.keras
EVERYTHING = "topk:density=1.0,feedback=adam"
GRADIENTS = [np.array(one, np.float32) for one in ([1.0, -3.0], [0.5, 2.0], [-4.0, 0.25])]


@pytest.fixture(scope="module", autouse=True)
def started():
    hvd.init()


def adamw(rate=0.5, **more):
    return keras.optimizers.AdamW(rate, weight_decay=0.125, beta_2=0.9, epsilon=1e-3, **more)


def stepped(rates=(0.5,) * 3):
    """By the equations, from ones."""
    weight, moment = np.ones(2), np.zeros(2)
    for number, (gradient, rate) in enumerate(zip(GRADIENTS, rates, strict=True), 1):
        moment = 0.9 * moment + 0.1 * gradient.astype(np.float64) ** 2
        step = rate * gradient / (np.sqrt(moment / (1 - 0.9**number)) + 1e-3)
        weight = weight * (1 - rate * 0.125) - step
    return weight


def trained(optimizer, graph, scale=1.0):
    weight = keras.Variable(np.ones(2, np.float32))
    optimizer.build([weight])
    step = tf.function(lambda gradient: optimizer.apply([gradient], [weight]))
    for gradient in GRADIENTS:
        (step if graph else step.python_function)(tf.constant(scale * gradient))
    return weight.numpy()


@pytest.mark.parametrize("feedback", ["adam", "best"])
@pytest.mark.parametrize("graph", [False, True])
def test_everything_sent_is_adam_without_a_first_moment(graph, feedback):
    given = adamw()
    optimizer = hvd.DistributedOptimizer(given, compression=f"topk:density=1.0,feedback={feedback}")
    assert optimizer is given
    np.testing.assert_allclose(trained(optimizer, graph), stepped(), rtol=1e-5)
    assert sum(variable.shape == (2,) for variable in optimizer.variables) == 0, "it has no moments"
    assert optimizer.get_config()["weight_decay"] == 0.125
    for again in (copy.deepcopy(optimizer), type(optimizer).from_config(optimizer.get_config())):
        np.testing.assert_allclose(trained(again, graph), stepped(), rtol=1e-5)


def test_schedules_and_loss_scales_go_on():
    rates = (0.5, 0.5, 0.25)
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], list(rates[1:]))
    optimizer = hvd.DistributedOptimizer(adamw(schedule), compression=EVERYTHING)
    np.testing.assert_allclose(trained(optimizer, True), stepped(rates), rtol=1e-5)
    scaler = keras.optimizers.LossScaleOptimizer(adamw(), initial_scale=64.0)
    optimizer = hvd.DistributedOptimizer(scaler, compression=EVERYTHING)
    np.testing.assert_allclose(trained(optimizer, True, scale=64.0), stepped(), rtol=1e-5)


def test_rmsprop_adds_its_epsilon_within_the_root():
    own = keras.optimizers.RMSprop(0.25, rho=0.9, momentum=0.5, epsilon=1e-12)
    optimizer = hvd.DistributedOptimizer(own, compression=hvd.Compression.best(density=1.0))
    weight, moment = np.ones(2), np.zeros(2)
    for gradient in GRADIENTS:
        moment = 0.9 * moment + 0.1 * gradient.astype(np.float64) ** 2
        weight -= 0.5 * gradient / np.sqrt(moment + 1e-12)
    np.testing.assert_allclose(trained(optimizer, True), weight, rtol=1e-4)  # beside the root, its own root
    assert sum(variable.shape == (2,) for variable in optimizer.variables) == 0


def test_the_best_of_sgd_goes_as_far_without_momentum():
    sgd = keras.optimizers.SGD(0.1, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(sgd, compression=hvd.Compression.best(density=1.0))
    np.testing.assert_allclose(trained(optimizer, True), 1.0 - 0.2 * sum(GRADIENTS), rtol=1e-5)
    assert not any(variable.shape == (2,) for variable in optimizer.variables)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: adamw(amsgrad=True), "amsgrad=True.*give False"),
        (lambda: adamw(global_clipnorm=1.0), "clip_norm to the feedback"),
        (lambda: keras.optimizers.RMSprop(0.1), "optimizer='RMSprop'.*AdamW"),
        (lambda: keras.optimizers.SGD(0.1), "optimizer='SGD'.*feedback='error'"),
    ],
    ids=["amsgrad", "clipping", "RMSprop", "SGD"],
)
def test_what_cannot_be_adopted_is_refused(make, words):
    with pytest.raises(ArgumentError, match=words):
        hvd.DistributedOptimizer(make(), compression=EVERYTHING)


def test_gradients_that_no_feedback_sees_are_refused():
    optimizer = hvd.DistributedOptimizer(adamw(), compression=EVERYTHING)
    table = keras.Variable(np.ones((3, 2), np.float32))
    with pytest.raises(UnsupportedError, match="local variables"):
        optimizer.register_local_var(table)
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2]))
    with pytest.raises(UnsupportedError, match="sparse_as_dense=True"):
        optimizer.apply([slices], [table])


def test_a_tape_gives_steps_to_plain_sgd():
    compression = hvd.Compression.topk(density=1.0, feedback="adam(beta2=0.9,eps=0.001)")
    weight, sgd = keras.Variable(np.ones(2, np.float32)), keras.optimizers.SGD(0.5, weight_decay=0.125)
    for gradient in GRADIENTS:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(weight * gradient)
        tape = hvd_tf.DistributedGradientTape(tape, compression=compression)
        sgd.apply(tape.gradient(loss, [weight.value]), [weight])
    np.testing.assert_allclose(weight.numpy(), stepped(), rtol=1e-5)
    with pytest.raises(ArgumentError, match=r"learning_rate=0.5.*plain keras.optimizers.SGD"):
        tape.gradient(loss, [weight.value], learning_rate=0.5)
