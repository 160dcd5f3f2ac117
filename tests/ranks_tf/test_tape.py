"""Tapes of ours and of stock Horovod with a sparsifier, under real ranks: like dense where all is sent."""

from __future__ import annotations

import functools

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from horovod_sparse.errors import (
    ArgumentError,
    NonFiniteGradientError,
    StateMismatchError,
    UnsupportedError,
)
from horovod_sparse.merging import Plan
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.tensorflow.collectives import reduce_densely
from horovod_sparse.tensorflow.tensors import scaled_locally

pytestmark = pytest.mark.tensorflow

SHAPES = [(7, 5), (40,), (3, 4, 5), ()]
WRAPPERS = {"ours": hvd.DistributedGradientTape, "stock": stock.DistributedGradientTape}


def _gradients(rank, steps=3):
    generator = np.random.default_rng(rank)
    return [
        [(generator.integers(-64, 65, shape) / 64).astype(np.float32) for shape in SHAPES]
        for _ in range(steps)
    ]


def _train(wrap, compression, graph, gradients, *, catch=(), **arguments):
    """Descends along given gradients; the variables after every step, one behind the other."""
    variables = [tf.Variable(tf.ones(shape), name=f"weight{i}") for i, shape in enumerate(SHAPES)]
    if isinstance(arguments.get("groups"), list):
        arguments["groups"] = [[variables[i] for i in group] for group in arguments["groups"]]

    def step(given):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * x) for v, x in zip(variables, given, strict=True)])
        tape = wrap(tape, compression=compression, **arguments)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.25 * gradient)

    step, seen = (tf.function(step) if graph else step), []
    for number, given in enumerate(gradients):
        if number in catch:
            with pytest.raises((NonFiniteGradientError, tf.errors.OpError), match=r"NonFinite|not finite"):
                step([tf.constant(array) for array in given])
        else:
            step([tf.constant(array) for array in given])
        seen.append(np.concatenate([variable.numpy().reshape(-1) for variable in variables]))
    return np.stack(seen)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"op": hvd.Sum},
        {"groups": 2},
        {"groups": [[0, 2], [1]]},
        {"gradient_predivide_factor": 2.0},
    ],
    ids=["average", "sum", "two groups", "lists", "predivide"],
)
def test_density_1_is_dense(rank, size, wrapper, graph, arguments):
    if wrapper == "stock" and isinstance(arguments.get("groups"), list) and not graph:
        pytest.skip("stock Horovod finds no variable by its name where a function's argument stands for it")
    gradients = _gradients(rank)
    expected = _train(stock.DistributedGradientTape, stock.Compression.none, graph, gradients, **arguments)
    compression = hvd.Compression.exdyna(density=1.0)
    actual = _train(WRAPPERS[wrapper], compression, graph, gradients, **arguments)
    if size == 2:
        assert np.array_equal(actual, expected)
    else:  # a third is not exact, and Horovod's order of summation is its own
        assert np.allclose(actual, expected, rtol=0, atol=1e-6)
    assert compression.telemetry.num_steps == len(gradients)
    assert compression.telemetry.last.density_union == 1.0


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_replicas_agree_and_state_moves_on(rank, size, wrapper, graph, everywhere):
    compression = hvd.Compression.exdyna(density=0.1)
    weights = _train(WRAPPERS[wrapper], compression, graph, _gradients(rank, steps=8))
    everyone = everywhere(weights)
    assert (everyone == everyone[0]).all()
    assert compression.telemetry.num_steps == 8
    inner = compression.synchronizer or compression._dropin.synchronizer
    bucket = inner.sparse[0].bucket
    assert bucket.state.step == 8, "steps were frozen into the graph"
    assert np.abs(bucket.accumulator.values()).sum() > 0
    assert len(inner.sparse) == 1, "variables are merged into one bucket"


@pytest.mark.parametrize(
    "arguments", [{"plan": ["bias", "scale"]}, {"rules": "dense_below=10"}], ids=["plan", "rule"]
)
def test_dense_variables_train_with_momentum(rank, size, arguments):
    """A plan's dense ones and a rule's: what momentum SGD does with the sum over ranks, in a graph."""
    text = "topk:density=0.1,feedback=momentum(momentum=0.5)"
    shapes = {"bias": (7,), "weight": (40, 3), "scale": (5,)}
    variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()]
    plan = Plan((("weight",),), tuple(arguments["plan"])) if "plan" in arguments else None
    compression = hvd.Compression.parse(",".join([text, *([arguments["rules"]] if not plan else [])]))
    synchronizer = compression.bind(average=False, plan=plan)
    synchronize = tf.function(lambda *given: synchronizer.synchronize(given, variables))
    velocity = {name: np.zeros(shapes[name]) for name in ("bias", "scale")}
    for step in range(4):
        everyone = [
            [(generator.integers(-64, 65, shape) / 64).astype(np.float32) for shape in shapes.values()]
            for generator in (np.random.default_rng([step, r]) for r in range(size))
        ]
        sums = dict(zip(shapes, synchronize(*map(tf.constant, everyone[rank])), strict=True))
        for i, name in enumerate(shapes):
            if name in velocity:
                velocity[name] = 0.5 * velocity[name] + sum(gradients[i] for gradients in everyone)
                np.testing.assert_array_equal(sums[name].numpy(), velocity[name].astype(np.float32))
    if plan is not None:
        assert compression.synchronizer.plan == plan
    held = compression.state_dict()
    assert sorted(held["companions"][0]) == sorted(shapes) and not held["residuals"]["bias"].any()


def test_a_filtered_residual_is_the_simulators_and_resumes(rank, size):
    """Through other buckets, and through a checkpoint; a dense variable is filtered of nothing."""
    text = "cltk:density=0.1,feedback=lowpass(beta=0.25),dense=bias"
    shapes = {"bias": (7,), "weight": (40, 3)}
    made = hvd.Compression.parse(text).recipe.for_parameter("weight", 120)
    cluster = SimulatedCluster(made, 120, size)
    saved = None
    for steps in (range(3), range(3, 6)):
        variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()]
        compression = hvd.Compression.parse(text)
        synchronizer = compression.bind(average=False)
        if saved is not None:
            compression.load_state_dict(saved)
        synchronize = tf.function(lambda *given, to=synchronizer, of=variables: to.synchronize(given, of))
        for step in steps:
            everyone = [
                [(generator.integers(-64, 65, shape) / 64).astype(np.float32) for shape in shapes.values()]
                for generator in (np.random.default_rng([step, r]) for r in range(size))
            ]
            bias, weight = synchronize(*map(tf.constant, everyone[rank]))
            expected = cluster.step([gradients[1].reshape(-1) for gradients in everyone])
            np.testing.assert_array_equal(weight.numpy().reshape(-1), expected)
            np.testing.assert_array_equal(bias.numpy(), sum(gradients[0] for gradients in everyone))
        saved = compression.state_dict()
    held = saved["companions"][0]
    np.testing.assert_array_equal(held["weight"].reshape(-1), cluster.residuals()[rank])
    norm = np.linalg.norm(held["weight"])
    assert norm > 0 and compression.telemetry.last.residual_norm == pytest.approx(norm, rel=1e-5)
    momentum = hvd.Compression.parse(text.replace("lowpass(beta=0.25)", "momentum"))
    momentum.bind(average=False).synchronize([tf.zeros(shape) for shape in shapes.values()], variables)
    with pytest.raises(StateMismatchError, match="feedback"):
        momentum.load_state_dict(saved)


def test_partitions_of_a_graph_follow_the_gradients(rank, size):
    """Where gradients are large moves from one end to the other, and partitions with it, in one trace."""
    variable = tf.Variable(tf.zeros([4096]))
    synchronizer = hvd.Compression.exdyna(density=0.05, feedback="none").bind()
    synchronize = tf.function(lambda gradient: synchronizer.synchronize([gradient], [variable])[0])
    slope = np.linspace(1.0, 10.0, 4096, dtype=np.float32)
    noise = np.random.default_rng(rank).standard_normal(4096).astype(np.float32)
    firsts = []
    for where in (slope, slope[::-1]):
        for _ in range(12):
            synchronize(tf.constant(noise * where))
        firsts.append(int(synchronizer.sparse[0].bucket.state.partitions.num_blocks[0]))
    # the first part has small gradients and many elements, and then large ones and few
    assert firsts[0] > 2 * firsts[1]
    assert synchronize.experimental_get_tracing_count() == 1


def test_thresholds_of_a_graph_follow_the_gradients(rank, size):
    variable = tf.Variable(tf.zeros([400]))
    compression = hvd.Compression.micro(density=0.05, feedback="none")
    synchronizer = compression.bind(process_set=hvd.global_process_set)
    synchronize = tf.function(lambda gradient: synchronizer.synchronize([gradient], [variable])[0])
    base = np.random.default_rng(rank).standard_normal(400).astype(np.float32)
    thresholds = []
    for scale in (1.0, 100.0, 10_000.0):
        synchronize(tf.constant(scale * base))
        thresholds.append(synchronizer.sparse[0].bucket.last.facts["threshold"])
    assert thresholds[1] == pytest.approx(100 * thresholds[0], rel=0.2)
    assert thresholds[2] == pytest.approx(100 * thresholds[1], rel=0.2)
    assert synchronize.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("algorithm", ["topk", "exdyna", "randomk"])
def test_a_nan_on_one_rank_is_an_error_on_all_and_training_goes_on(
    rank, size, wrapper, graph, algorithm, everywhere
):
    gradients = _gradients(rank, steps=5)
    if rank == size - 1:
        gradients[2][1][7] = np.nan
    compression = getattr(hvd.Compression, algorithm)(density=0.1)
    weights = _train(WRAPPERS[wrapper], compression, graph, gradients, catch=[2])
    assert np.array_equal(weights[2], weights[1]), "something was applied"
    assert not np.array_equal(weights[3], weights[2])
    assert np.isfinite(weights).all()
    everyone = everywhere(weights)
    assert (everyone == everyone[0]).all()
    assert compression.telemetry.num_steps == 4


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


def test_results_that_are_kept_stay_what_they_are(rank, size):
    variable = tf.Variable(tf.zeros([64]))
    synchronizer = hvd.Compression.topk(density=1.0).bind(average=False)
    kept = [synchronizer.synchronize([tf.fill([64], float(i))], [variable])[0] for i in range(5)]
    assert [tensor.numpy()[3] for tensor in kept] == [i * size for i in range(5)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_process_sets_synchronize_among_themselves(rank, size, wrapper, process_set):
    pairs = process_set([0, 1])
    if not pairs.included():
        return
    gradients = _gradients(rank)
    dense = _train(stock.DistributedGradientTape, stock.Compression.none, True, gradients, process_set=pairs)
    compression = hvd.Compression.exdyna(density=1.0)
    assert np.array_equal(_train(WRAPPERS[wrapper], compression, True, gradients, process_set=pairs), dense)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "partial"])
def test_a_rank_outside_of_the_process_set_gets_its_own(rank, size, wrapper, graph, process_set):
    """As in stock Horovod; the others go on, and all of them meet afterwards."""
    inner = process_set([0])
    local, shared = tf.Variable(tf.ones([2])), tf.Variable(tf.ones([3]))
    compression = hvd.Compression.topk(density=1.0)

    def run(wrap, compression):
        made = functools.partial(gradients, wrap, compression)
        return [gradient.numpy().tolist() for gradient in (tf.function(made) if graph else made)()]

    def gradients(wrap, compression):
        with tf.GradientTape() as tape:
            loss = (rank + 1.0) * (tf.reduce_sum(shared) + tf.reduce_sum(local))
        tape = wrap(tape, compression=compression, process_set=inner)
        if wrapper == "partial":
            tape.register_local_source(local)
        return tape.gradient(loss, [local, shared])

    expected = run(stock.DistributedGradientTape, stock.Compression.none)
    assert expected == [[rank + 1.0] * 2, [rank + 1.0] * 3]
    wrap = WRAPPERS.get(wrapper, hvd.DistributedGradientTape)
    for _ in range(2):
        assert run(wrap, compression) == expected
    assert float(hvd.allreduce(tf.ones([]), op=hvd.Sum, name="afterwards")) == size


@pytest.mark.parametrize("what", ["slices", "local", "local slices"])
def test_in_elastic_training_a_graph_asks_how_many_ranks_there_are(rank, size, what, monkeypatch):
    """Not when it is traced, where there may have been more of them."""

    class Before:
        """The ranks when the function was traced."""

        process_set_id = 0

        @staticmethod
        def size():
            return size + 1

    monkeypatch.setenv("HOROVOD_ELASTIC", "1")

    @tf.function
    def step():
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
        if what == "slices":
            return reduce_densely(slices, "elastic.slices", Before, average=True)
        return scaled_locally(slices if what == "local slices" else slices.values, Before)

    result = step()
    if what == "slices":
        assert tf.convert_to_tensor(result).numpy()[0].tolist() == [1.0, 1.0]
    else:
        values = result if what == "local" else result.values
        assert values.numpy().tolist() == [pytest.approx([1.0 / size] * 2)]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
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
    assert len(compression.synchronizer.names) == 1 + sparse_as_dense


def test_what_is_not_connected_local_or_no_float_is_left_or_passed_on(rank, size):
    used, unused, local = (tf.Variable(tf.ones([3]), name=name) for name in ("used", "unused", "local"))
    compression = hvd.Compression.topk(density=1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(used + local) * (rank + 1)
    tape = hvd.DistributedGradientTape(tape, compression=compression, op=hvd.Sum)
    tape.register_local_source(local)
    gradients = tape.gradient(loss, [used, unused, local])
    assert gradients[1] is None
    assert gradients[0].numpy().tolist() == [size * (size + 1) / 2] * 3
    assert gradients[2].numpy().tolist() == pytest.approx([(rank + 1) / size] * 3)
    empty = tf.Variable(tf.zeros([0, 3]))
    results = compression.synchronizer.synchronize([tf.ones([3]), tf.zeros([0, 3])], [used, empty])
    assert results[1].shape == (0, 3)


class _Layer:
    """What the argument `local_layers` takes: something with trainable weights."""

    def __init__(self, *weights):
        self.trainable_weights = list(weights)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_partial_tape_leaves_layers_to_their_rank(rank, size, graph, scaled):
    """The sum for the others; `get_local_and_global_gradients` tells the two apart, as Horovod's does."""
    shared, first, second = (tf.Variable(tf.ones([3]), name=f"weight{i}") for i in range(3))
    variables, compression = [first, shared, second], hvd.Compression.topk(density=1.0)

    def step(pairs):
        with tf.GradientTape() as tape:
            loss = tf.add_n([(rank + 1.0) * tf.reduce_sum(v) for v in variables])
        tape = hvd.PartialDistributedGradientTape(
            tape,
            compression=compression,
            op=hvd.Sum,
            local_layers=[_Layer(first), _Layer(second)],
            scale_local_gradients=scaled,
        )
        if pairs:
            local, others = tape.get_local_and_global_gradients(loss, variables)
            assert [v is w for (v, _), w in zip([*local, *others], [first, second, shared], strict=True)]
            return [gradient for _, gradient in [local[0], others[0], local[1]]]
        return tape.gradient(loss, variables)

    own = (rank + 1.0) / (size if scaled else 1)
    for pairs in (False, True):
        run = tf.function(step) if graph else step
        gradients = [gradient.numpy().tolist() for gradient in run(pairs)]
        assert gradients[1] == [size * (size + 1) / 2] * 3
        assert gradients[0] == gradients[2] == pytest.approx([own] * 3)
    assert compression.synchronizer.names == ("weight0",)


def test_local_layers_are_layers():
    with pytest.raises(ArgumentError, match="local_layers"):
        hvd.PartialDistributedGradientTape(
            tf.GradientTape(), compression=hvd.Compression.topk(), local_layers=[tf.Variable(1.0)]
        )


def test_wrong_uses_are_refused_by_name(rank, size):
    variable, other = tf.Variable(tf.ones([3])), tf.Variable(tf.ones([4]))

    def tape_of(compression, wrap=hvd.DistributedGradientTape, target=variable, **arguments):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(target)
        return wrap(tape, compression=compression, **arguments).gradient(loss, [target])

    compression = hvd.Compression.topk(density=1.0)
    tape_of(compression)
    with pytest.raises(ArgumentError, match="average"):
        tape_of(compression, op=hvd.Sum)
    with pytest.raises(UnsupportedError, match="another compressor"):
        tape_of(compression, wrap=stock.DistributedGradientTape)
    with pytest.raises(UnsupportedError, match="Adasum"):
        tape_of(compression, op=hvd.Adasum)
    with pytest.raises(ArgumentError, match="made once"):
        tape_of("topk:density=1.0")
    with pytest.raises(UnsupportedError, match="jit_compile"):
        tf.function(lambda: tape_of(compression), jit_compile=True)()
    with pytest.raises(UnsupportedError, match="Adasum"):
        tape_of(hvd.Compression.topk(), wrap=stock.DistributedGradientTape, op=hvd.Adasum)
    with pytest.raises(UnsupportedError, match="something else"):
        hvd.allreduce(tf.ones([3]), compression=hvd.Compression.topk())
    dropped_in = hvd.Compression.topk(density=1.0)
    tape_of(dropped_in, wrap=stock.DistributedGradientTape)
    tape_of(dropped_in, wrap=stock.DistributedGradientTape, target=other)  # variables are known
    with pytest.raises(UnsupportedError, match="another compressor"):
        tape_of(dropped_in)


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
    assert len(compression.synchronizer.names) == 1
    assert graph or len(compression.synchronizer._eagerly._functions) == 1


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("density", [0.2, 1.0])
def test_a_tape_over_some_variables_leaves_the_others_alone(density, graph, rank, everywhere):
    """Variables of one bucket: what is applied and what is held back are all there ever was, of each."""
    first, second = (tf.Variable(tf.zeros(30), name=name) for name in ("first", "second"))
    compression = hvd.Compression.topk(density=density)
    given = {"first": np.zeros(30), "second": np.zeros(30)}

    def step(number, variables):
        with tf.GradientTape() as tape:
            position = tf.range(30, dtype=tf.float32)
            target = tf.cos(position * (1.0 + rank) + tf.cast(number, tf.float32))
            loss = tf.add_n([tf.reduce_sum(variable * target) for variable in variables])
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(gradient)

    both, one = [first, second], [first]
    steps = {len(chosen): (lambda number, chosen=chosen: step(number, chosen)) for chosen in (both, one)}
    if graph:
        steps = {key: tf.function(function) for key, function in steps.items()}
    for number, chosen in enumerate([both, one, one, both, one]):
        before = second.numpy()
        steps[len(chosen)](tf.constant(number))
        if chosen is one:
            np.testing.assert_array_equal(second.numpy(), before)
        for variable in chosen:
            given[variable.name.split(":")[0]] += np.cos(np.arange(30) * (1.0 + rank) + number)
    held = compression.state_dict()["residuals"]
    assert [set(names) for names in compression.plan.buckets] == [{"first", "second"}]
    for variable, name in ((first, "first"), (second, "second")):
        waiting = everywhere(held[name]).mean(0)
        np.testing.assert_allclose(waiting - variable.numpy(), everywhere(given[name]).mean(0), atol=2e-5)
        assert waiting.any() == (density < 1.0)
