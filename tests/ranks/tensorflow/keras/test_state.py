"""Keras 3: what an optimizer remembers survives files of Keras and of TensorFlow, and broadcasts."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.errors import StateMismatchError
from support.keras_models import fit, flat, keras, make_model, share

SPARSE = "exdyna:density=0.05"

pytestmark = pytest.mark.once


def distributed(compression=SPARSE, **arguments):
    return hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), compression=compression, **arguments
    )


def residuals(optimizer):
    return np.concatenate([values.reshape(-1) for values in optimizer.state_dict()["residuals"].values()])


@pytest.fixture(scope="module")
def uninterrupted():
    """Six epochs at a stretch: weights and residuals."""
    model, optimizer = make_model(), distributed()
    fit(model, optimizer, hvd.rank(), hvd.size(), epochs=6)
    return flat(model), residuals(optimizer)


def check_resumed(model, optimizer, uninterrupted):
    np.testing.assert_array_equal(flat(model), uninterrupted[0])
    np.testing.assert_array_equal(residuals(optimizer), uninterrupted[1])


def test_residuals_are_no_variables_and_differ(rank, size, everywhere):
    model, optimizer = make_model(), distributed()
    fit(model, optimizer, rank, size)
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    plain.build(model.trainable_weights)
    assert len(optimizer.variables) == len(plain.variables)
    held = everywhere(residuals(optimizer))
    assert np.abs(held).min(axis=1).max() == 0  # what was sent is gone
    assert np.abs(held).max(axis=1).min() > 0
    assert not (held == held[0]).all()


def test_broadcast_leaves_residuals_alone(rank, size):
    model, optimizer = make_model(), distributed()
    fit(model, optimizer, rank, size)
    before = residuals(optimizer)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()
    np.testing.assert_array_equal(residuals(optimizer), before)


def test_checkpoint_of_tensorflow(uninterrupted, tmp_path, rank, size):
    model, optimizer = make_model(), distributed()
    fit(model, optimizer, rank, size, epochs=3)
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(tmp_path / f"rank-{rank}"))
    again, other = make_model(seed=2), distributed()
    again.compile(other, loss="mse")
    other.build(again.trainable_weights)
    tf.train.Checkpoint(model=again, optimizer=other).read(path).assert_existing_objects_matched()
    fit(again, other, rank, size, epochs=3)
    check_resumed(again, other, uninterrupted)


class Interruption(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 3:
            raise KeyboardInterrupt


def test_backup_and_restore(uninterrupted, tmp_path, rank, size):
    backup = str(tmp_path / f"rank-{rank}")
    with pytest.raises(KeyboardInterrupt):
        fit(
            make_model(),
            distributed(),
            rank,
            size,
            epochs=6,
            callbacks=[keras.callbacks.BackupAndRestore(backup), Interruption()],
        )
    model, optimizer = make_model(seed=2), distributed()
    callbacks = [
        keras.callbacks.BackupAndRestore(backup),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    ]
    fit(model, optimizer, rank, size, epochs=6, callbacks=callbacks)
    check_resumed(model, optimizer, uninterrupted)


def test_saved_model(uninterrupted, tmp_path, rank, size):
    """Loaded by ours it goes on; loaded by Keras it is an ordinary model."""
    path = str(tmp_path / f"rank-{rank}.keras")
    model = make_model()
    fit(model, distributed(), rank, size, epochs=3)
    model.save(path)

    ordinary = keras.models.load_model(path)
    assert type(ordinary.optimizer) is keras.optimizers.SGD
    np.testing.assert_array_equal(
        ordinary.optimizer.momentums[0].numpy(), model.optimizer.momentums[0].numpy()
    )

    again = hvd.load_model(path, compression=SPARSE)
    images, labels = share(rank, size)
    again.fit(images, labels, batch_size=5, epochs=3, shuffle=False, verbose=0)
    check_resumed(again, again.optimizer, uninterrupted)


def test_state_dict(uninterrupted, rank, size):
    model, optimizer = make_model(), distributed()
    fit(model, optimizer, rank, size, epochs=3)
    again, other = make_model(seed=2), distributed()
    other.build(again.trainable_weights)
    other.load_state_dict(optimizer.state_dict())  # before there are buckets
    assert other.state_dict()["step"] == 18
    again.set_weights(model.get_weights())
    for mine, theirs in zip(other.variables, optimizer.variables, strict=True):
        mine.assign(theirs)
    fit(again, other, rank, size, epochs=3)
    check_resumed(again, other, uninterrupted)
    other.load_state_dict(None)
    assert not residuals(other).any()


def test_state_of_another_algorithm_is_refused(rank, size):
    model, optimizer = make_model(), distributed()
    fit(model, optimizer, rank, size, epochs=1)
    other = distributed("topk:density=0.1")
    fit(make_model(), other, rank, size, epochs=1)
    before = residuals(other)
    with pytest.raises(StateMismatchError, match="exdyna"):
        other.load_state_dict(optimizer.state_dict())
    np.testing.assert_array_equal(residuals(other), before)


def test_config_makes_another_distributed_optimizer(uninterrupted, rank, size):
    optimizer = distributed()
    again = type(optimizer).from_config(optimizer.get_config())
    model = make_model()
    fit(model, again, rank, size, epochs=6)
    check_resumed(model, again, uninterrupted)
    assert optimizer.telemetry.num_steps == 0
