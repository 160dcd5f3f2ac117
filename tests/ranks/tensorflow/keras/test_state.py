"""Keras 3: what an optimizer remembers survives files of Keras and of TensorFlow, and broadcasts."""

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd
from conformance.keras import Interruption, check_resumed, distributed, halfway, residuals
from horovod_sparse.errors import StateMismatchError, UnsupportedError
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.training.checkpoint import write_checkpoint
from support.keras_models import fit, flat, keras, make_model
from support.sampling import rows_by


def test_residuals_are_no_variables_and_differ(everywhere):
    model, optimizer = halfway()
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


def test_the_callback_in_a_process_set(folder, process_set, rank):
    ranks = process_set([0])
    for epochs, loaded in ((1, None), (2, 6)) if rank == 0 else ():
        saves = hvd.callbacks.CheckpointCallback(folder)
        fit(make_model(), distributed(process_set=ranks), 0, 1, epochs=epochs, callbacks=[saves])
        assert saves.loaded_step == loaded


def test_save_and_load_on_all_ranks(folder, rank, size, everywhere):
    with pytest.raises(UnsupportedError, match="first step"):
        hvd.save(folder, distributed())
    model, optimizer = halfway()
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
        trained = distributed(compression="topk:density=0.1")
        fit(make_model(), trained, rank, size, epochs=1)
        hvd.load(folder, trained)
    assert hvd.load(folder, other, variables=variables) == 12
    fit(again, other, rank, size, epochs=2)
    check_resumed(again, other)

    # of one rank more, which this rank writes all the files of
    if rank == 0:
        entry, held = optimizer.state_dict(), optimizer.state_dict()["residuals"]
        entries = [
            entry
            | {"rank": one, "size": size + 1, "training": {"variables": []}}
            | {"residuals": {name: values * (one + 1) for name, values in held.items()}}
            for one in range(size + 1)
        ]
        whole = {"step": 12, "digest": "d", "keep": 1}
        run_lockstep([write_checkpoint(folder / "more", one, rank=one["rank"], **whole) for one in entries])
    everywhere(np.zeros(1))  # written
    assert hvd.load(folder / "more", other) == 12
    expected = np.mean([everywhere(residuals(optimizer))[0] * (one + 1) for one in range(size + 1)], axis=0)
    np.testing.assert_allclose(everywhere(residuals(other)).mean(axis=0), expected, rtol=1e-5, atol=1e-6)


@rows_by(
    "way,late",
    ["BackupAndRestore", "CheckpointCallback", "ModelCheckpoint", "tf.train.Checkpoint"],
    [{}, {"every": 2, "delay": 1}],
)
def test_own_steps_go_on_bit_for_bit(way, late, tmp_path, folder, rank, size):
    """With second moments, this rank's own moves, and what is in flight."""
    arguments = {"compression": "best:density=0.1", **late}

    def made():
        return hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), **arguments)

    def trained(model, optimizer, epochs, **more):
        fit(model, optimizer, rank, size, epochs=epochs, **more)
        return model, optimizer

    expected = trained(make_model(), made(), 4)
    path = str(tmp_path / f"rank-{rank}.keras")
    if way == "BackupAndRestore":
        saves = [keras.callbacks.BackupAndRestore(path)]
        with pytest.raises(KeyboardInterrupt):
            trained(make_model(), made(), 4, callbacks=[*saves, Interruption()])
        again = trained(make_model(seed=2), made(), 4, callbacks=saves)
    elif way == "CheckpointCallback":
        trained(make_model(), made(), 2, callbacks=[hvd.callbacks.CheckpointCallback(folder)])
        again = trained(make_model(seed=2), made(), 4, callbacks=[hvd.callbacks.CheckpointCallback(folder)])
    elif way == "ModelCheckpoint":
        trained(make_model(), made(), 2, callbacks=[keras.callbacks.ModelCheckpoint(path)])
        model = hvd.load_model(path, **arguments)
        again = trained(model, model.optimizer, 2)
    else:
        model, optimizer = trained(make_model(), made(), 2)
        path = tf.train.Checkpoint(model=model, optimizer=optimizer).write(path)
        model, optimizer = make_model(seed=2), made()
        optimizer.build(model.trainable_weights)
        tf.train.Checkpoint(model=model, optimizer=optimizer).read(path).assert_existing_objects_matched()
        again = trained(model, optimizer, 2)
    np.testing.assert_array_equal(flat(again[0]), flat(expected[0]))
    np.testing.assert_array_equal(residuals(again[1]), residuals(expected[1]))
    assert again[1].state_dict()["step"] == expected[1].state_dict()["step"] > 0
