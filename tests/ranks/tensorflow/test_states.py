"""What Horovod has beside its optimizers, with variables and layers of Keras 3."""

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from conformance.engine import run, same
from conformance.engines_tensorflow import TAPES
from horovod_sparse.errors import ArgumentError, UnsupportedError
from support.keras_models import fit, flat, keras, make_model

pytestmark = pytest.mark.tensorflow


def test_every_kind_of_variable_is_broadcast(rank, size):
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    dtypes = (tf.bfloat16, tf.float16, tf.int8, tf.uint64, tf.bool, tf.float64)
    variables = [tf.Variable(tf.cast([rank, 1], dtype), name=f"of_rank_{rank}") for dtype in dtypes]
    variables += [tf.Variable(tf.zeros([0])), *(variable.value for variable in model.variables)]
    assert len(model.variables) == 3  # one of them the dropout's
    expected = hvd.broadcast_object([variable.numpy() for variable in variables], root_rank=size - 1)
    hvd.broadcast_variables([*variables[:7], *model.variables], root_rank=size - 1)
    for variable, values in zip(variables, expected, strict=True):
        np.testing.assert_array_equal(variable.numpy(), values)
    with pytest.raises(UnsupportedError, match="string"):
        hvd.broadcast_variables([tf.Variable("words")], 0)


def test_the_state_of_a_model(rank, size):
    model = make_model(seed=rank)
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression="topk")
    state = hvd_keras.elastic.KerasState(model, optimizer, batch=20 + rank, epoch=10 + rank)
    state.sync()
    np.testing.assert_array_equal(flat(model), flat(make_model(seed=0)))
    assert (state.batch, state.epoch) == (20, 10)
    callbacks = [
        hvd_keras.elastic.UpdateBatchStateCallback(state),
        hvd_keras.elastic.UpdateEpochStateCallback(state),
        hvd_keras.elastic.CommitStateCallback(state, batches_per_commit=100),
    ]
    state.epoch = 0
    fit(model, optimizer, rank, size, epochs=1, callbacks=callbacks)
    assert (state.batch, state.epoch) == (0, 1)
    committed, moving = flat(model), [variable.numpy() for variable in optimizer.variables]
    assert int(optimizer.iterations) == 6
    held = optimizer.state_dict()
    fit(model, optimizer, rank, size, epochs=1)
    state.batch = 21
    assert (flat(model) != committed).any()
    state.restore()
    np.testing.assert_array_equal(flat(model), committed)
    for variable, value in zip(optimizer.variables, moving, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    restored = optimizer.state_dict()
    assert restored["step"] == held["step"] == 6
    for name, residual in held["residuals"].items():
        np.testing.assert_array_equal(restored["residuals"][name], residual)
    assert state.batch == 0
    with pytest.raises(ArgumentError, match="built"):
        hvd_keras.elastic.KerasState(keras.Sequential([keras.layers.Dense(2)]), optimizer)


def test_the_state_of_variables(rank):
    """Synchronized when all ranks ask for it: a worker that joins makes its state alone."""
    variables = [tf.Variable([1.0 + rank] * 3), make_model(seed=rank).layers[0].kernel]
    if rank == 0:
        hvd.elastic.TensorFlowState(variables, batch=1)
    state = hvd.elastic.TensorFlowState(variables, batch=20 + rank)
    state.sync()
    np.testing.assert_array_equal(variables[0].numpy(), [1.0] * 3)
    np.testing.assert_array_equal(variables[1].numpy(), make_model(seed=0).layers[0].kernel.numpy())
    assert state.batch == 20
    variables[0].assign([5.0] * 3)
    state.restore()
    np.testing.assert_array_equal(variables[0].numpy(), [1.0] * 3)
    variables[0].assign([5.0] * 3)
    state.commit()
    state.restore()
    np.testing.assert_array_equal(variables[0].numpy(), [5.0] * 3)


def test_graphs_of_tensorflow_1_are_refused(rank):
    import horovod.tensorflow as stock

    def gradients(wrap):
        with tf.Graph().as_default():
            weight = tf.compat.v1.get_variable("weight", [2], use_resource=True)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight)
            return wrap(tape, compression=hvd.Compression.topk(density=1.0)).gradient(loss, [weight])

    for wrap in (hvd.DistributedGradientTape, stock.DistributedGradientTape):
        with pytest.raises(UnsupportedError, match="graph of TensorFlow 1"):
            gradients(wrap)
    with tf.Graph().as_default(), pytest.raises(UnsupportedError, match="graph of TensorFlow 1"):
        plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        optimizer = hvd.DistributedOptimizer(plain, compression=hvd.Compression.topk(density=1.0))
        optimizer.minimize(tf.compat.v1.get_variable("weight", [], use_resource=True))
    with pytest.raises(ArgumentError, match="eager"):
        hvd.elastic.TensorFlowState([])


def test_checkpoint_goes_on_bit_for_bit(tmp_path, rank):
    whole, later = (TAPES[0].train("exdyna:density=0.1") for _ in range(2))
    run(whole, TAPES[0], range(3))
    made, read = (
        tf.train.Checkpoint(residuals=one.compression.checkpointed(), **one.variables)
        for one in (whole, later)
    )
    read.read(made.write(str(tmp_path / f"rank-{rank}"))).assert_consumed()
    for training in (whole, later):
        run(training, TAPES[0], range(3, 6))
    assert same(whole, later) and later.steps() == {6}
