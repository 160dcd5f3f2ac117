"""What `DistributedOptimizer` refuses, with one rank and no training."""

import copy
import gc
import math
import pickle
import threading

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd_tf
import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.errors import ArgumentError, StateMismatchError, UnknownNameError, UnsupportedError
from support.sampling import rest_nightly

pytestmark = pytest.mark.tensorflow
keras, scaled = tf.keras, tf.keras.optimizers.LossScaleOptimizer


@pytest.fixture(scope="module", autouse=True)
def started():
    hvd.init()


def sgd():
    return keras.optimizers.SGD(0.1)


def wrapped(optimizer=None, **more):
    return hvd.DistributedOptimizer(
        sgd() if optimizer is None else optimizer, **{"compression": "topk", **more}
    )


def compiled():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.dtype_policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    model.compile(wrapped(), loss="mse")


MOMENTUM = "dgc:density=0.1,feedback=momentum(momentum=0.5)"
#: what is refused, and words that say why; arguments of `DistributedOptimizer`, or what makes one
REFUSED = [
    (UnsupportedError, "Adasum", {"op": hvd_tf.Adasum}),
    (ArgumentError, "gradient_predivide_factor", {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
    (ArgumentError, "gradient_predivide_factor", {"gradient_predivide_factor": 0.0}),
    (ArgumentError, "backward_passes_per_step", {"backward_passes_per_step": 0}),
    (ArgumentError, "groups", {"groups": 0}),
    (ArgumentError, "groups", {"groups": [["weight"]]}),
    (ArgumentError, "bucket_bytes", {"bucket_bytes": 0}),
    (ArgumentError, "process_set", {"process_set": "all"}),
    (UnknownNameError, "topk", {"compression": "topq"}),
    (ArgumentError, "a sparsifier", {"compression": "none", "bucket_bytes": 100}),
    (UnknownNameError, r"tensorflow\.keras\.Dist.* .*did you mean check_every", {"check_evry": 5}),
    (ArgumentError, r"plan=.*Plan", {"plan": [["weight"]]}),
    (UnknownNameError, "for other front ends", {"max_grad_norm": 1.0}),
    (UnsupportedError, "already", lambda: wrapped(wrapped())),
    (UnsupportedError, "no optimizer of Keras", lambda: wrapped(object())),
    (UnsupportedError, "no optimizer of Keras", lambda: wrapped(keras.Sequential())),
    (UnsupportedError, "TensorFlow 1", lambda: wrapped(tf.compat.v1.train.GradientDescentOptimizer(0.1))),
    # loss scaling goes inside, and accumulates by itself
    (
        UnsupportedError,
        r"DistributedOptimizer\(keras.optimizers.LossScaleOptimizer",
        lambda: scaled(wrapped()),
    ),
    (
        UnsupportedError,
        "gradient_accumulation_steps",
        lambda: wrapped(scaled(sgd()), backward_passes_per_step=2),
    ),
    (UnsupportedError, "LossScaleOptimizer", compiled),
    *(
        (ArgumentError, words, {"compression": given})
        for given, words in (
            (0.1, r"compression=0.1.*Compression.topk\(density=0.1\)"),
            (None, r"compression=None.*Compression.none"),
            (hvd.Compression.exdyna, r"Compression.exdyna\(density=0.1\), with a call"),
            (hvd.Compression, "Compression.topk"),
        )
    ),
    (
        ArgumentError,
        "compression=0.1",
        lambda: hvd_tf.DistributedGradientTape(tf.GradientTape(), compression=0.1),
    ),
    (ArgumentError, "compression=0.1", lambda: hvd.measured_profile(lambda: tf.constant(1.0), [], 0.1)),
    # momentum twice, also within a scaler
    *(
        (
            ArgumentError,
            r"momentum=0\.9.*momentum=0 to the optimizer",
            lambda wrap=wrap: wrapped(wrap(keras.optimizers.SGD(0.1, momentum=0.9)), compression=MOMENTUM),
        )
        for wrap in (lambda made: made, scaled)
    ),
    # what has no own step
    *(
        (ArgumentError, words, lambda make=make: wrapped(make(), compression=EVERYTHING))
        for make, words in (
            (lambda: adamw(amsgrad=True), "amsgrad=True.*largest second moment"),
            (lambda: adamw(global_clipnorm=1.0), "clip_norm to the feedback"),
            (lambda: keras.optimizers.RMSprop(0.1, momentum=0.5), "momentum=0.5.*feedback is a momentum"),
            (lambda: keras.optimizers.Nadam(0.1), "optimizer='Nadam'.*feedback='error'"),
        )
    ),
    (
        ArgumentError,
        r"feedback='rmsprop'.*'adam' with AdamW",
        lambda: wrapped(adamw(), compression="topk:feedback=rmsprop"),
    ),
    *(
        (ArgumentError, "'best' if every > 1", {"every": every, "delay": delay})
        for every, delay in ((2, 0), (1, 1))
    ),
    (ArgumentError, "^optimizer='sgd'.*keras.optimizers.SGD", lambda: wrapped("sgd")),
    (ArgumentError, "^gradtape=", lambda: hvd_tf.DistributedGradientTape(tf.GradientTape)),
    (ArgumentError, "^process_set=", {"process_set": 3}),
    (ArgumentError, "^loss_scale_factor=", lambda: wrapped(keras.optimizers.SGD(0.1, loss_scale_factor=4.0))),
    *(
        (UnsupportedError, "wrap a copy of the plain", lambda copied=copied: copied(wrapped()))
        for copied in (copy.deepcopy, pickle.dumps)
    ),
    (ArgumentError, "^grads=", lambda: wrapped().apply([tf.ones(2)] * 2, [keras.Variable([1.0, 2.0])])),
    (ArgumentError, "^root_rank=", lambda: hvd.callbacks.BroadcastGlobalVariablesCallback("0")),
    (ArgumentError, "^keep=", lambda: hvd.callbacks.CheckpointCallback("folder", keep=0)),
]


@pytest.mark.parametrize(("error", "words", "given"), REFUSED)
def test_optimizers_refuse_what_cannot_be_by_name(error, words, given):
    with pytest.raises(error, match=words):
        given() if callable(given) else wrapped(**given)


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


@pytest.mark.parametrize("graph", [False, True])
def test_what_a_tape_has_synchronized_is_not_synchronized_again(graph):
    variable = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(sgd(), compression="topk:density=0.5")
    optimizer.build([variable])
    compression = hvd.Compression.topk(density=0.5)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * variable)
        tape = hvd_tf.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, [variable])
        optimizer.apply(gradients, [variable])

    with pytest.raises(UnsupportedError, match=r"synchronized already.*tf.GradientTape"):
        (tf.function(step) if graph else step)()


def test_settings_and_state_are_taken_over():
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


def test_a_compression_in_another_place_and_complex_gradients_are_refused():
    for wrap, given in (
        (hvd.DistributedOptimizer, sgd()),
        (hvd_tf.DistributedGradientTape, tf.GradientTape()),
    ):
        with pytest.raises(ArgumentError, match="given as compression="):  # in the place of another argument
            wrap(given, hvd.Compression.topk(density=0.1))
    weight = tf.Variable(tf.complex([1.0], [1.0]))
    with tf.GradientTape() as tape:
        loss = tf.math.real(tf.reduce_sum(weight * tf.math.conj(weight)))
    tape = hvd_tf.DistributedGradientTape(tape, compression=hvd.Compression.topk(density=0.5))
    with pytest.raises(UnsupportedError, match="complex64"):
        tape.gradient(loss, [weight])


EVERYTHING = "topk:density=1.0,feedback=best"
GRADIENTS = [np.array(one, np.float32) for one in ([1.0, -3.0], [0.5, 2.0], [-4.0, 0.25])]


def adamw(rate=0.5, **more):
    return keras.optimizers.AdamW(
        rate, weight_decay=0.125, beta_1=more.pop("beta_1", 0.0), beta_2=0.9, epsilon=1e-3, **more
    )


def schedule():
    return keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.5, 0.25])


#: optimizers of which own steps, all sent, are Keras' own, bit for bit but for rounding
OWN = {
    "AdamW": adamw,
    "Adam": lambda: keras.optimizers.Adam(0.5, beta_1=0.0, beta_2=0.9),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.25, rho=0.9, epsilon=0.5),
    "SGD": lambda: keras.optimizers.SGD(0.5, weight_decay=0.125),
    "momentum": lambda: keras.optimizers.SGD(schedule(), momentum=0.5),
    "Nesterov": lambda: keras.optimizers.SGD(schedule(), momentum=0.5, nesterov=True),
    "schedule": lambda: adamw(schedule()),
    "averages": lambda: adamw(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
}


def trained(optimizer, graph=True, scale=1.0, given=GRADIENTS, weight=None):
    weight = keras.Variable(np.ones(2, np.float32)) if weight is None else weight
    optimizer.build([weight])
    step = tf.function(lambda gradient: optimizer.apply([gradient], [weight]))
    for gradient in given:
        (step if graph else step.python_function)(tf.constant(scale * gradient))
    return weight.numpy()


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_own_steps_are_those_of_keras(name, graph):
    own = OWN[name]()
    expected = trained(own)
    given = OWN[name]()
    optimizer = hvd.DistributedOptimizer(given, compression=EVERYTHING)
    assert optimizer is given
    found = trained(optimizer, graph)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert int(optimizer.iterations) == 3 == optimizer.telemetry.num_steps
    assert type(type(optimizer).from_config(optimizer.get_config())) is type(own)


@pytest.mark.parametrize("every, delay", [(1, 0), (2, 1)])
@pytest.mark.parametrize("name", ["AdamW", "momentum", "Nesterov"])
def test_own_steps_are_those_of_pytorch_bit_for_bit(name, every, delay):
    """On the same gradients; of Adam with the epsilon that Keras' formula comes to."""
    import torch

    import horovod_sparse.ddp

    generator, shapes = np.random.default_rng(5), [(40, 30), (30,), (30, 7)]
    weights = [generator.normal(size=shape).astype(np.float32) for shape in shapes]
    passes = [[generator.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(5)]
    ours = [keras.Variable(one) for one in weights]
    theirs = [torch.nn.Parameter(torch.from_numpy(one.copy())) for one in weights]
    if name == "AdamW":
        own = keras.optimizers.AdamW(0.125, weight_decay=0.5, beta_2=0.9, epsilon=1e-3)
        other = torch.optim.AdamW(theirs, 0.125, weight_decay=0.5, betas=(0.9, 0.9))
    else:
        own = keras.optimizers.SGD(0.125, momentum=0.5, nesterov=name == "Nesterov")
        other = torch.optim.SGD(theirs, 0.125, momentum=0.5, nesterov=name == "Nesterov")
    given = {"every": every, "delay": delay}
    own = hvd.DistributedOptimizer(own, compression="best:density=0.1", **given)
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = torch.nn.Module()
    model.all = torch.nn.ParameterList(theirs)
    horovod_sparse.ddp.attach(model, "best:density=0.1", other, **given)
    own.build(ours)
    step = tf.function(lambda *gradients: own.apply(gradients, ours))
    for number, gradients in enumerate(passes, 1):
        if name == "AdamW":
            other.param_groups[0]["eps"] = 1e-3 / math.sqrt(1.0 - 0.9**number)
        for one, gradient in zip(theirs, gradients, strict=True):
            one.grad = torch.from_numpy(gradient)
        other.step()
        step(*map(tf.constant, gradients))
        for mine, one in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(mine.numpy(), one.detach().numpy())


def test_a_thread_of_exchanges_ends_with_its_optimizer():
    before = set(threading.enumerate())
    trained(hvd.DistributedOptimizer(adamw(), compression=EVERYTHING))
    gc.collect()
    for thread in set(threading.enumerate()).difference(before):
        thread.join(60 if thread.name == "horovod_sparse.exchanges" else 0)
        assert thread.name != "horovod_sparse.exchanges" or not thread.is_alive()


def test_loss_scales_go_on():
    scaler = scaled(adamw(), initial_scale=64.0)
    optimizer = hvd.DistributedOptimizer(scaler, compression=EVERYTHING)
    np.testing.assert_allclose(trained(optimizer, True, scale=64.0), trained(adamw()), rtol=1e-5)


@pytest.mark.parametrize("name", rest_nightly(["AdamW", "RMSprop", "momentum"], ["AdamW"]))
def test_a_saved_model_goes_on_with_its_moments(name, tmp_path):
    """Under Keras' own names: a plain optimizer goes on from them, and ours from a plain one's."""

    def model_with(optimizer):
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
        model.compile(optimizer, "mse")
        model.set_weights([np.ones(one.shape) for one in model.get_weights()])
        return model

    def fit(model):
        model.fit(np.eye(3), np.ones((3, 2)), batch_size=1, epochs=2, shuffle=False, verbose=0)
        return np.concatenate([np.ravel(one) for one in model.get_weights()])

    whole = model_with(OWN[name]())
    _, expected = fit(whole), fit(whole)
    ours = model_with(hvd.DistributedOptimizer(OWN[name](), compression=EVERYTHING))
    fit(ours)
    lone = hvd.DistributedOptimizer(OWN[name](), compression=EVERYTHING)
    lone.apply([tf.ones([2])], [tf.Variable(tf.ones([2]))])
    with pytest.raises(StateMismatchError, match="another model"):
        lone.load_state_dict(ours.optimizer.state_dict())
    path = tf.train.Checkpoint(model=ours, optimizer=ours.optimizer).write(str(tmp_path / "checkpoint"))
    ours.save(tmp_path / "ours.keras")
    plain = model_with(OWN[name]())
    fit(plain)
    plain.save(tmp_path / "plain.keras")
    loaded = [hvd.load_model(tmp_path / f"{one}.keras", compression=EVERYTHING) for one in ("ours", "plain")]
    loaded.append(model_with(OWN[name]()))
    loaded[-1].optimizer.build(loaded[-1].trainable_weights)
    read = tf.train.Checkpoint(model=loaded[-1], optimizer=loaded[-1].optimizer).read(path)
    read.assert_existing_objects_matched()
    for again in (ours, keras.models.load_model(tmp_path / "ours.keras"), *loaded):
        assert int(again.optimizer.iterations) == 6
        np.testing.assert_allclose(fit(again), expected, rtol=1e-3)


def test_own_steps_take_slices_and_a_variable_once():
    optimizer = hvd.DistributedOptimizer(adamw(), compression=EVERYTHING)
    table = keras.Variable(np.ones((3, 2), np.float32))
    optimizer.build([table])
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2]))
    optimizer.apply([slices], [table])
    assert (table.numpy() < 1).all(axis=1).tolist() == [True] * 3  # two by weight decay
    with pytest.raises(UnsupportedError, match="given twice"):  # of two gradients one would be lost
        optimizer.apply([slices, slices], [table, table])


def test_a_tape_gives_steps_to_plain_sgd():
    compression = hvd.Compression.topk(density=1.0, feedback="adam(beta2=0.9,eps=0.001)")
    weight, sgd = keras.Variable(np.ones(2, np.float32)), keras.optimizers.SGD(0.5, weight_decay=0.125)
    for gradient in GRADIENTS:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(weight * gradient)
        tape = hvd_tf.DistributedGradientTape(tape, compression=compression)
        sgd.apply(tape.gradient(loss, [weight.value]), [weight])
    expected, moment = np.ones(2), np.zeros(2)
    for number, gradient in enumerate(GRADIENTS, 1):
        moment = 0.9 * moment + 0.1 * gradient.astype(np.float64) ** 2
        step = 0.5 * gradient / (np.sqrt(moment / (1 - 0.9**number)) + 1e-3)
        expected = expected * (1 - 0.5 * 0.125) - step
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-5)
