"""Tapes of ours and of stock Horovod with a sparsifier, under real ranks: what else they do, and loops."""

import functools

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from conformance.engine import replicas_agree, run, same
from conformance.engines_tensorflow import TAPES
from horovod_sparse.errors import ArgumentError, UnsupportedError

pytestmark = pytest.mark.tensorflow

WRAPPERS = {"ours": hvd.DistributedGradientTape, "stock": stock.DistributedGradientTape}


@pytest.mark.controllers
@pytest.mark.parametrize(
    "graph", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["eager", "graph"]
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_rank_outside_of_the_process_set_gets_its_own(rank, size, wrapper, graph, process_set):
    inner = process_set([0])
    local, shared = tf.Variable(tf.ones([2])), tf.Variable(tf.ones([3]))
    compression = hvd.Compression.topk(density=1.0)

    def run(wrap, compression):
        made = functools.partial(gradients, wrap, compression)
        return [gradient.numpy().tolist() for gradient in (tf.function(made) if graph else made)()]

    def gradients(wrap, compression):
        with tf.GradientTape() as tape:
            loss = (rank + 1.0) * (tf.reduce_sum(shared) + tf.reduce_sum(local))
        return wrap(tape, compression=compression, process_set=inner).gradient(loss, [local, shared])

    expected = run(stock.DistributedGradientTape, stock.Compression.none)
    assert expected == [[rank + 1.0] * 2, [rank + 1.0] * 3]
    for _ in range(2):
        assert run(WRAPPERS[wrapper], compression) == expected
    assert float(hvd.allreduce(tf.ones([]), op=hvd.Sum, name="afterwards")) == size


def test_wrong_uses_are_refused_by_name(rank, size, process_set):
    members = process_set([0])
    variable, other = tf.Variable(tf.ones([3])), tf.Variable(tf.ones([4]))

    def tape_of(compression, wrap=hvd.DistributedGradientTape, target=variable, **arguments):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(target)
        return wrap(tape, compression=compression, **arguments).gradient(loss, [target])

    compression = hvd.Compression.topk(density=1.0)
    tape_of(compression)
    with pytest.raises(ArgumentError, match="average"):
        tape_of(compression, op=hvd.Sum)
    tape_of(compression, wrap=stock.DistributedGradientTape, target=other)  # asks for the same reduction
    with pytest.raises(ArgumentError, match="process_set"):
        tape_of(compression, wrap=stock.DistributedGradientTape, process_set=members)
    with pytest.raises(ArgumentError, match="made once"):
        tape_of("topk:density=1.0")
    with pytest.raises(UnsupportedError, match="jit_compile"):
        tf.function(lambda: tape_of(compression), jit_compile=True)()
    for wrap in WRAPPERS.values():
        with pytest.raises(UnsupportedError, match="Adasum"):
            tape_of(hvd.Compression.topk(), wrap=wrap, op=hvd.Adasum)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_rank_may_trace_again_alone(rank, size, wrapper, everywhere):
    """For a last batch of another length, say: what is traced runs nothing that the others do not."""
    compression, weight = hvd.Compression.topk(density=1.0), tf.Variable(tf.zeros([4]), name="weight")
    table = tf.Variable(tf.zeros([6, 2]), name="table")
    variables = [weight, table]

    @tf.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * tf.range(1.0, 5.0)) + 0.0 * tf.reduce_sum(batch)
            loss += tf.reduce_sum(tf.gather(table, [1, 4]))
        tape = WRAPPERS[wrapper](tape, compression=compression)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(gradient)

    for length in (3, 3 + (rank == 0), 3):
        step(tf.ones([length]))
    assert step.experimental_get_tracing_count() == 1 + (rank == 0)
    assert (everywhere(weight.numpy()) == [-3.0, -6.0, -9.0, -12.0]).all()
    assert table.numpy()[:, 0].tolist() == [0, -3.0, 0, 0, -3.0, 0]


#: of the steps
GRAPH = [pytest.param(False, id="eager", marks=pytest.mark.nightly), pytest.param(True, id="graph")]


@pytest.mark.parametrize("graph", GRAPH)
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_slices_go_horovods_way_or_are_sparsified(rank, size, graph, sparse_as_dense):
    table, dense = tf.Variable(tf.ones([6, 2])), tf.Variable(tf.ones([3]))
    compression = hvd.Compression.topk(density=1.0)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank, 5])) + tf.reduce_sum(dense)
        tape = hvd.DistributedGradientTape(
            tape, compression=compression, op=hvd.Sum, sparse_as_dense=sparse_as_dense
        )
        return tape.gradient(loss, [table, dense])

    slices, other = (tf.function(step) if graph else step)()
    assert isinstance(slices, tf.IndexedSlices) != sparse_as_dense
    expected = np.zeros((6, 2))
    expected[5] = size
    expected[:size] += 1
    assert np.array_equal(tf.convert_to_tensor(slices).numpy(), expected)
    assert np.array_equal(other.numpy(), np.full(3, size))
    assert len(compression.synchronizer.facts) == 1 + sparse_as_dense


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_what_is_not_connected_or_empty_is_left_and_horovods_tape_keeps_local_ones(rank, size, wrap):
    used, unused, local = (tf.Variable(tf.ones([3]), name=name) for name in ("used", "unused", "local"))
    compression = hvd.Compression.topk(density=1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(used + local) * (rank + 1)
    tape, is_stock = wrap(tape, compression=compression, op=hvd.Sum), wrap is WRAPPERS["stock"]
    if is_stock:
        tape.register_local_source(local)
    gradients = tape.gradient(loss, [used, unused, local])
    assert gradients[1] is None
    total = size * (size + 1) / 2
    assert gradients[0].numpy().tolist() == [total] * 3
    assert gradients[2].numpy().tolist() == pytest.approx([(rank + 1) / size if is_stock else total] * 3)
    empty = tf.Variable(tf.zeros([0, 3]))
    results = compression.synchronizer.synchronize([tf.ones([3]), tf.zeros([0, 3])], [used, empty])
    assert results[1].shape == (0, 3)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_gradients_of_tensors_are_summed_densely(rank, size, graph):
    """A tensor is another one in every step: there is nothing to keep a residual for."""
    compression, variable = hvd.Compression.topk(density=0.25), tf.Variable(tf.ones([4]))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(variable * x * x)
        return hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable, x])[1]

    step = tf.function(step) if graph else step
    for number in range(3):
        x = tf.range(4.0) * (rank + 1.0) + float(number)
        mean = np.arange(4.0) * (size + 1.0) + 2.0 * number
        np.testing.assert_allclose(step(x), mean, rtol=1e-6)
    assert len(compression.synchronizer.facts) == 1
    assert graph or len(compression.synchronizer._eagerly._functions) == 1


@pytest.mark.parametrize("graph", GRAPH)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_variable_that_is_listed_twice_is_refused(graph, wrap):
    variable, compression = tf.Variable(tf.ones([2])), hvd.Compression.topk(density=1.0)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        return wrap(tape, compression=compression).gradient(loss, [variable, variable])

    with pytest.raises(UnsupportedError, match="given twice"):
        (tf.function(step) if graph else step)()


def weights(count):
    drawn = np.random.default_rng(0)
    return [tf.Variable(drawn.normal(size=(6, 6), scale=0.4).astype(np.float32)) for _ in range(count)]


@pytest.mark.parametrize("graph", GRAPH)
def test_layers_that_are_computed_again_train_alike(graph, rank, everywhere):
    results = []
    for again in (False, True):
        variables, compression = weights(3), hvd.Compression.topk(density=0.2)

        def layer(x, weight):
            return tf.tanh(x @ weight)

        def loss_of(x, variables=variables, layer=layer, again=again):
            for weight in variables:
                own = lambda x, weight=weight: layer(x, weight)  # noqa: E731
                x = tf.recompute_grad(own)(x) if again else own(x)
            return tf.reduce_sum(x * x)

        def step(number, variables=variables, compression=compression, loss_of=loss_of):
            with tf.GradientTape() as local:
                loss = loss_of(tf.cos(tf.range(12.0) * (1.0 + rank) + number)[:, None] * tf.ones([1, 6]))
            tape = hvd.DistributedGradientTape(local, compression=compression)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.05 * gradient)

        taken = tf.function(step) if graph else step
        for number in range(4):
            taken(tf.constant(float(number)))
        assert compression.telemetry.num_steps == 4
        results.append(np.concatenate([variable.numpy().reshape(-1) for variable in variables]))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6, atol=1e-7)
    assert (everywhere(results[1]) == results[1]).all()


def test_a_loop_in_a_graph_synchronizes_every_pass(rank, size):
    variable = tf.Variable(tf.zeros([64]))
    compression = hvd.Compression.exdyna(density=0.25)
    synchronizer = compression.bind(process_set=hvd.global_process_set, average=False)

    @tf.function
    def loop(count):
        for i in tf.range(count):
            gradient = tf.fill([64], tf.cast(i + 1, tf.float32))
            variable.assign_add(synchronizer.synchronize([gradient], [variable])[0])

    loop(tf.constant(5))
    assert synchronizer.step == 5
    part = synchronizer.sparse[0]
    mean = hvd.allreduce(tf.constant(part.bucket.accumulator.values()), op=hvd.Sum, name="held").numpy()
    assert np.array_equal(variable.numpy() + mean, np.full(64, 15.0 * size, np.float32)), "law 1"


def test_the_same_bucket_twice_in_one_graph_is_done_in_order(rank, size):
    variable = tf.Variable(tf.zeros([64]))
    compression = hvd.Compression.topk(density=1.0)
    synchronizer = compression.bind(process_set=hvd.global_process_set, average=False)

    @tf.function
    def twice(first, second):
        return [synchronizer.synchronize([gradient], [variable])[0] for gradient in (first, second)]

    for _ in range(3):
        first, second = twice(tf.ones([64]), tf.fill([64], 2.0))
        assert first.numpy()[0] == size and second.numpy()[0] == 2 * size
    assert synchronizer.step == 6


@pytest.mark.parametrize("tape", ["graph", "stock"])
def test_a_tape_trains_as_without_it(rank, size, tape):
    made = next(one for one in TAPES if one.name == tape)
    expected, training = made.train("exdyna:density=0.2"), made.train("exdyna:density=0.2")
    run(expected, made, range(2))
    tf.config.run_functions_eagerly(True)
    try:
        run(training, made, range(2))
    finally:
        tf.config.run_functions_eagerly(False)
    assert same(training, expected) and replicas_agree(made, training)
