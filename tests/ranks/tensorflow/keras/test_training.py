"""Keras 3: callbacks, learning rates, loss scaling, and what is refused."""

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.errors import UnsupportedError
from support.keras_models import BATCH_SIZE, fit, flat, keras, loss_of, make_model, share, trained_densely

SPARSE = "topk:density=0.1"


def test_broadcast_leaves_local_variables_alone(rank):
    model = make_model(seed=rank)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * (rank + 1))), loss="mse")
    local = model.layers[1].bias
    local.assign(local + rank)
    before = local.numpy()
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local)
    callback.set_model(model)
    callback.on_train_begin()
    np.testing.assert_array_equal(local.numpy(), before)
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.1)
    np.testing.assert_array_equal(model.layers[0].kernel.numpy(), make_model(seed=0).layers[0].kernel.numpy())


def test_a_metric_of_one_rank_is_its_own_on_all(rank, size):
    logs = {"loss": 1.0 + rank, **({"val_loss": 3.0} if rank == 0 else {})}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (size + 1) / 2, "val_loss": 3.0}


def test_momentum_correction_is_that_of_horovod(rank, size):
    """Scaling the velocity comes to scaling the momentum for the step, as Goyal et al. have it."""
    model, by_hand = make_model(), make_model()
    rates = [0.1, 0.05, 0.05]
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: rates[epoch] / 0.1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    fit(model, optimizer, rank, size, epochs=3, callbacks=[callback])

    images, labels = share(rank, size)
    loss = loss_of()
    velocity = [np.zeros(variable.shape, np.float32) for variable in by_hand.trainable_weights]
    before = rates[0]
    for rate in rates:
        for start in range(0, len(labels), BATCH_SIZE):
            chosen = slice(start, start + BATCH_SIZE)
            with tf.GradientTape() as tape:
                value = loss(labels[chosen], by_hand(images[chosen]))
            for i, gradient in enumerate(tape.gradient(value, by_hand.trainable_weights)):
                mean = hvd.allreduce(gradient, name=f"by_hand.{i}").numpy()
                velocity[i] = 0.9 * (rate / before) * velocity[i] - rate * mean
                by_hand.trainable_weights[i].assign_add(velocity[i])
            before = rate
    np.testing.assert_allclose(flat(model), flat(by_hand), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("compression", [SPARSE, "none"])
def test_xla_is_refused(compression, rank, size):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
    with pytest.raises(UnsupportedError, match="jit_compile=False"):
        fit(make_model(), optimizer, rank, size, jit_compile=True)


def test_indexed_slices(rank, size, everywhere):
    """Gradients of an embedding: gathered as they are, or sparsified; with one rank's words each."""
    words = np.array([[1, 2], [2, 3]]) + rank
    results = {}
    for sparse_as_dense in (False, True):
        table = keras.layers.Embedding(8, 4, embeddings_initializer="ones")
        model = keras.Sequential([keras.layers.Input((2,), dtype="int32"), table, keras.layers.Flatten()])
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), compression="topk:density=1.0", sparse_as_dense=sparse_as_dense
        )
        model.compile(optimizer, loss="mse")
        model.fit(words, np.zeros((2, 8), np.float32), batch_size=2, epochs=2, shuffle=False, verbose=0)
        results[sparse_as_dense] = flat(model)
        weights = everywhere(flat(model))
        assert (weights == weights[0]).all()
    np.testing.assert_allclose(results[True], results[False], rtol=1e-6)
    assert len(np.unique(results[True])) > 2


def test_telemetry_goes_into_the_logs(tmp_path, rank, size):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=SPARSE)
    model = make_model()
    callbacks = [
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.TelemetryCallback(),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
    ]
    history = fit(model, optimizer, rank, size, epochs=1, callbacks=callbacks).history
    last = optimizer.telemetry.last
    assert history["sparse/density_union"][-1] == last.density_union > 0
    assert "sparse/residual_norm" in (tmp_path / "log.csv").read_text().splitlines()[0]
    assert model.jit_compile is False


def test_a_layer_is_frozen_and_thawed_with_the_same_optimizer(rank, size, everywhere):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=SPARSE)
    layer, moved = model.layers[0], []
    for trainable in (True, False, True):
        layer.trainable = trainable
        before = layer.kernel.numpy()
        fit(model, optimizer, rank, size, epochs=1)
        moved.append(not np.array_equal(before, layer.kernel.numpy()))
    assert moved == [True, False, True]
    weights = everywhere(flat(model))
    assert (weights == weights[0]).all()


def test_fit_takes_a_plan_by_measured_times(rank, size, everywhere):
    model, compression = make_model(), hvd.Compression.topk(density=1.0)
    images, labels = share(rank, size)
    made = hvd.measured_profile(
        lambda: loss_of()(labels, model(images)), model.trainable_variables, compression
    )
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, compression=compression, merging="optimal", profile=made)
    fit(model, optimizer, rank, size)
    expected = flat(trained_densely(keras.optimizers.SGD(0.1, momentum=0.9), rank, size))
    np.testing.assert_allclose(flat(model), expected, rtol=1e-4, atol=1e-6)
    assert optimizer.plan == optimizer.decision.plan is not None
    assert (everywhere(flat(model)) == flat(model)).all()
