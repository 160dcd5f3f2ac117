"""tf-keras, new and legacy optimizers: equality, state, callbacks."""

from __future__ import annotations

import copy
import functools
import pickle
import tempfile

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.tensorflow import broadcast_object
from support.keras_models import fit, flat, keras, make_model, trained_densely

EVERYTHING = "topk:density=1.0"
SPARSE = "exdyna:density=0.05"
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
NIGHT = pytest.mark.nightly
#: of optimizers; by day each test takes one of the kinds where the other is nearly the same
KINDS = ["new", "legacy"]
NEW = ["new", pytest.param("legacy", marks=NIGHT)]
LEGACY = [pytest.param("new", marks=NIGHT), "legacy"]


def sgd(kind, rate=0.1, momentum=0.9):
    optimizers = keras.optimizers if kind == "new" else keras.optimizers.legacy
    return optimizers.SGD(rate, momentum=momentum)


def residuals(optimizer):
    return np.concatenate([values.reshape(-1) for values in optimizer.state_dict()["residuals"].values()])


@functools.cache
def uninterrupted(kind):
    """Four epochs at a stretch: weights and residuals."""
    model, optimizer = make_model(), hvd.DistributedOptimizer(sgd(kind), compression=SPARSE)
    fit(model, optimizer, stock.rank(), stock.size(), epochs=4)
    return flat(model), residuals(optimizer)


def check_resumed(model, optimizer, kind):
    weights, held = uninterrupted(kind)
    np.testing.assert_array_equal(flat(model), weights)
    np.testing.assert_array_equal(residuals(optimizer), held)
    assert held.any()


@pytest.mark.parametrize(
    ("kind", "run_eagerly"),
    [
        ("new", False),
        ("legacy", False),
        *(pytest.param(kind, True, marks=NIGHT) for kind in KINDS),
    ],
)
def test_everything_sent_is_dense_training(kind, run_eagerly, rank, size, everywhere):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(kind), compression=EVERYTHING)
    fit(model, optimizer, rank, size, run_eagerly=run_eagerly)
    np.testing.assert_allclose(flat(model), flat(trained_densely(sgd(kind), rank, size)), **CLOSE)
    weights = everywhere(flat(model))
    assert (weights == weights[0]).all()
    assert optimizer.telemetry.num_steps == 12


def test_dense_training_is_horovods(rank, size):
    optimizer = hvd.DistributedOptimizer(sgd("new"), compression="none")
    assert not hasattr(optimizer, "telemetry")
    assert type(optimizer).__module__ == type(stock.DistributedOptimizer(sgd("new"))).__module__


def test_sum_and_groups(rank, size):
    """Which Horovod drops for optimizers of Keras when they come by `horovod.tensorflow`."""
    import horovod_sparse.tensorflow as hvd_tf

    model = make_model()
    optimizer = hvd_tf.DistributedOptimizer(sgd("new", 0.05), compression=EVERYTHING, op=hvd.Sum, groups=2)
    fit(model, optimizer, rank, size)
    expected = trained_densely(sgd("new", 0.05), rank, size, op=stock.Sum)
    np.testing.assert_allclose(flat(model), flat(expected), rtol=1e-3, atol=1e-5)
    assert len(optimizer.state_dict()["plan"]["buckets"]) == 2


@pytest.mark.parametrize("kind", LEGACY)
def test_several_passes_per_step(kind, rank, size, everywhere):
    """Both passes of one step see the same weights: their gradients add up."""
    results = []
    for compression in (EVERYTHING, "none"):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            sgd(kind, 0.05, 0.0), compression=compression, backward_passes_per_step=2
        )
        fit(model, optimizer, rank, size, epochs=1)
        results.append(flat(model))
        weights = everywhere(results[-1])
        assert (weights == weights[0]).all()
    np.testing.assert_allclose(results[0], results[1], **CLOSE)


def test_local_layers(rank, size, everywhere):
    model = make_model()
    optimizer = hvd.PartialDistributedOptimizer(
        sgd("new"), compression=EVERYTHING, local_layers=[model.layers[0]]
    )
    fit(model, optimizer, rank, size)
    expected = trained_densely(sgd("new"), rank, size, kept=(0, 1))
    np.testing.assert_allclose(flat(model), flat(expected), **CLOSE)
    weights = everywhere(flat(model))
    assert not (weights == weights[0]).all()


@pytest.mark.parametrize("kind", LEGACY)
def test_checkpoint_goes_on_bit_for_bit(kind, tmp_path, rank, size):
    model, first = make_model(), hvd.DistributedOptimizer(sgd(kind), compression=SPARSE)
    fit(model, first, rank, size, epochs=2)
    path = tf.train.Checkpoint(model=model, optimizer=first).write(str(tmp_path / f"rank-{rank}"))
    again, second = make_model(seed=2), hvd.DistributedOptimizer(sgd(kind), compression=SPARSE)
    tf.train.Checkpoint(model=again, optimizer=second).read(path)
    fit(again, second, rank, size, epochs=2)
    check_resumed(again, second, kind)


@pytest.mark.parametrize("kind", LEGACY)
def test_saved_model_is_loaded_distributed(kind, tmp_path, rank, size, everywhere):
    path = str(tmp_path / f"{rank}.keras")
    # of an optimizer of the old kind tf-keras does not save the momentum
    plain = sgd(kind, momentum=0.9 if kind == "new" else 0.0)
    model, optimizer = make_model(), hvd.DistributedOptimizer(plain, compression=EVERYTHING)
    fit(model, optimizer, rank, size, epochs=1)
    model.save(path)
    again = hvd.load_model(path, compression=EVERYTHING)
    fit(model, model.optimizer, rank, size, epochs=1)
    fit(again, again.optimizer, rank, size, epochs=1)
    np.testing.assert_allclose(flat(again), flat(model), **CLOSE)
    assert again.optimizer.telemetry.num_steps == 6


@pytest.mark.parametrize("kind", NEW)
def test_callbacks(kind, rank, size, everywhere):
    """Broadcast, warm-up and averages: what Horovod's own cannot do beside Keras 3."""
    model = make_model(seed=rank)
    optimizer = hvd.DistributedOptimizer(sgd(kind, 0.1 * size), compression=SPARSE)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if not seen:
                seen.append(flat(self.model))

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(size - 1),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.1 * size, warmup_epochs=2),
        Look(),
    ]
    history = fit(model, optimizer, rank, size, epochs=3, callbacks=callbacks).history
    np.testing.assert_array_equal(seen[0], flat(make_model(seed=size - 1)))
    assert history["lr"] == pytest.approx([0.1 * (1 + 0.5 * (size - 1)), 0.1 * size, 0.1 * size])
    losses = everywhere(np.array(history["loss"]))
    assert (losses == losses[0]).all()
    weights = everywhere(flat(model))
    assert (weights == weights[0]).all()
    # error feedback has followed
    assert optimizer.state_dict()["buckets"][0]["learning_rate"] == pytest.approx(0.1 * size)


@pytest.mark.parametrize(
    ("kind", "eagerly"),
    [
        ("new", False),
        ("legacy", True),
        pytest.param("new", True, marks=NIGHT),
        pytest.param("legacy", False, marks=NIGHT),
    ],
)
def test_a_gradient_that_is_none_for_once_moves_no_other_variable(kind, eagerly):
    size, factors = stock.size(), (1.0, 10.0, 100.0)
    weights = [tf.Variable(tf.zeros([2]), name=f"w{i}") for i in range(3)]
    optimizer = hvd.DistributedOptimizer(sgd(kind, 1.0, 0.0), compression=EVERYTHING, op=stock.Sum)
    if kind == "new":
        optimizer.build(weights)

    def step(known):
        def loss():
            return tf.add_n([factors[i] * tf.reduce_sum(weights[i]) for i in known])

        optimizer.minimize(loss, weights)

    for known in ((0, 1, 2), (1, 2), (0, 1)):
        (functools.partial(step, known) if eagerly else tf.function(functools.partial(step, known)))()
    times = (2, 3, 2)
    assert [w.numpy().tolist() for w in weights] == [
        [-size * count * factor] * 2 for count, factor in zip(times, factors, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_distributed_or_refused(kind, rank, size):
    optimizer = hvd.DistributedOptimizer(sgd(kind, 0.5, 0.0), compression=EVERYTHING, op=stock.Sum)
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        weight = tf.Variable(tf.zeros([4]))
        again.minimize(lambda weight=weight: (rank + 1.0) * tf.reduce_sum(weight), [weight])
        assert weight.numpy().tolist() == [-0.5 * size * (size + 1) / 2] * 4
    model = make_model()
    model.compile(optimizer, "mse")
    with pytest.raises(UnsupportedError, match="clone_model"):
        copy.deepcopy(model)


@pytest.mark.parametrize("kind", LEGACY)
def test_a_step_that_is_given_up_in_a_graph_counts_nothing(kind, rank, size):
    optimizer = hvd.DistributedOptimizer(sgd(kind), compression=EVERYTHING)
    weight = tf.Variable(tf.ones([4]))

    @tf.function
    def step(factor):
        optimizer.minimize(lambda: tf.reduce_sum(factor * weight), [weight])

    step(tf.ones([4]))
    before = weight.numpy()
    with pytest.raises(tf.errors.OpError, match="not finite"):
        step(tf.fill([4], np.nan if rank == 0 else 1.0))
    np.testing.assert_array_equal(weight.numpy(), before)
    assert int(optimizer.iterations.numpy()) == 1


@pytest.mark.parametrize("kind", NEW)
def test_the_callback_saves_and_goes_on(kind, rank, size):
    folder = broadcast_object(tempfile.mkdtemp() if rank == 0 else None, 0, name="folder")
    saves = hvd.callbacks.CheckpointCallback(folder)
    fit(make_model(), hvd.DistributedOptimizer(sgd(kind), compression=SPARSE), rank, size, callbacks=[saves])
    model, optimizer = make_model(seed=2), hvd.DistributedOptimizer(sgd(kind), compression=SPARSE)
    goes_on = hvd.callbacks.CheckpointCallback(folder)
    history = fit(model, optimizer, rank, size, epochs=4, callbacks=[goes_on])
    assert (goes_on.loaded_step, history.epoch) == (12, [2, 3])
    check_resumed(model, optimizer, kind)
