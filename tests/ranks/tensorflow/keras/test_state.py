"""Keras 3: what an optimizer remembers survives files of Keras and of TensorFlow, and broadcasts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.errors import StateMismatchError, UnsupportedError
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.tensorflow import broadcast_object
from horovod_sparse.training.checkpoint_folder import write_checkpoint
from support.keras_models import fit, flat, keras, make_model, share

SPARSE = "exdyna:density=0.05"


def distributed(compression=SPARSE, **arguments):
    return hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), compression=compression, **arguments
    )


def residuals(optimizer):
    return np.concatenate([values.reshape(-1) for values in optimizer.state_dict()["residuals"].values()])


@pytest.fixture(scope="module")
def uninterrupted():
    """Four epochs at a stretch: weights and residuals."""
    model, optimizer = make_model(), distributed()
    fit(model, optimizer, hvd.rank(), hvd.size(), epochs=4)
    return flat(model), residuals(optimizer)


@pytest.fixture(scope="module")
def halfway():
    """Two epochs of it; nobody goes on with these."""
    model, optimizer = make_model(), distributed()
    fit(model, optimizer, hvd.rank(), hvd.size(), epochs=2)
    return model, optimizer


def check_resumed(model, optimizer, uninterrupted):
    np.testing.assert_array_equal(flat(model), uninterrupted[0])
    np.testing.assert_array_equal(residuals(optimizer), uninterrupted[1])


def test_residuals_are_no_variables_and_differ(halfway, everywhere):
    """And a broadcast leaves them alone."""
    model, optimizer = halfway
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    plain.build(model.trainable_weights)
    assert len(optimizer.variables) == len(plain.variables)
    held = everywhere(residuals(optimizer))
    assert np.abs(held).min(axis=1).max() == 0  # what was sent is gone
    assert np.abs(held).max(axis=1).min() > 0
    assert not (held == held[0]).all()
    before = residuals(optimizer)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()
    np.testing.assert_array_equal(residuals(optimizer), before)


def test_checkpoint_of_tensorflow(uninterrupted, halfway, tmp_path, rank, size):
    model, optimizer = halfway
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(tmp_path / f"rank-{rank}"))
    again, other = make_model(seed=2), distributed()
    again.compile(other, loss="mse")
    other.build(again.trainable_weights)
    tf.train.Checkpoint(model=again, optimizer=other).read(path).assert_existing_objects_matched()
    fit(again, other, rank, size, epochs=2)
    check_resumed(again, other, uninterrupted)


class Interruption(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


@pytest.mark.nightly
def test_backup_and_restore(uninterrupted, tmp_path, rank, size):
    backup = str(tmp_path / f"rank-{rank}")
    with pytest.raises(KeyboardInterrupt):
        fit(
            make_model(),
            distributed(),
            rank,
            size,
            epochs=4,
            callbacks=[keras.callbacks.BackupAndRestore(backup), Interruption()],
        )
    model, optimizer = make_model(seed=2), distributed()
    callbacks = [
        keras.callbacks.BackupAndRestore(backup),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    ]
    fit(model, optimizer, rank, size, epochs=4, callbacks=callbacks)
    check_resumed(model, optimizer, uninterrupted)


def test_saved_model(uninterrupted, halfway, tmp_path, rank, size):
    """Loaded by ours it goes on; loaded by Keras it is an ordinary model."""
    path = str(tmp_path / f"rank-{rank}.keras")
    model, _ = halfway
    model.save(path)

    ordinary = keras.models.load_model(path)
    assert type(ordinary.optimizer) is keras.optimizers.SGD
    np.testing.assert_array_equal(
        ordinary.optimizer.momentums[0].numpy(), model.optimizer.momentums[0].numpy()
    )

    again = hvd.load_model(path, compression=SPARSE)
    images, labels = share(rank, size)
    again.fit(images, labels, batch_size=5, epochs=2, shuffle=False, verbose=0)
    check_resumed(again, again.optimizer, uninterrupted)


@pytest.fixture
def folder(rank):
    """The same on all ranks."""
    made = tempfile.mkdtemp() if rank == 0 else None
    return Path(broadcast_object(made, 0, name="folder"))


@pytest.mark.parametrize("save_freq", ["epoch", pytest.param(6, marks=pytest.mark.nightly)])
def test_the_callback_saves_and_goes_on(uninterrupted, folder, save_freq, rank, size):
    """Six batches are an epoch: so both save after the same steps."""
    saves = hvd.callbacks.CheckpointCallback(folder, save_freq)
    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), distributed(), rank, size, epochs=4, callbacks=[saves, Interruption()])
    assert saves.loaded_step is None
    model, optimizer = make_model(seed=2), distributed()
    goes_on = hvd.callbacks.CheckpointCallback(folder, "epoch")
    callbacks = [goes_on, hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    history = fit(model, optimizer, rank, size, epochs=4, callbacks=callbacks)
    assert goes_on.loaded_step == 12
    if save_freq == "epoch":
        check_resumed(model, optimizer, uninterrupted)
        assert history.epoch == [2, 3]


def test_the_callback_in_a_process_set(folder, process_set, rank):
    """The other ranks take no part."""
    ranks = process_set([0])
    for epochs, loaded in ((1, None), (2, 6)) if rank == 0 else ():
        saves = hvd.callbacks.CheckpointCallback(folder)
        fit(make_model(), distributed(process_set=ranks), 0, 1, epochs=epochs, callbacks=[saves])
        assert saves.loaded_step == loaded


def test_save_and_load_on_all_ranks(uninterrupted, halfway, folder, rank, size, everywhere):
    with pytest.raises(UnsupportedError, match="first step"):
        hvd.save(folder, distributed())
    model, optimizer = halfway
    assert hvd.save(folder, optimizer, variables=[*model.variables, *optimizer.variables]) == 12

    again, other = make_model(seed=2), distributed()
    other.build(again.trainable_weights)
    variables = [*again.variables, *other.variables]
    before = flat(again)
    for wrong in (variables[1:], [variables[1 if rank == 0 else 0], *variables[1:]]):
        with pytest.raises(StateMismatchError, match=r"variables|another model"):
            hvd.load(folder, other, variables=wrong)
    np.testing.assert_array_equal(flat(again), before)
    with pytest.raises(StateMismatchError, match="exdyna"):
        trained = distributed("topk:density=0.1")
        fit(make_model(), trained, rank, size, epochs=1)
        hvd.load(folder, trained)
    assert hvd.load(folder, other, variables=variables) == 12
    fit(again, other, rank, size, epochs=2)
    check_resumed(again, other, uninterrupted)

    # of one rank more, which this rank writes all the files of
    if rank == 0:
        entry, held = optimizer.state_dict(), optimizer.state_dict()["residuals"]
        entries = [
            entry
            | {"rank": one, "size": size + 1, "training": {"variables": []}}
            | {"residuals": {name: values * (one + 1) for name, values in held.items()}}
            for one in range(size + 1)
        ]
        run_lockstep(
            [
                write_checkpoint(folder / "more", one, step=12, digest="d", rank=one["rank"], keep=1)
                for one in entries
            ]
        )
    everywhere(np.zeros(1))  # written
    assert hvd.load(folder / "more", other) == 12
    expected = np.mean([everywhere(residuals(optimizer))[0] * (one + 1) for one in range(size + 1)], axis=0)
    np.testing.assert_allclose(everywhere(residuals(other)).mean(axis=0), expected, rtol=1e-5, atol=1e-6)
