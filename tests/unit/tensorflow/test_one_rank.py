"""One rank does what each of many does: equal to the simulator with P = 1, feedback included."""

import logging

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horovod_sparse.tensorflow")
keras_hvd = pytest.importorskip("horovod_sparse.tensorflow.keras")

from horovod_sparse.errors import StateMismatchError, UnsupportedError  # noqa: E402
from horovod_sparse.simulation import SimulatedCluster  # noqa: E402
from horovod_sparse.tensorflow import state  # noqa: E402
from support.sampling import rows_by  # noqa: E402

LENGTH, RATE = 200, 0.5
FEEDBACKS = [
    "error",
    "momentum(momentum=0.9)",
    "momentum(momentum=0.5,clip_norm=1.0)",
    "error(clip_norm=0.5)",
]


@pytest.fixture(autouse=True)
def one_rank():
    hvd.init()


def targets(step: int) -> np.ndarray:
    return np.cos(np.arange(LENGTH) * 0.7 + step).astype(np.float32)


def made(feedback: str):
    return hvd.Compression.topk(density=0.1, feedback=feedback)


def by_tape(compression, weight, in_graph: bool):
    def step(target):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * target)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        weight.assign_sub(RATE * tape.gradient(loss, [weight])[0])

    return tf.function(step) if in_graph else step


def by_keras(compression, weight):
    optimizer = keras_hvd.DistributedOptimizer(tf.keras.optimizers.SGD(RATE), compression=compression)

    def step(target):
        optimizer.apply_gradients([(target, weight)])

    return step


@rows_by("feedback,way", FEEDBACKS, ["graph", "eager", "keras"])
def test_equals_the_simulator_with_one_rank(feedback, way):
    compression, weight = made(feedback), tf.Variable(tf.zeros(LENGTH), name="weight")
    step = by_keras(compression, weight) if way == "keras" else by_tape(compression, weight, way == "graph")
    cluster = SimulatedCluster(compression.recipe, LENGTH, 1, name="bucket0.weight")
    expected = np.zeros(LENGTH, np.float32)
    for number in range(6):
        step(tf.constant(targets(number)))
        expected -= RATE * cluster.step([targets(number)], RATE if way == "keras" else None)
        np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert compression.telemetry.last.step == 6


def test_stock_horovod_leaves_gradients_as_they_are_which_a_warning_says_once(caplog):
    import horovod.tensorflow as stock

    compression, weight = made("momentum(momentum=0.9)"), tf.Variable(tf.zeros(LENGTH))

    @tf.function
    def gradient(target):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * target)
        return stock.DistributedGradientTape(tape, compression=compression).gradient(loss, [weight])[0]

    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        for number in range(3):
            np.testing.assert_array_equal(gradient(tf.constant(targets(number))), targets(number))
    told = [record.getMessage() for record in caplog.records if "with one rank" in record.getMessage()]
    assert len(told) == 1 and "MomentumCorrection" in told[0]


def test_a_compressor_for_every_step_is_warned_of(caplog):
    weight = tf.Variable(tf.zeros(LENGTH), name="weight")
    for number in range(4):
        assert ("outside of the training loop" in caplog.text) == (number == 3)
        by_tape(made("error"), weight, in_graph=False)(tf.constant(targets(number)))
    other, compression = tf.Variable(tf.zeros(LENGTH), name="other"), made("error")
    caplog.clear()
    for number in range(4):
        by_tape(compression, other, in_graph=False)(tf.constant(targets(number)))
    assert "outside of the training loop" not in caplog.text  # TensorFlow warns of its own


def test_variables_of_a_forged_checkpoint_are_refused_before_any_is_loaded(tmp_path, monkeypatch):
    weight, compression = tf.Variable(tf.zeros(LENGTH), name="weight"), made("error")
    by_tape(compression, weight, in_graph=True)(tf.constant(targets(0)))
    other, forged = tf.Variable([1.0, 2.0]), {"dtype": "float32", "shape": [2], "bits": np.zeros(3, np.uint8)}
    for number, one in enumerate((3, {"dtype": "float32", "shape": [2]}, forged)):
        with monkeypatch.context() as patch:
            patch.setattr(state, "_saved", lambda variable, one=one: one)
            hvd.save(tmp_path / str(number), compression, variables=[other])
        with pytest.raises(StateMismatchError, match="checkpoint"):
            hvd.load(tmp_path / str(number), compression, variables=[other])


def test_messages_between_pairs_are_refused(monkeypatch):
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", "pairs")
    with pytest.raises(UnsupportedError, match="PyTorch"):
        made("error").bind()


def test_a_step_that_failed_does_not_touch_what_is_loaded_afterwards():
    """As in elastic training: Horovod fails in the middle of a step, and what was committed is restored."""
    residuals = []
    for fails in (False, True):
        compression, weight = made("error"), tf.Variable(tf.zeros(LENGTH), name="weight")
        step = by_tape(compression, weight, in_graph=True)
        step(tf.constant(targets(0)))
        committed = compression.state_dict()
        if fails:
            (part,) = compression.synchronizer.parts
            part.task.start(part.begin(None, [targets(1)]), (0, 1))
        compression.load_state_dict(committed)
        assert compression.state_dict()["step"] == 1
        step(tf.constant(targets(2)))
        (residual,) = compression.state_dict()["residuals"].values()
        residuals.append(residual)
    np.testing.assert_array_equal(*residuals)
