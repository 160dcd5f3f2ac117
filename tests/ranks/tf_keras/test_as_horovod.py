"""tf-keras: what Horovod's own optimizers can do, ours can with everything sent."""

import horovod.tensorflow as stock_tf
import horovod.tensorflow.keras as stock
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd_tf
import horovod_sparse.tensorflow.keras as hvd
from conformance.keras import CLOSE, EVERYTHING, NIGHT, kinds, sgd
from horovod_sparse.errors import ArgumentError, UnsupportedError
from support.keras_models import fit, flat, keras, make_model, trained_densely


def test_adamw_makes_the_steps_of_its_feedback(rank, size):
    results = []
    for scaled in (False, True):
        given = keras.optimizers.AdamW(0.5, weight_decay=0.125, beta_2=0.9, epsilon=1e-3)
        if scaled:
            given = keras.mixed_precision.LossScaleOptimizer(given, initial_scale=64)
        applies = hvd.DistributedOptimizer(
            given, compression="topk:density=1.0,feedback=adam(whole_batch=false)"
        )
        weight = tf.Variable(np.ones(2, np.float32))

        @tf.function
        def step(gradient, applies=applies, weight=weight):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * gradient)
            applies.minimize(loss, [weight], tape)

        for number in range(3):
            step(tf.constant([1.0 + rank, -3.0 - number]))
        results.append(weight.numpy())
    expected, moments = np.ones(2), np.zeros((size, 2))
    for number in range(3):
        gradients = np.array([[1.0 + one, -3.0 - number] for one in range(size)])
        moments = 0.9 * moments + 0.1 * gradients**2
        steps = 0.5 * gradients * np.sqrt(1 - 0.9 ** (number + 1)) / (np.sqrt(moments) + 1e-3)
        expected = expected * (1 - 0.5 * 0.125) - steps.mean(axis=0)
    np.testing.assert_allclose(results[0], expected, rtol=1e-5)
    np.testing.assert_allclose(results[1], expected, rtol=1e-5)
    with pytest.raises(ArgumentError, match=r"optimizer='Adam'.*AdamW"):
        hvd.DistributedOptimizer(keras.optimizers.legacy.Adam(0.1), compression="topk:feedback=adam")


def test_horovods_own_is_wrapped_once():
    with pytest.raises(UnsupportedError, match="already"):
        hvd.DistributedOptimizer(stock.DistributedOptimizer(keras.optimizers.SGD(0.1)), compression="topk")


@pytest.mark.parametrize("kind", kinds("legacy"))
def test_saved_models_are_loaded_distributed(kind, tmp_path, rank, size):
    """Of a folder Keras restores weights, and no state of an optimizer; so does Horovod."""
    path = str(tmp_path / f"{rank}")
    # of an optimizer of the old kind tf-keras does not save the momentum
    plain = sgd(kind, momentum=0.9 if kind == "new" else 0.0)
    model = make_model()
    fit(model, hvd.DistributedOptimizer(plain, compression=EVERYTHING), rank, size, epochs=1)
    model.save(f"{path}.keras")
    model.save(path, save_format="tf")
    again, of_folder = (hvd.load_model(name, compression=EVERYTHING) for name in (f"{path}.keras", path))
    np.testing.assert_array_equal(flat(of_folder), flat(model))
    for one in (model, again, of_folder):
        fit(one, one.optimizer, rank, size, epochs=1)
    np.testing.assert_allclose(flat(again), flat(model), **CLOSE)
    assert again.optimizer.telemetry.num_steps == of_folder.optimizer.telemetry.num_steps == 6


# Behind Horovod's own optimizer, with a sparsifier as `compression=`


def _fitted(compression, kind, eager=False, momentum=0.0, **arguments):
    model, plain = make_model(), sgd(kind, 0.125, momentum)
    optimizer = stock.DistributedOptimizer(plain, compression=compression, **arguments)
    fit(model, optimizer, stock_tf.rank(), stock_tf.size(), epochs=1, run_eagerly=eager)
    return flat(model)


def _dense(**arguments):
    """By hand, since `fit` takes seconds to trace; but for several passes."""
    if "backward_passes_per_step" in arguments:
        return _fitted(stock_tf.Compression.none, "legacy", **arguments)
    op = arguments.get("op", stock_tf.Average)
    return flat(trained_densely(sgd("new", 0.125, 0.0), stock_tf.rank(), stock_tf.size(), epochs=1, op=op))


PASSES = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}


@pytest.mark.parametrize(
    ("kind", "eager", "arguments"),
    [
        ("legacy", False, PASSES),
        ("legacy", False, {"groups": 2}),
        ("new", False, {"op": hvd_tf.Sum}),
        pytest.param("new", True, {}, marks=NIGHT),
        pytest.param("legacy", True, {}, marks=NIGHT),
    ],
)
def test_density_1_is_dense(kind, eager, arguments):
    compression = hvd_tf.Compression.exdyna(density=1.0)
    found = _fitted(compression, kind, eager, **arguments)
    np.testing.assert_allclose(found, _dense(**arguments), rtol=0, atol=1e-5)
    assert compression.telemetry.num_steps == 6 // arguments.get("backward_passes_per_step", 1)


@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_momentum_twice_is_refused(kind):
    compression = hvd_tf.Compression.parse("dgc:density=0.2,feedback=momentum")
    with pytest.raises(ArgumentError, match=r"momentum=0\.9.*momentum=0 to the optimizer"):
        stock.DistributedOptimizer(sgd(kind, 0.125, 0.9), compression=compression)


@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_a_scaler_goes_inside(kind):
    with pytest.raises(UnsupportedError, match="the other way round"):
        keras.mixed_precision.LossScaleOptimizer(hvd.DistributedOptimizer(sgd(kind), compression="topk"))
    with pytest.raises(UnsupportedError, match="gradient_accumulation_steps"):
        scaler = keras.mixed_precision.LossScaleOptimizer(sgd(kind))
        hvd.DistributedOptimizer(scaler, compression="topk", backward_passes_per_step=2)


@pytest.mark.parametrize("kind", ["new", "legacy"])
@pytest.mark.parametrize("text", ["topk:density=1.0", "none"])
def test_a_fixed_scale_is_none_of_the_sparsifiers_business(kind, text, rank, size):
    scaler = keras.mixed_precision.LossScaleOptimizer(sgd(kind, 0.5, 0.0), dynamic=False, initial_scale=8.0)
    optimizer, weight = hvd.DistributedOptimizer(scaler, compression=text), tf.Variable([1.0, 2.0])

    @tf.function(autograph=False)
    def step():
        optimizer.minimize(lambda: tf.reduce_sum(weight) * (1.0 + rank), [weight])

    step()
    np.testing.assert_allclose(weight.numpy(), np.array([1.0, 2.0]) - 0.5 * (size + 1) / 2)


@pytest.mark.parametrize("graph", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_tape_is_told_the_scale(graph, rank, size, everywhere):
    variable, compression = tf.Variable(tf.zeros(20)), hvd_tf.Compression.topk(density=0.1)
    scale, wanted = tf.Variable(4.0), tf.range(20.0)

    def step(factor):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * wanted * factor) * scale
        tape = hvd_tf.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, [variable], loss_scale=scale)[0]

    step = tf.function(step) if graph else step
    one = tf.constant(1.0)
    np.testing.assert_allclose(step(one)[-2:], [72.0, 76.0])
    scale.assign(8.0)
    bad = step(tf.constant(np.inf) if rank == 0 else one)
    assert np.isnan(bad).all()
    np.testing.assert_allclose(step(one)[-4:], [8 * 2 * 16, 8 * 2 * 17, 0, 0])
    held = next(iter(compression.state_dict()["residuals"].values()))
    np.testing.assert_allclose(held[-4:], [0, 0, 18, 19])
