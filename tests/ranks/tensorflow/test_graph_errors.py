"""A step that is given up changes nothing, in a graph either, and says why; what comes later waits for it."""

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from horovod_sparse.errors import NonFiniteGradientError

pytestmark = pytest.mark.tensorflow


def _adamw():
    """Its decay moves weights, and its count goes on, whatever the gradient is."""
    return tf.keras.optimizers.AdamW(0.1, weight_decay=0.04)


def _by_tape(wrap):
    compression, optimizer = hvd.Compression.topk(density=0.5), _adamw()

    def apply(loss, tape, weights):
        gradients = wrap(tape, compression=compression).gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))

    return optimizer, apply


def _by_optimizer():
    optimizer = hvd_keras.DistributedOptimizer(_adamw(), compression="topk:density=0.5")

    def apply(loss, tape, weights):
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    return optimizer, apply


WAYS = {
    "tape": lambda: _by_tape(hvd.DistributedGradientTape),
    "stock tape": lambda: _by_tape(stock.DistributedGradientTape),
    "optimizer": _by_optimizer,
}


@pytest.mark.parametrize(
    "graph", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["eager", "graph"]
)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_applied_and_nothing_is_counted(rank, size, way, graph, everywhere):
    optimizer, apply = WAYS[way]()
    weights = [tf.Variable(tf.ones([4]), name="one"), tf.Variable(tf.ones([3]), name="two")]
    own = tf.Variable(0)
    optimizer.build(weights)

    def step(given):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(given * weights[0]) + tf.reduce_sum(weights[1])
        apply(loss, tape, weights)
        own.assign_add(1)

    run = tf.function(step) if graph else step

    def seen():
        values = [weight.numpy() for weight in weights]
        return np.concatenate([*values, [int(optimizer.iterations.numpy()), own.numpy()]])

    run(tf.ones([4]))
    before = seen()
    sick = tf.constant([1.0, np.nan, 1.0, 1.0]) if rank == size - 1 else tf.ones([4])
    for _ in range(2):
        with pytest.raises((NonFiniteGradientError, tf.errors.OpError), match="finite"):
            run(sick)
        np.testing.assert_array_equal(seen(), before)
    run(tf.ones([4]))
    assert (seen()[-2:] == 2).all() and (seen()[:-2] < before[:-2]).all()
    assert (everywhere(seen()) == seen()).all()


def test_the_error_keeps_its_name_its_text_and_its_type(rank, size):
    variable = tf.Variable(tf.zeros([4]), name="layer/kernel")
    compression = hvd.Compression.topk(density=0.5)
    synchronizer = compression.bind(process_set=hvd.global_process_set)
    sick = tf.constant([0.0, np.inf, 0.0, 0.0]) if rank == 0 else tf.zeros([4])
    text = r"rank 0: layer/kernel"
    with pytest.raises(NonFiniteGradientError, match=text):
        synchronizer.synchronize([sick], [variable])
    in_graph = tf.function(lambda gradient: synchronizer.synchronize([gradient], [variable]))
    with pytest.raises(tf.errors.OpError, match=f"NonFiniteGradientError.*{text}"):
        in_graph(sick)
    assert isinstance(synchronizer.last_error, NonFiniteGradientError)
    in_graph(tf.ones([4]))
    assert synchronizer.last_error is None


@pytest.mark.controllers
def test_an_error_on_one_rank_alone_reaches_all_and_hangs_none(rank, size, monkeypatch):
    variable = tf.Variable(tf.zeros([40]))
    compression = hvd.Compression.exdyna(density=0.2)
    synchronizer = compression.bind(process_set=hvd.global_process_set)
    synchronizer.synchronize([tf.ones([40])], [variable])
    bucket = synchronizer.sparse[0].bucket
    if rank == 0:
        monkeypatch.setattr(bucket.accumulator, "at_least", None)  # not callable: TypeError in round 0
    with pytest.raises(Exception) as caught:  # ranks see different ends of it
        synchronizer.synchronize([tf.ones([40])], [variable])
    assert (type(caught.value) is TypeError) == (rank == 0)
    monkeypatch.undo()
    total = synchronizer.synchronize([tf.ones([40])], [variable])[0]
    assert np.isfinite(total.numpy()).all()


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("only_slices", [True, False])
def test_slices_that_are_not_finite_are_applied_by_no_rank(rank, size, only_slices, on_nonfinite):
    table, weight = tf.Variable(tf.ones([6, 2]), name="table"), tf.Variable(tf.ones([4]), name="weight")
    variables = [table] if only_slices else [table, weight]
    compression = hvd.Compression.topk(density=0.5)

    @tf.function
    def step(row):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [0, 3]) * row) + tf.reduce_sum(weight)
        tape = hvd.DistributedGradientTape(tape, compression=compression, on_nonfinite=on_nonfinite)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                table.scatter_sub(gradient)
            else:
                variable.assign_sub(gradient)

    step(tf.ones([2]))
    before = [variable.numpy() for variable in variables]
    sick = tf.constant([1.0, np.nan]) if rank == size - 1 else tf.ones([2])
    if on_nonfinite == "raise":
        with pytest.raises(tf.errors.OpError, match=rf"table is not finite \(rank {size - 1}"):
            step(sick)
    else:
        step(sick)
        assert compression.telemetry.num_skipped == 1
    for variable, expected in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable, expected)
    step(tf.ones([2]))
    assert (table.numpy()[0] < before[0][0]).all() and compression.telemetry.num_steps == 2
