"""What `DistributedOptimizer` refuses, with one rank and no training."""

import copy

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import horovod_sparse.tensorflow as hvd_tf  # noqa: E402
import horovod_sparse.tensorflow.keras as hvd  # noqa: E402
from horovod_sparse.errors import ArgumentError, UnknownNameError, UnsupportedError  # noqa: E402

pytestmark = pytest.mark.tensorflow
keras = tf.keras


@pytest.fixture(scope="module", autouse=True)
def started():
    hvd.init()


def sgd():
    return keras.optimizers.SGD(0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"op": hvd_tf.Adasum}, UnsupportedError, "Adasum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, ArgumentError, "gradient_predivide_factor"),
        ({"backward_passes_per_step": 0}, ArgumentError, "backward_passes_per_step"),
        ({"groups": 0}, ArgumentError, "groups"),
        ({"groups": [["weight"]]}, ArgumentError, "groups"),
        ({"bucket_bytes": 0}, ArgumentError, "bucket_bytes"),
        ({"process_set": "all"}, ArgumentError, "process_set"),
        ({"gradient_predivide_factor": 0.0}, ArgumentError, "gradient_predivide_factor"),
        ({"compression": "topq"}, UnknownNameError, "topk"),
        ({"compression": "none", "bucket_bytes": 100}, ArgumentError, "a sparsifier"),
        (
            {"check_evry": 5},
            UnknownNameError,
            r"tensorflow\.keras\.DistributedOptimizer .*did you mean check_every",
        ),
        ({"max_grad_norm": 1.0}, UnknownNameError, "for other front ends"),
    ],
)
def test_refused_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        hvd.DistributedOptimizer(sgd(), **{"compression": "topk", **arguments})


def test_settings_go_with_copies_and_through_the_other_front_end():
    asked = {"compression": "topk:density=0.1", "check_every": 7, "levels": "flat"}
    first = hvd_tf.DistributedOptimizer(sgd(), **asked)
    for optimizer in (first, type(first).from_config(first.get_config()), copy.deepcopy(first)):
        synchronizer = optimizer._horovod_sparse_keeper.synchronizer
        assert (synchronizer.settings.check_every, synchronizer.settings.levels) == (7, "flat")
    partial = hvd.PartialDistributedOptimizer(sgd(), **asked, backward_passes_per_step=2)
    assert partial._horovod_sparse_keeper.synchronizer.settings.check_every == 7


_MOMENTUM = "dgc:density=0.1,feedback=momentum(momentum=0.5)"


@pytest.mark.parametrize("wrap", [lambda made: made, keras.optimizers.LossScaleOptimizer])
def test_momentum_twice_is_refused(wrap):
    """By the feedback and by the optimizer, as with PyTorch."""
    with pytest.raises(ArgumentError, match=r"momentum=0\.9.*momentum=0 to the optimizer"):
        hvd.DistributedOptimizer(wrap(keras.optimizers.SGD(0.1, momentum=0.9)), compression=_MOMENTUM)
    hvd.DistributedOptimizer(wrap(sgd()), compression=_MOMENTUM)
    hvd.DistributedOptimizer(wrap(keras.optimizers.SGD(0.1, momentum=0.9)), compression="dgc:density=0.1")


def test_a_residual_that_follows_the_rate_is_for_plain_sgd(caplog):
    """Momentum and moments remember what a falling learning rate has enlarged."""
    scaled = "topk:density=0.1,feedback=error(scale_residual=true)"
    hvd.DistributedOptimizer(sgd(), compression=scaled)
    for optimizer in (keras.optimizers.Adam(), keras.optimizers.SGD(0.1, momentum=0.9)):
        hvd.DistributedOptimizer(optimizer, compression="topk:density=0.1")
    assert "scale_residual" not in caplog.text
    for optimizer in (
        keras.optimizers.Adam(),
        keras.optimizers.RMSprop(),
        keras.optimizers.SGD(0.1, momentum=0.9),
    ):
        caplog.clear()
        hvd.DistributedOptimizer(optimizer, compression=scaled)
        assert caplog.text.count("scale_residual=True is made for SGD without momentum") == 1


def test_one_compressor_is_for_one_optimizer():
    compression = hvd.Compression.topk(density=0.1)
    first = hvd.DistributedOptimizer(sgd(), compression=compression)
    with pytest.raises(ArgumentError, match="of its own"):
        hvd.DistributedOptimizer(sgd(), compression=compression)
    with pytest.raises(ArgumentError, match="of its own"):
        hvd_tf.DistributedGradientTape(tf.GradientTape(), compression=compression)
    assert first.telemetry.num_steps == 0
    of_tapes = hvd.Compression.topk(density=0.1)
    hvd_tf.DistributedGradientTape(tf.GradientTape(), compression=of_tapes)
    with pytest.raises(ArgumentError, match="of its own"):
        hvd.DistributedOptimizer(sgd(), compression=of_tapes)


@pytest.mark.parametrize("of_tape", ["topk:density=0.5", "none"])
@pytest.mark.parametrize(("graph", "clipped"), [(False, False), (True, True)])
def test_what_a_tape_has_synchronized_is_not_synchronized_again(graph, of_tape, clipped):
    variable = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(sgd(), compression="topk:density=0.5")
    optimizer.build([variable])
    compression = hvd.Compression.parse(of_tape)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * variable)
        tape = hvd_tf.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, [variable])
        if clipped:
            gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        optimizer.apply(gradients, [variable])

    with pytest.raises(UnsupportedError, match=r"synchronized already.*tf.GradientTape"):
        (tf.function(step) if graph else step)()


def test_optimizers_that_cannot_be_wrapped():
    with pytest.raises(UnsupportedError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd(), compression="topk"), compression="topk")
    with pytest.raises(UnsupportedError, match="no optimizer of Keras"):
        hvd.DistributedOptimizer(object(), compression="topk")
    with pytest.raises(UnsupportedError, match="TensorFlow 1"):
        old = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        hvd_tf.DistributedOptimizer(old, compression="topk")


def test_loss_scaling_goes_inside():
    optimizer = hvd.DistributedOptimizer(sgd(), compression="topk")
    with pytest.raises(UnsupportedError, match=r"DistributedOptimizer\(keras.optimizers.LossScaleOptimizer"):
        keras.optimizers.LossScaleOptimizer(optimizer)
    with pytest.raises(UnsupportedError, match="gradient_accumulation_steps"):
        hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(sgd()), compression="topk", backward_passes_per_step=2
        )


def test_mixed_precision_policy_is_told_at_compile():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.dtype_policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    with pytest.raises(UnsupportedError, match="LossScaleOptimizer"):
        model.compile(hvd.DistributedOptimizer(sgd(), compression="topk"), loss="mse")


def test_settings_and_state_are_taken_over():
    """As after load_model: momentum and iterations stay; the name, too."""
    variable = keras.Variable([1.0, 2.0])
    plain = keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=1.0, name="mine")
    plain.apply([tf.constant([1.0, 1.0])], [variable])
    wrapped = hvd.DistributedOptimizer(plain, compression="topk")
    assert type(wrapped).__name__ == "SGD"
    assert isinstance(wrapped, keras.optimizers.SGD)
    assert wrapped.get_config() == plain.get_config()
    assert [v.numpy().tolist() for v in wrapped.variables] == [v.numpy().tolist() for v in plain.variables]
    assert hvd.DistributedOptimizer(sgd(), name="other", compression="topk").name == "other"


def test_what_no_config_tells_stays():
    """Weights that do not decay, and what a subclass has of its own."""

    class Mine(keras.optimizers.AdamW):
        factor = 1.0

        def update_step(self, gradient, variable, learning_rate):
            super().update_step(self.factor * gradient, variable, learning_rate)

    weights = [keras.Variable([1.0, 2.0], name="weight"), keras.Variable([1.0, 2.0], name="bias")]
    plain = Mine(0.5, weight_decay=0.5)
    plain.factor = 0.0
    plain.exclude_from_weight_decay(var_names=["bias"])
    wrapped = hvd.DistributedOptimizer(plain, compression="topk:density=1.0")
    wrapped.apply([tf.ones([2])] * 2, weights)
    assert [weight.numpy().tolist() for weight in weights] == [[0.75, 1.5], [1.0, 2.0]]


def test_telemetry_goes_into_the_logs_under_loss_scaling():
    scaler = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(scaler, compression="topk:density=0.5"), "mse", jit_compile=False)
    callbacks = [hvd.callbacks.TelemetryCallback()]
    history = model.fit(np.ones((2, 2)), np.ones(2), verbose=0, callbacks=callbacks).history
    assert history["sparse/density_selected"][-1] > 0


@pytest.mark.parametrize(
    ("compression", "words"),
    [
        (0.1, r"compression=0.1.*Compression.topk\(density=0.1\)"),
        (None, r"compression=None.*Compression.none"),
        (hvd.Compression.exdyna, r"Compression.exdyna\(density=0.1\), with a call"),
        (hvd.Compression, "Compression.topk"),
    ],
    ids=["number", "None", "factory", "class"],
)
def test_what_is_no_compression_is_refused_where_it_is_given(compression, words):
    with pytest.raises(ArgumentError, match=words):
        hvd.DistributedOptimizer(sgd(), compression=compression)
    with pytest.raises(ArgumentError, match=words):
        hvd_tf.DistributedGradientTape(tf.GradientTape(), compression=compression)


def test_wrong_arguments_are_refused_by_name():
    with pytest.raises(ArgumentError, match=r"optimizer='sgd'.*keras.optimizers.SGD"):
        hvd.DistributedOptimizer("sgd", compression="topk")
    for wrap, given in (
        (hvd.DistributedOptimizer, sgd()),
        (hvd_tf.DistributedGradientTape, tf.GradientTape()),
    ):
        with pytest.raises(ArgumentError, match="given as compression="):  # in the place of another argument
            wrap(given, hvd.Compression.topk(density=0.1))
    with pytest.raises(ArgumentError, match=r"plan=.*Plan"):
        hvd.DistributedOptimizer(sgd(), compression="topk", plan=[["weight"]])
    with pytest.raises(UnsupportedError, match="no optimizer of Keras"):
        hvd.DistributedOptimizer(keras.Sequential(), compression="topk")
    optimizer, callbacks = hvd.DistributedOptimizer(sgd(), compression="topk"), hvd.callbacks
    for argument, give in {
        "gradtape": lambda: hvd_tf.DistributedGradientTape(tf.GradientTape),
        "process_set": lambda: hvd.Compression.topk(process_set=3),
        "plan": lambda: optimizer.replan("single"),
        "variable": lambda: optimizer.register_local_var("weight"),
        "grads": lambda: optimizer.apply([tf.ones(2)] * 2, [keras.Variable([1.0, 2.0])]),
        "root_rank": lambda: callbacks.BroadcastGlobalVariablesCallback("0"),
        "keep": lambda: callbacks.CheckpointCallback("folder", keep=0),
        "initial_lr": lambda: callbacks.LearningRateScheduleCallback(None, 0.1),
        "multiplier": lambda: callbacks.LearningRateScheduleCallback(0.1, "half"),
        "warmup_epochs": lambda: callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=0),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{argument}="):
            give()
    compression = hvd.Compression.topk(density=0.5)
    weight = tf.Variable(tf.complex([1.0], [1.0]))
    with tf.GradientTape() as tape:
        loss = tf.math.real(tf.reduce_sum(weight * tf.math.conj(weight)))
    tape = hvd_tf.DistributedGradientTape(tape, compression=compression)
    with pytest.raises(UnsupportedError, match="complex64"):
        tape.gradient(loss, [weight])


def test_one_rank_does_what_each_of_many_does():
    """The largest half is applied, the other waits in the residual."""
    variable = keras.Variable([1.0, 2.0])
    wrapped = hvd.DistributedOptimizer(sgd(), compression="topk:density=0.5")
    wrapped.apply([tf.constant([1.0, 3.0])], [variable])
    np.testing.assert_allclose(variable.numpy(), [1.0, 2.0 - 0.1 * 3.0])
    assert wrapped.telemetry.last.density_selected == 0.5
    (residual,) = wrapped.state_dict()["residuals"].values()
    assert residual.tolist() == [1.0, 0.0]
