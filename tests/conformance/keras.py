"""What distributed optimizers of Keras promise: those of Keras 3, and both kinds of Keras 2."""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as stock
import horovod.tensorflow.keras as stock_keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd_tf
import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.errors import ArgumentError, NonFiniteGradientError
from support.keras_models import fit, flat, keras, make_model, trained_densely

IS_KERAS_2 = not hasattr(tf.keras, "version")
EVERYTHING, SPARSE = "topk:density=1.0", "exdyna:density=0.05"
NIGHT = pytest.mark.nightly
# a sum of another order differs by rounding
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def kinds(*by_day: Any, also: Sequence[Any] = ()) -> list[Any]:
    """Of optimizers, with what else is given: Keras 3 has the new ones alone."""
    all_kinds = [(kind, *rest) for kind in ("new", "legacy") for rest in (also or [()])]
    here = [one for one in all_kinds if IS_KERAS_2 or one[0] == "new"]
    chosen = [one if isinstance(one, tuple) else (one,) for one in by_day] if IS_KERAS_2 else here[:1]
    return [pytest.param(*one, marks=[] if one in chosen else [NIGHT]) for one in here]


def sgd(kind: str = "new", rate: Any = 0.1, momentum: float = 0.9) -> Any:
    optimizers = keras.optimizers if kind == "new" else keras.optimizers.legacy
    return optimizers.SGD(rate, momentum=momentum)


def distributed(kind: str = "new", compression: str = SPARSE, **arguments: Any) -> Any:
    return hvd.DistributedOptimizer(sgd(kind), compression=compression, **arguments)


def residuals(optimizer: Any) -> np.ndarray:
    return np.concatenate([values.reshape(-1) for values in optimizer.state_dict()["residuals"].values()])


def descend(optimizer: Any, variables: list[Any], gradients: list[Any]) -> None:
    """One step; None is the gradient of a variable that the loss does not know."""
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


def variable(values: Any, name: str = "weight") -> Any:
    made = np.asarray(values, np.float32)
    return tf.Variable(made, name=name) if IS_KERAS_2 else keras.Variable(made, name=name)


@functools.cache
def uninterrupted(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Four epochs at a stretch: weights and residuals."""
    model, optimizer = make_model(), distributed(kind)
    fit(model, optimizer, hvd.rank(), hvd.size(), epochs=4)
    return flat(model), residuals(optimizer)


@functools.cache
def halfway(kind: str = "new") -> tuple[Any, Any]:
    model, optimizer = make_model(), distributed(kind)
    fit(model, optimizer, hvd.rank(), hvd.size(), epochs=2)
    return model, optimizer


def check_resumed(model: Any, optimizer: Any, kind: str = "new") -> None:
    weights, held = uninterrupted(kind)
    np.testing.assert_array_equal(flat(model), weights)
    np.testing.assert_array_equal(residuals(optimizer), held)
    assert held.any()


@pytest.mark.parametrize(
    ("kind", "run_eagerly", "compression"),
    kinds(
        ("new", False, EVERYTHING),
        ("legacy", False, EVERYTHING),
        also=[(eager, text) for eager in (False, True) for text in (EVERYTHING, "none")],
    ),
)
def test_everything_sent_is_dense_training(kind, run_eagerly, compression, rank, size, everywhere):
    model, optimizer = make_model(), distributed(kind, compression)
    fit(model, optimizer, rank, size, run_eagerly=run_eagerly)
    np.testing.assert_allclose(flat(model), flat(trained_densely(sgd(kind), rank, size)), **CLOSE)
    weights = everywhere(flat(model))
    assert np.isfinite(weights).all() and (weights == weights[0]).all()
    assert int(optimizer.iterations.numpy()) == 12
    if compression == EVERYTHING:
        assert optimizer.telemetry.num_steps == 12


def test_sum_and_groups(rank, size):
    """Which Horovod drops for optimizers of Keras when they come by `horovod.tensorflow`."""
    model = make_model()
    first, second = (layer.trainable_weights for layer in model.layers[-2:])
    groups = [first, second[:1], second[1:]]
    optimizer = hvd_tf.DistributedOptimizer(
        sgd("new", 0.05), compression=hvd.Compression.parse(EVERYTHING), op=hvd.Sum, groups=groups
    )
    fit(model, optimizer, rank, size)
    expected = trained_densely(sgd("new", 0.05), rank, size, op=stock.Sum)
    np.testing.assert_allclose(flat(model), flat(expected), rtol=1e-3, atol=1e-5)
    assert len(optimizer.state_dict()["plan"]["buckets"]) == 3


@pytest.mark.parametrize("kind", kinds("legacy"))
def test_several_passes_per_step(kind, rank, size, everywhere):
    """Both passes of one step see the same weights: their gradients add up, or are averaged."""
    results = []
    for compression, average in ((EVERYTHING, False), (EVERYTHING, True), ("none", False)):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            sgd(kind, 0.1 if average else 0.05, 0.0),
            compression=compression,
            backward_passes_per_step=2,
            average_aggregated_gradients=average,
        )
        fit(model, optimizer, rank, size, epochs=1)
        results.append(flat(model))
        assert (everywhere(results[-1]) == results[-1]).all()
        assert compression == "none" or optimizer.telemetry.num_steps == 3
    np.testing.assert_allclose(results[0], results[2], **CLOSE)
    np.testing.assert_allclose(results[1], results[2], **CLOSE)


@pytest.mark.parametrize("kind", kinds("legacy"))
def test_a_checkpoint_of_tensorflow_goes_on_bit_for_bit(kind, tmp_path, rank, size):
    model, optimizer = halfway(kind)
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(tmp_path / f"rank-{rank}"))
    again, other = make_model(seed=2), distributed(kind)
    if kind == "new":
        other.build(again.trainable_weights)
    status = tf.train.Checkpoint(model=again, optimizer=other).read(path)
    if not IS_KERAS_2:
        status.assert_existing_objects_matched()
    fit(again, other, rank, size, epochs=2)
    check_resumed(again, other, kind)


class Interruption(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", kinds("new"))
def test_callbacks_broadcast_weights_average_metrics_and_warm_rates_up(kind, rank, size, everywhere):
    model, first, rates, seen = make_model(seed=rank), [], [], {"before": [], "after": []}
    optimizer = hvd.DistributedOptimizer(sgd(kind, 0.1 * size), compression=SPARSE)

    class Look(keras.callbacks.Callback):
        def __init__(self, when: str) -> None:
            super().__init__()
            self.when = when

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not first:
                first.append(flat(self.model))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.when == "after":
                rates.append(float(np.asarray(self.model.optimizer.learning_rate)))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen[self.when].append(dict(logs))

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(size - 1),
        Look("before"),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.1 * size, warmup_epochs=2, verbose=1),
        Look("after"),
    ]
    history = fit(model, optimizer, rank, size, epochs=3, callbacks=callbacks, metrics=["accuracy"]).history
    np.testing.assert_array_equal(first[0], flat(make_model(seed=size - 1)))
    for before, after in zip(seen["before"], seen["after"], strict=True):
        assert {"loss", "accuracy"} <= before.keys()
        for name in ("loss", "accuracy"):
            everyone = hvd.allgather(np.array([before[name]], np.float64), name=f"look.{name}").numpy()
            assert after[name] == pytest.approx(everyone.mean(), rel=1e-9)
        assert len(set(hvd.allgather(np.array([before["loss"]]), name="look").numpy())) > 1
    assert history["loss"] == [logs["loss"] for logs in seen["after"]]
    warming = 0.1 * (1 + np.arange(1, 13) / 12 * (size - 1))
    np.testing.assert_allclose(rates, [*warming, *[0.1 * size] * 6], rtol=1e-6)
    assert history["lr"] == pytest.approx([warming[5], 0.1 * size, 0.1 * size])
    assert (everywhere(flat(model)) == flat(model)).all()


@pytest.mark.parametrize(
    ("kind", "eagerly"), kinds(("new", False), ("legacy", True), also=[(False,), (True,)])
)
def test_a_gradient_that_is_none_for_once_moves_no_other_variable(kind, eagerly):
    size, factors = stock.size(), (1.0, 10.0, 100.0)
    weights = [variable(np.zeros(2), f"w{i}") for i in range(3)]
    optimizer = hvd.DistributedOptimizer(sgd(kind, 1.0, 0.0), compression=EVERYTHING, op=stock.Sum)
    if kind == "new":
        optimizer.build(weights)
    for known in ((0, 1, 2), (1, 2), (0, 1)):

        def step(known=known):
            given = [tf.fill([2], factor) if i in known else None for i, factor in enumerate(factors)]
            descend(optimizer, weights, given)

        (step if eagerly else tf.function(step))()
    assert [weight.numpy().tolist() for weight in weights] == [
        [-size * count * factor] * 2 for count, factor in zip((2, 3, 2), factors, strict=True)
    ]


@pytest.mark.parametrize("kind", kinds("new", "legacy"))
def test_passes_of_a_bad_step_are_not_added_to_the_next(kind, rank):
    """Horovod lets infinities through, and goes on; here it is an error, and training goes on after it."""
    optimizer = hvd.DistributedOptimizer(
        sgd(kind, 1.0, 0.0), compression=EVERYTHING, backward_passes_per_step=2
    )
    weight = variable([1.0, 1.0])
    descend(optimizer, [weight], [tf.constant([np.inf if rank == 0 else 0.0, 0.0])])
    with pytest.raises(NonFiniteGradientError):
        descend(optimizer, [weight], [tf.zeros([2])])
    for _ in range(2):
        descend(optimizer, [weight], [tf.constant([1.0, 2.0])])
    np.testing.assert_array_equal(weight.numpy(), [-1.0, -3.0])


def scaled(kind: str, compression: str, scale: float, *, momentum: float = 0.0, **steps: int) -> Any:
    module = keras.mixed_precision if IS_KERAS_2 else keras.optimizers
    scaler = module.LossScaleOptimizer(sgd(kind, 0.125, momentum), initial_scale=scale, **steps)
    return hvd.DistributedOptimizer(scaler, compression=compression)


def scale_of(optimizer: Any) -> float:
    return float(optimizer.loss_scale if IS_KERAS_2 else optimizer.dynamic_scale.numpy())


@pytest.mark.parametrize("kind", kinds("new"))
def test_residuals_do_not_know_the_scale(kind, rank, size):
    text = "topk:density=0.1"
    plain = hvd.DistributedOptimizer(sgd(kind, 0.125, 0.0), compression=text)
    optimizer, expected, model = scaled(kind, text, 8.0, dynamic_growth_steps=3), make_model(), make_model()
    fit(expected, plain, rank, size, epochs=1)
    fit(model, optimizer, rank, size, epochs=1)
    assert scale_of(optimizer) > 8.0
    assert residuals(plain).any()
    np.testing.assert_allclose(flat(model), flat(expected), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(residuals(optimizer), residuals(plain), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "run_eagerly"), kinds(("new", False), ("legacy", True), also=[(False,), (True,)])
)
def test_an_overflow_of_one_rank_is_everybodys(mixed, kind, run_eagerly, rank, size, everywhere):
    optimizer, model = scaled(kind, "topk:density=0.1", 256.0), make_model()
    model.compile(optimizer, loss="mse", run_eagerly=run_eagerly, jit_compile=False)
    images, labels = np.ones((4, 8), np.float32), np.ones((4, 3), np.float32)
    model.train_on_batch(images, labels)
    before, held, counted = flat(model), residuals(optimizer), int(optimizer.iterations)
    assert held.any()
    model.train_on_batch(images, labels * (1e8 if rank == size - 1 else 1.0))
    np.testing.assert_array_equal(flat(model), before)
    np.testing.assert_array_equal(residuals(optimizer), held)
    assert scale_of(optimizer) == 128.0
    model.train_on_batch(images, labels)
    assert int(optimizer.iterations) >= counted + 1
    assert (flat(model) != before).any()
    assert (everywhere(flat(model)) == flat(model)).all()


def test_a_copy_of_an_optimizer_does_not_train_each_rank_alone(rank, size):
    """Keras makes plain ones of a config, without a word; so does Horovod's own under Keras 3."""
    model = make_model()
    fit(model, distributed(), rank, size, epochs=1)
    copied = keras.optimizers.deserialize(keras.optimizers.serialize(model.optimizer))
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with pytest.raises(ArgumentError, match=r"optimizer='SGD'.*DistributedOptimizer"):
        fit(make_model(), copied, rank, size, epochs=1, callbacks=[broadcast])
    copied = copy.deepcopy(model)
    with pytest.raises(ArgumentError, match="each rank would train alone"):
        fit(copied, copied.optimizer, rank, size, epochs=1, callbacks=[broadcast])
    own = stock_keras.DistributedOptimizer(sgd())
    if IS_KERAS_2:
        fit(make_model(), own, rank, size, epochs=1, callbacks=[broadcast])
    else:
        with pytest.raises(ArgumentError, match="each rank would train alone"):
            fit(make_model(), own, rank, size, epochs=1, callbacks=[broadcast])
    dense = hvd.DistributedOptimizer(sgd(), compression="none")
    fit(make_model(), dense, rank, size, epochs=1, callbacks=[broadcast])


# Own steps: of Keras 3, and of the new optimizers of Keras 2


@pytest.mark.parametrize(("every", "delay"), [(1, 0), (5, 1), pytest.param(2, 0, marks=NIGHT)])
def test_own_steps_all_sent_are_late_averages_of_steps_made_alone(every, delay, rank, size, everywhere):
    """A rank moves alone by a in `every` steps; `delay` exchanges later ``theta + a - mean(a)``.

    With every=1 and delay=0 that is dense training, since velocities add up.
    """

    class LateAverages(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.before, self.count = flat(self.model), 0
            self.flying = [0.0 * self.before]

        def on_train_batch_end(self, batch, logs=None):
            self.flying[-1] += self.before - flat(self.model)
            self.count += 1
            if self.count % every == 0:
                self.flying.append(0.0 * self.before)
                self.land(delay)
            self.before = flat(self.model)

        def on_train_end(self, logs=None):
            self.flying.append(0.0 * self.before)
            self.land(0)

        def land(self, most):
            while len(self.flying) - 1 > most:
                own = self.flying.pop(0)
                values = flat(self.model) + own - everywhere(own).mean(axis=0)
                weights = self.model.trainable_weights
                stops = np.cumsum([np.prod(one.shape) for one in weights])
                for one, new in zip(weights, np.split(values, stops[:-1]), strict=True):
                    one.assign(new.reshape(one.shape))

    model, alone = make_model(), make_model()
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    plain = sgd(rate=rate)
    optimizer = hvd.DistributedOptimizer(plain, compression="best:density=1.0", every=every, delay=delay)
    fit(model, optimizer, rank, size, run_eagerly=every == 2)
    optimizer.finish()
    assert all(".facts." in name for name, _ in optimizer._horovod_sparse_steps.starter._graphs)
    fit(alone, sgd(rate=rate), rank, size, callbacks=[LateAverages()])
    np.testing.assert_allclose(flat(model), flat(alone), **CLOSE)
    assert (everywhere(flat(model)) == flat(model)).all() and int(optimizer.iterations) == 12


@pytest.mark.parametrize("every", [1, 2])
def test_a_gradient_that_is_not_finite_ends_an_own_step_on_all_ranks(every, rank, everywhere):
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.AdamW(0.5), compression="best:density=0.5", every=every
    )
    weight = variable(np.ones(4))
    for bad in (False, True):
        gradients = tf.constant([np.nan if bad and rank == 0 else 1.0, 2.0, 3.0, 4.0])
        for number in range(every):
            if bad and number == every - 1:
                with pytest.raises(NonFiniteGradientError):
                    descend(optimizer, [weight], [gradients])
            else:
                descend(optimizer, [weight], [gradients])
        assert (everywhere(weight.numpy()) == everywhere(weight.numpy())[0]).all()
    assert np.isfinite(weight.numpy()).all()
