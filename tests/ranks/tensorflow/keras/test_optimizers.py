"""Keras 3: what an optimizer remembers, callbacks, learning rates, plans, and what is refused."""

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd
from conformance.keras import Interruption, check_resumed, distributed, halfway, residuals
from horovod_sparse.errors import StateMismatchError, UnsupportedError
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.training.checkpoint import write_checkpoint
from support.keras_models import BATCH_SIZE, fit, flat, keras, loss_of, make_model, share, trained_densely
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


@pytest.mark.parametrize("compression", ["topk:density=0.1", "none"])
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
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="topk:density=0.1")
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
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="topk:density=0.1")
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
