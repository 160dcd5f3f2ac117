"""What the TensorFlow front end does on the host, and with one rank: what each of many does."""

import importlib
import inspect
import time
from types import ModuleType
from unittest.mock import Mock

import horovod.tensorflow
import horovod.tensorflow.keras as stock_keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from horovod_sparse.errors import ArgumentError, UnknownNameError, UnsupportedError
from horovod_sparse.kernels.host.scatter import apply_scaled_sums
from horovod_sparse.merging import Plan, fixed, min_elements
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.tensorflow import waiting
from horovod_sparse.tensorflow.tensors import ReusedArrays, numpy_dtype
from support.sampling import rows_by

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_dense_outputs_are_not_copied_and_used_again_only_when_let_go(dtype):
    shapes = [(3,), (), (2, 5)]
    outputs, places = ReusedArrays(shapes, numpy_dtype(dtype)), [(0, 3), (3, 4), (4, 14)]
    values = np.array([1.0, 2.0, 4.0], np.float64 if dtype == "float64" else np.float32)

    def tensors(indices):
        arrays = outputs.acquire()
        num_union = apply_scaled_sums(arrays, places, np.array(indices, np.int32), values, 0.5)
        assert num_union == len(set(indices))
        memory = [array.ctypes.data for array in arrays]
        given = [arrays]  # so that nothing here holds them
        del arrays
        # eagerly, TensorFlow would copy
        results = tf.function(
            lambda: tf.numpy_function(lambda: given.pop(), [], [tf.as_dtype(dtype)] * 3), autograph=False
        )()
        return results, memory

    def check(found, at, expected):
        flat = np.concatenate([tensor.numpy().reshape(-1).astype(float) for tensor in found])
        assert flat[at].tolist() == expected and flat.sum() == 3.5

    first, where = tensors([0, 3, 13])
    assert where[0] % 64 == where[1] % 64 == where[2] % 64 == 0
    check(first, [0, 3, 13], [0.5, 1.0, 2.0])
    second, elsewhere = tensors([2, 2, 13])
    assert elsewhere != where, "memory that is in use was used again"
    check(first, [0, 3, 13], [0.5, 1.0, 2.0])
    check(second, [2, 13], [1.5, 2.0])
    del first
    # TensorFlow lets go of arrays at its next call
    tf.function(lambda: tf.numpy_function(lambda: np.float32(0), [], tf.float32), autograph=False)()
    third, again = tensors([1, 4, 5])
    assert again == where, "memory was not used again"
    check(third, [1, 4, 5], [0.5, 1.0, 2.0])


def test_tensorflow_has_pytorchs_sparsifiers():
    torch_front_end = pytest.importorskip("horovod_sparse.torch")
    ours, theirs = dir(hvd.Compression), dir(torch_front_end.Compression)
    assert {name for name in ours if name[0] != "_"} == {name for name in theirs if name[0] != "_"}
    for name in ("topk", "exdyna", "randomk"):
        made, other = getattr(hvd.Compression, name), getattr(torch_front_end.Compression, name)
        expected = [item for item in inspect.signature(other).parameters if item != "named_parameters"]
        assert list(inspect.signature(made).parameters) == expected
        assert made(density=0.25).recipe == other(density=0.25).recipe
        assert repr(made(density=0.25)) == repr(other(density=0.25))
    assert hvd.Compression.parse("fp16") is hvd.Compression.fp16
    with pytest.raises(UnknownNameError, match="topk"):
        hvd.Compression.parse("topq")
    with pytest.raises(AttributeError, match="topk"):
        hvd.Compression.topq()


def test_arguments_that_every_step_makes_anew_are_compared_by_value():
    def bound(compression, size=100, **more):
        return compression.bind(
            process_set=hvd.global_process_set,
            tensor_selection=min_elements(size),
            **{"merging": fixed(bytes=1000), **more},
        )

    compression = hvd.Compression.topk(density=0.5)
    assert bound(compression) is bound(compression)
    with pytest.raises(ArgumentError, match=r"tensor_selection.*made once"):
        bound(compression, size=101)
    with pytest.raises(ArgumentError, match=r"merging.*made once"):
        bound(compression, merging="single")
    planned = hvd.Compression.topk(density=0.5)
    first, second = (planned.bind(process_set=hvd.global_process_set, plan=Plan((("a",),))) for _ in "12")
    assert first is second


MODULES = ["", ".elastic", ".functions", ".mpi_ops", ".util", ".sync_batch_norm", ".compression"]
MODULES += [".gradient_aggregation", ".keras", ".keras.elastic", ".keras.callbacks"]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_here(module):
    stock = importlib.import_module(f"horovod.tensorflow{module}")
    own = importlib.import_module(f"horovod_sparse.tensorflow{module}")
    used = {"keras", "tf", "ops", "K", "version", "np", "io", "cloudpickle", "warnings", "inspect"}
    foreign = {
        n
        for n, item in vars(stock).items()
        if isinstance(item, ModuleType) and "horovod" not in item.__name__
    }
    names = {n for n in vars(stock) if n[0] != "_"} - foreign - used
    if module in (".elastic", ".functions", ".keras.elastic", ".sync_batch_norm", ".keras.callbacks"):
        # of these, what they define; they import the rest from others
        here = [n for n in names if getattr(getattr(stock, n), "__module__", None) == stock.__name__]
        names = set(getattr(stock, "__all__", here))
    assert names
    assert sorted(name for name in names if not hasattr(own, name)) == []


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


def by_stock_keras(compression, weight):
    optimizer = stock_keras.DistributedOptimizer(tf.keras.optimizers.SGD(RATE), compression=compression)
    return lambda target: optimizer.apply_gradients([(target, weight)])


def by_tensorflow_1(compression, weight):
    descent = tf.compat.v1.train.GradientDescentOptimizer(RATE)
    optimizer = hvd.DistributedOptimizer(descent, compression=compression)
    return lambda target: optimizer.minimize(lambda: tf.reduce_sum(weight * target), var_list=[weight])


@rows_by("way,feedback", [by_stock_keras, by_tensorflow_1], FEEDBACKS)
def test_optimizers_that_are_no_engine_equal_the_simulator_with_one_rank(way, feedback):
    compression, weight = made(feedback), tf.Variable(tf.zeros(LENGTH), name="weight")
    step = way(compression, weight)
    cluster = SimulatedCluster(compression.recipe, LENGTH, 1, number=0)
    expected = np.zeros(LENGTH, np.float32)
    for number in range(6):
        step(tf.constant(targets(number)))
        expected -= RATE * cluster.step([targets(number)])
        np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert compression.telemetry.last.step == 6


def test_a_tape_of_a_users_class_keeps_its_own_gradient():
    class Scaled(tf.GradientTape):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def gradient(self, *given, **named):
            return [self.factor * one for one in super().gradient(*given, **named)]

    weight, compression = tf.Variable([1.0, 3.0]), hvd.Compression.topk(density=0.5)
    with Scaled(2.0) as tape:
        loss = tf.reduce_sum(weight * weight)
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    assert tape.gradient(loss, [weight])[0].numpy().tolist() == [0.0, 12.0]


ENDS = [("UnknownError", "HorovodInternalError: x", KeyError), ("UnknownError", "x", RuntimeError)]
ENDS += [("InvalidArgumentError", "HorovodInternalError: x", KeyError)]
ENDS += [("InvalidArgumentError", "shapes at HorovodAllreduce", tf.errors.InvalidArgumentError)]


@pytest.mark.parametrize(("error", "words", "kind"), ENDS)
def test_elastic_training_begins_anew_or_ends_with_the_error_of_a_host_function(error, words, kind):
    train = Mock(side_effect=getattr(tf.errors, error)(None, None, words))
    with pytest.raises(kind):
        hvd.elastic.run(train)(Mock(**{"restore.side_effect": KeyError}))


@pytest.mark.parametrize("way", [lambda call: call, tf.function])
def test_horovods_allreduce_gets_what_one_rank_would_send(way):
    for dtype in (tf.float32, tf.float64, tf.bfloat16):
        compress = way(lambda tensor: hvd.Compression.topk(density=0.5).compress(tensor)[0])
        assert tf.cast(compress(tf.constant([1, -4], dtype)), tf.float32).numpy().tolist() == [0, -4]
    assert compress(tf.constant([1, -4], tf.int32)).numpy().tolist() == [1, -4]


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


def test_a_plan_takes_in_variables_that_join_and_a_state_of_other_names(caplog):
    plan, compression = Plan((("weight",),)), made("error")
    first, joined = (tf.Variable(tf.zeros(LENGTH), name=name) for name in ("weight", "joined"))

    def step(*variables):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(variable * tf.constant(targets(0))) for variable in variables)
        tape = hvd.DistributedGradientTape(tape, compression=compression, plan=plan)
        tape.gradient(loss, list(variables))

    step(first)
    entry = compression.state_dict()
    step(first, joined)
    assert compression.synchronizer.plan == Plan((("weight",), ("joined",)))
    both = compression.state_dict()

    other = made("error")
    other.load_state_dict(entry)
    compression, plan = other, Plan((("renamed",),))
    step(tf.Variable(tf.zeros(LENGTH), name="renamed"))
    assert compression.synchronizer.plan == plan and "states are reset" not in caplog.text
    other = made("error")
    other.load_state_dict(both)
    compression, plan = other, Plan((("weight", "joined"),))
    step(*(tf.Variable(tf.zeros(LENGTH), name=name) for name in plan.names()))
    assert "checkpoint has buckets: 2, of 1, 1 parameters; dense parameters: 0, now buckets: 1" in caplog.text


def test_messages_between_pairs_are_refused(monkeypatch):
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", "pairs")
    monkeypatch.setattr(horovod.tensorflow, "mpi_enabled", lambda: True)
    with pytest.raises(UnsupportedError, match="PyTorch"):
        made("error").bind()


REFUSED = [("spardl:teams=1", "flat"), ("spardl:teams=3", "flat"), ("topk:density=0.5", "host")]


@pytest.mark.parametrize(("text", "levels"), REFUSED)
def test_elastic_training_refuses_collectives_that_depend_on_the_number_of_ranks(text, levels, monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    synchronizer = hvd.Compression.parse(text).bind(levels=levels)
    with pytest.raises(UnsupportedError, match="traced once"):
        synchronizer.synchronize([tf.ones(LENGTH)], [tf.Variable(tf.zeros(LENGTH))])


def test_the_deadline_of_a_training_counts_where_ranks_agree(monkeypatch):
    errors = []
    monkeypatch.setenv("HOROVOD_SPARSE_DEADLINE_SECONDS", "0.2")
    monkeypatch.setattr(waiting, "_fail_and_shut_down", lambda watch, error, watches: errors.append(error))

    def late():
        time.sleep(1)
        yield from ()
        return 7

    assert made("error").bind(deadline_seconds=60).engine.carry_out(late(), None) == 7
    assert not errors


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
            part.task.start(part.begin([targets(1)]), (0, 1))
        compression.load_state_dict(committed)
        assert compression.state_dict()["step"] == 1
        step(tf.constant(targets(2)))
        (residual,) = compression.state_dict()["residuals"].values()
        residuals.append(residual)
    np.testing.assert_array_equal(*residuals)
