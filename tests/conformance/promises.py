"""What every engine promises: see `conformance.engine` for what a test may do with one."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from typing import Any

import numpy as np
import pytest

from conformance.engine import RATE, SHAPES, Engine, Ledger, Simulated, flat, given, replicas_agree
from horovod_sparse.carriers.shared_memory import MEMORY_VARIABLE, lends
from horovod_sparse.errors import (
    DriftError,
    HorovodSparseError,
    NonFiniteGradientError,
    NonFiniteSumError,
    StateMismatchError,
    UnknownNameError,
)
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.topology import Topology
from horovod_sparse.training import agreement
from support.cases import on_ranks
from support.memories import choose_memory
from support.sampling import rows_by

ZEROS = {name: np.zeros(shape) for name, shape in SHAPES.items()}
#: in which all ranks have to have an error
SECONDS = 10.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Over the engines of the launch that have what the test is about."""
    if "engine" in metafunc.fixturenames:
        needed = {one for mark in metafunc.definition.iter_markers("needs") for one in mark.args}
        engines = [engine for engine in metafunc.module.ENGINES if needed <= engine.has]
        metafunc.parametrize("engine", engines, ids=[engine.name for engine in engines])


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch, size: int) -> Topology:
    """Two ranks on a host, or all of them where that leaves a host with fewer."""
    per_host = 2 if size % 2 == 0 else size
    monkeypatch.setenv("HOROVOD_SPARSE_RANKS_PER_HOST", str(per_host))
    return Topology.regular(size // per_host, per_host)


def nightly_from(number: int, rows: Any) -> list[Any]:
    """The rows of a table, those from a number on for nights."""
    marks = [()] * number + [pytest.mark.nightly] * len(rows)
    return [pytest.param(row, marks=mark) for row, mark in zip(rows, marks, strict=False)]


def run(training: Any, engine: Engine, steps: Any) -> None:
    for step in steps:
        training.step(given(engine.rank, step))


def same(one: Any, other: Any) -> bool:
    """Weights, and what is held back."""
    pairs = ((one.weights(), other.weights()), (one.held(), other.held()))
    return all(np.array_equal(flat(a, list(b)), flat(b, list(b))) for a, b in pairs)


# What is computed


@pytest.mark.controllers
@pytest.mark.parametrize("case", on_ranks())
def test_it_equals_the_simulator(engine: Engine, case: Any) -> None:
    """So every law that holds there holds here."""
    recipe = case.at(0.1)
    training, simulated = engine.train(recipe), Simulated(engine, recipe)
    for step in range(5):
        run(training, engine, [step])
        simulated.step(training, [given(rank, step) for rank in range(engine.size)])
    simulated.check_held(training, engine.rank)
    assert replicas_agree(engine, training)
    assert training.telemetry.last.step == training.telemetry.num_steps == 5


@pytest.mark.parametrize(
    "text",
    [
        "dgc:density=0.1,feedback=momentum(momentum=0.5,nesterov=true)",
        "dgc:density=0.1,feedback=momentum(momentum=0.5,masking=false,clip_norm=2.0)",
    ],
)
def test_feedback_equals_the_simulators(engine: Engine, text: str) -> None:
    training, simulated = engine.train(text), Simulated(engine, parse_recipe(text))
    for step in range(4):
        run(training, engine, [step])
        simulated.step(training, [given(rank, step) for rank in range(engine.size)])
    assert replicas_agree(engine, training)


@pytest.mark.needs("adopts")
@pytest.mark.parametrize("feedback", ["adam", pytest.param("rmsprop", marks=pytest.mark.nightly)])
def test_steps_of_adam_equal_the_simulators(engine: Engine, feedback: str) -> None:
    """Stopped and resumed on the way: the moment and its bias go on."""
    text = f"topk:density=0.1,feedback={feedback}(beta2=0.9)"
    training, simulated = engine.train(text), Simulated(engine, parse_recipe(text))
    for step in range(5):
        if step == 3:
            saved, training = training.saved(), engine.train(text)
            training.load(saved)
        run(training, engine, [step])
        simulated.step(training, [given(rank, step) for rank in range(engine.size)])
    simulated.check_held(training, engine.rank)
    assert replicas_agree(engine, training)


@pytest.mark.needs("members")
@pytest.mark.controllers
def test_some_of_the_ranks_train_alone(engine: Engine, process_set: Any) -> None:
    """As a simulation of their number; the others take no part."""
    inside = list(range(1, engine.size)) if engine.size > 2 else [0, 1]
    members, text = process_set(inside), "exdyna:density=0.1"
    if engine.rank not in inside:
        return
    training = engine.train(text, members=members)
    simulated = Simulated(engine, parse_recipe(text), size=len(inside))
    for step in range(3):
        run(training, engine, [step])
        simulated.step(training, [given(rank, step) for rank in inside])


@pytest.mark.needs("device")
@pytest.mark.parametrize("case", on_ranks("exdyna", "oktopk", "qsgd"))
def test_gradients_of_a_device_have_the_hosts_bits(engine: Engine, case: Any, monkeypatch: Any) -> None:
    """As if a GPU held them: its memory, on tensors of the CPU."""
    trainings = []
    for memory in ("host", "device"):
        choose_memory(monkeypatch, memory)
        trainings.append(engine.train(case.at(0.1)))
        run(trainings[-1], engine, range(4))
    assert same(*trainings)


@pytest.mark.parametrize("text", ["exdyna:density=0.1", "dgc:density=0.1,feedback=momentum"])
def test_one_recipe_serves_two_trainings(engine: Engine, text: str) -> None:
    """As those of two networks that are trained in turn: a recipe is a value, and keeps nothing of either."""
    recipe = parse_recipe(text)
    shared, own = ([engine.train(one), engine.train(one)] for one in (recipe, text))
    for step in range(4):
        for number, training in enumerate(shared + own):
            training.step(given(engine.rank, 2 * step + number % 2))
    assert all(same(*pair) for pair in zip(shared, own, strict=True))


@pytest.mark.parametrize("text", ["topk:density=1.0", "exdyna:density=1.0"])
def test_everything_sent_is_dense_training(engine: Engine, text: str) -> None:
    training = engine.train(text)
    run(training, engine, range(3))
    for name, weights in training.weights().items():
        mean = sum(given(rank, step)[name] for rank in range(engine.size) for step in range(3)) / engine.size
        np.testing.assert_allclose(weights, 1.0 - RATE * mean, rtol=0, atol=1e-6)
    assert replicas_agree(engine, training)


@pytest.mark.needs("types")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_types_lose_no_more_than_their_last_unit(engine: Engine, dtype: str) -> None:
    training, ledger = engine.train("topk:density=0.2", dtype=dtype), Ledger(engine)
    for step in range(4):
        gradients = given(engine.rank, step)
        ledger.enter(gradients)
        training.step(gradients)
    ledger.balance(training, atol={"float16": 0.03, "bfloat16": 0.25}.get(dtype, 1e-9))
    assert replicas_agree(engine, training)


@pytest.mark.parametrize(
    "text", ["topk:density=0.1", "exdyna:density=0.1", "topk:density=0.2,dense=('*bias','scalar')"]
)
def test_nothing_is_lost_in_any_order(engine: Engine, text: str) -> None:
    """Every rank has its gradients in an order of its own; what a rule leaves dense is the mean."""
    training, ledger = engine.train(text), Ledger(engine)
    for step in range(10):
        gradients = given(engine.rank, step)
        ledger.enter(gradients)
        order = np.random.default_rng([engine.rank, step]).permutation(list(SHAPES))
        training.step({str(name): gradients[str(name)] for name in order})
    ledger.balance(training)
    assert replicas_agree(engine, training)
    held = training.held()
    assert all(np.any(held[name]) for name in ("first", "second"))
    assert not any(np.any(held.get(name, 0.0)) for name in ("bias", "scalar") if "dense" in text)


@pytest.mark.needs("absent")
def test_gradients_that_some_ranks_do_not_have(engine: Engine) -> None:
    """What the others send arrives, and what is held back may come meanwhile."""
    training, ledger = engine.train("topk:density=0.1", absent=True), Ledger(engine)
    for step in range(10):
        left = [] if step == 0 else ["bias"] * ((engine.rank + step) % 2) + ["second"] * (step > 5)
        gradients = {name: one for name, one in given(engine.rank, step).items() if name not in left}
        ledger.enter(gradients)
        training.step(gradients)
    ledger.balance(training)
    assert replicas_agree(engine, training)


def test_telemetry_counts_what_was_sent(engine: Engine) -> None:
    training = engine.train("topk:density=0.1")
    run(training, engine, range(3))
    last = training.telemetry.last
    numbers = [part.bucket.info.num_elements for part in training.parts]
    counts = [max(1, round(0.1 * number)) for number in numbers]
    assert last.num_elements == sum(numbers) and last.dense_bytes == 4 * sum(numbers)
    assert last.num_selected == last.num_target == sum(counts)
    assert last.bytes_sent == sum(4 * (4 + 2 * count) for count in counts)
    assert sum(counts) <= last.num_union <= engine.size * sum(counts)
    assert "x less" in training.telemetry.summary()


# What is saved


@pytest.mark.needs("saved")
@pytest.mark.parametrize(
    "text",
    [
        "exdyna:density=0.1",
        pytest.param("oktopk:density=0.1", marks=pytest.mark.nightly),
        "randomk:density=0.1,schedule=exponential(steps=8,start=0.5)",
        "topk:density=0.1,feedback=momentum(momentum=0.5)",
        "cltk:density=0.1",
    ],
)
def test_resume_is_invisible(engine: Engine, text: str) -> None:
    """Stopped after three of six steps: the same bits as never stopped."""
    whole, later = engine.train(text), engine.train(text)
    run(whole, engine, range(3))
    saved = whole.saved()
    run(whole, engine, range(3, 6))
    later.load(saved)
    run(later, engine, range(3, 6))
    assert same(whole, later)
    assert later.steps() == {6}


@pytest.mark.needs("saved")
@pytest.mark.parametrize("text", ["exdyna:density=0.1", "cltk:density=0.1"])
def test_ranks_that_stand_at_different_steps_start_alike(engine: Engine, text: str) -> None:
    """As where a file is missing, or a worker was replaced: windows, seeds and leaders go by steps."""
    before = engine.train(text)
    run(before, engine, range(4))
    training = engine.train(text)
    if engine.rank == 0:
        training.load_state(before.saved())
    for step in range(3):
        run(training, engine, [step])
        assert replicas_agree(engine, training)
    assert training.steps() == {7}, "schedules go on where the furthest rank was"


@pytest.mark.needs("saved")
def test_a_state_of_another_compression_is_refused(engine: Engine) -> None:
    training, other = engine.train("exdyna:density=0.1"), engine.train("topk:density=0.1")
    for one in (training, other):
        run(one, engine, range(2))
    before = copy.deepcopy(other.held())
    with pytest.raises(StateMismatchError, match="exdyna"):
        other.load_state(training.saved())
    assert all(np.array_equal(values, before[name]) for name, values in other.held().items())


# What goes wrong


@pytest.mark.controllers
@pytest.mark.parametrize(
    ("text", "bad"),
    [("topk:density=0.1", np.inf), ("exdyna:density=0.1", np.nan), ("gtopk:density=0.1", np.nan)],
)
def test_a_bad_gradient_of_one_rank_is_an_error_on_all(engine: Engine, text: str, bad: float) -> None:
    """Nothing is applied, and nothing is left of it: all ranks drop their gradients."""
    training, ledger, sick = engine.train(text), Ledger(engine), engine.size - 1
    for step in range(5):
        gradients = given(engine.rank, step)
        if step != 2:
            ledger.enter(gradients)
            training.step(gradients)
            continue
        before = training.weights()
        if engine.rank == sick:
            gradients["second"].reshape(-1)[3] = bad
        with pytest.raises(NonFiniteGradientError, match=f"rank {sick}: second") as caught:
            training.step(gradients)
        assert caught.value.where == {sick: "second"}
        assert all(np.array_equal(values, before[name]) for name, values in training.weights().items())
    ledger.balance(training)
    assert replicas_agree(engine, training)
    assert training.telemetry.last.step == 4


def test_a_bad_dense_gradient_names_its_rank(engine: Engine) -> None:
    training = engine.train("topk:density=0.1,dense_below=10")
    run(training, engine, range(2))
    gradients, before = given(engine.rank, 2), training.weights()
    if engine.rank == 0:
        gradients["bias"][2] = np.nan
    with pytest.raises(NonFiniteGradientError, match="rank 0: bias"):
        training.step(gradients)
    assert all(np.array_equal(values, before[name]) for name, values in training.weights().items())
    run(training, engine, range(3, 5))
    assert replicas_agree(engine, training)


@pytest.mark.needs("nonfinite")
@pytest.mark.parametrize(
    "text",
    [
        "topk:density=0.1",
        "topk:density=0.1,dense_below=10",
        "gtopk:density=0.1",
        pytest.param("exdyna:density=0.1,feedback=none", marks=pytest.mark.nightly),
        "topk:density=0.1,feedback=momentum(momentum=0.5)",
    ],
)
def test_a_bad_rank_is_left_out_or_the_step_is_skipped(engine: Engine, text: str) -> None:
    """Left out: as if its gradient had been zero. Skipped: as if there had been no such step."""
    leaving, skipping = (engine.train(text, on_nonfinite=policy) for policy in ("zero", "skip"))
    twin, without = engine.train(text), engine.train(text)
    for step in range(5):
        gradients, zeroed = given(engine.rank, step), given(engine.rank, step)
        if step == 2 and engine.rank == engine.size - 1:
            gradients["bias"][2], zeroed = np.nan, ZEROS
        before = skipping.weights()
        leaving.step(gradients)
        skipping.step(gradients)
        twin.step(zeroed)
        if step != 2:
            without.step(given(engine.rank, step))
        moved = any(not np.array_equal(one, before[name]) for name, one in skipping.weights().items())
        assert moved == (step != 2)
    assert same(leaving, twin) and same(skipping, without)
    assert (leaving.telemetry.num_dropped, leaving.telemetry.num_steps) == (1, 5)
    assert (skipping.telemetry.num_skipped, skipping.telemetry.num_steps) == (1, 4)
    assert replicas_agree(engine, leaving) and replicas_agree(engine, skipping)


@pytest.mark.parametrize("name", ["exdyna", "gtopk", "oktopk"])
def test_a_sum_that_is_not_finite_is_applied_by_nobody(engine: Engine, name: str) -> None:
    """Though every rank's gradient is."""
    training = engine.train(f"{name}:density=0.1")
    run(training, engine, range(2))
    before, gradients = training.weights(), copy.deepcopy(ZEROS)
    gradients["first"][3, 7] = 3e38
    with pytest.raises(NonFiniteSumError, match="first"):
        training.step(gradients)
    assert all(np.array_equal(values, before[name]) for name, values in training.weights().items())


@pytest.mark.needs("nonfinite")
@pytest.mark.parametrize("policy", ["skip", "zero"])
def test_a_sum_that_is_not_finite_is_skipped_once(engine: Engine, policy: str) -> None:
    training = engine.train("exdyna:density=0.1", on_nonfinite=policy)
    run(training, engine, range(2))
    before, gradients = training.weights(), copy.deepcopy(ZEROS)
    gradients["first"][3, 7] = 3e38
    training.step(gradients)
    assert all(np.array_equal(values, before[name]) for name, values in training.weights().items())
    run(training, engine, range(2, 4))
    assert training.telemetry.num_skipped == 1
    assert all(np.isfinite(values).all() for values in training.weights().values())
    assert replicas_agree(engine, training)


@pytest.mark.needs("buckets")
@pytest.mark.controllers
@pytest.mark.parametrize("name", ["topk", "gtopk"])
def test_a_rank_that_is_a_step_behind_is_met_on_all(engine: Engine, name: str) -> None:
    """As one that gave up a step alone, by an error of its own that the loop has caught."""
    training = engine.train(f"{name}:density=0.1")
    run(training, engine, range(3))
    behind = engine.size - 1
    if engine.rank == behind:
        for part in training.parts:
            part.bucket.state = dataclasses.replace(part.bucket.state, step=2)
    words = rf"ranks \[0.*\] at 3, ranks \[{behind}\] at 2|the states of the ranks' sparsifiers differ"
    with pytest.raises(StateMismatchError, match=words):
        run(training, engine, [3])


@pytest.mark.needs("drift")
@pytest.mark.parametrize("policy", ["raise", "warn", "resync"])
def test_replicas_that_come_apart_are_found(engine: Engine, policy: str, caplog: Any) -> None:
    training, twin = (
        engine.train("topk:density=0.1", check_every=3, on_drift=policy),
        engine.train("topk:density=0.1", check_every=0),
    )
    for one in (training, twin):
        run(one, engine, range(3))
    if engine.rank == engine.size - 1:
        training.change("second")
    words = rf"after step [36] .*second differs: ranks \[0.* have .*ranks \[{engine.size - 1}\]"
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        if policy == "raise":
            with pytest.raises(DriftError, match=words):
                run(training, engine, range(3, 7))
            return
        run(training, engine, range(3, 10))
    run(twin, engine, range(3, 10))
    assert training.telemetry.num_drifts >= 1
    found = [record.getMessage() for record in caplog.records if "second differs" in record.getMessage()]
    if policy == "warn":
        assert len(found) == (engine.rank == 0), "once, by one rank, until something else differs"
    else:
        assert replicas_agree(engine, training)
        assert all(np.array_equal(one, twin.weights()[name]) for name, one in training.weights().items())


# What ranks are given


#: of which the first ones are for days
OTHERS = [
    *("values=float16", "dense_below=100", "gtopk:density=0.1"),
    *("density=0.2", "schedule=exponential(steps=10)", "feedback=none", "feedback=momentum", "indices=gaps"),
    *("feedback=error(clip_norm=1.0)", "values=int8", "values=2bit", "dense=('*bias',)", "quantum=4"),
    *(f"{name}:density=0.1" for name in ("exdyna", "micro", "oktopk", "dgc", "randomk", "cltk", "mstopk")),
    *(f"{name}:density=0.1" for name in ("sidco", "spardl", "topk_dsa", "dragonn", "chunk_topk")),
    *("hard_threshold:threshold=0.1", "qsgd:levels=4", "signsgd:density=1.0"),
]
#: settings of the optimizer of one rank
OPTIMIZER = {"lr": 0.25, "weight_decay": 0.1, "momentum": 0.9, "maximize": True}
#: of one rank alone, and what is said of it
ENVIRONMENT = {
    "HOROVOD_SPARSE_CHECK_EVERY=7": "check_every differs: .* 1000, .* 7",
    "HOROVOD_SPARSE_ON_DRIFT=warn": "on_drift differs: .* raise, .* warn",
    **{
        f"HOROVOD_SPARSE_{name}=nonsense": f"{name}.*nonsense"
        for name in ("CHECK_EVERY", "ON_DRIFT", "DEADLINE_SECONDS", "SHARED_MEMORY", "TRANSPORT")
    },
}
#: of one rank alone, as text
WRONG = {"topk:densty=0.1": "densty", "topkk:density=0.1": "topkk", "topk:density=7": "density=7"}


def refused(engine: Engine, training: Any, words: str, shapes: Any = SHAPES) -> None:
    """One step ends soon, and on every rank, in an error with these words."""
    begun = time.monotonic()
    with pytest.raises(StateMismatchError, match=words):
        training.step(given(engine.rank, 0, shapes))
    assert time.monotonic() - begun < SECONDS


@pytest.mark.parametrize("other", nightly_from(3, OTHERS))
def test_another_compression_is_told_to_all(engine: Engine, other: str) -> None:
    last = engine.size - 1
    if ":" not in other:
        other = f"topk:{other}" if "density=" in other else f"topk:density=0.1,{other}"
    training = engine.train(other if engine.rank == last else "topk:density=0.1")
    refused(engine, training, rf"compression differs: ranks \[.*\] have topk:density=0.1, ranks \[{last}\]")


@pytest.mark.needs("adopts")
@pytest.mark.parametrize("setting", nightly_from(1, OPTIMIZER))
def test_another_setting_of_the_optimizer_is_told_to_all(engine: Engine, setting: str) -> None:
    """In the first step, or the second's backward pass."""
    training = engine.train("topk:density=0.1")
    if engine.rank == engine.size - 1:
        training.optimizer.param_groups[0][setting] = OPTIMIZER[setting]
    with pytest.raises(DriftError, match=f"{setting} of group 0"):
        run(training, engine, range(2))


@pytest.mark.needs("retries")
@pytest.mark.parametrize("wrong", nightly_from(1, [*WRONG, *ENVIRONMENT]))
def test_what_one_rank_cannot_use_is_told_to_all(engine: Engine, wrong: str, monkeypatch: Any) -> None:
    """A text, or a variable of the environment: there is an optimizer on the other ranks alone."""
    text, began = "topk:density=0.1", time.monotonic()
    if engine.rank == engine.size - 1:
        if wrong in ENVIRONMENT:
            monkeypatch.setenv(*wrong.split("="))
        else:
            text = wrong
    with pytest.raises(HorovodSparseError, match={**WRONG, **ENVIRONMENT}[wrong]):
        run(engine.train(text), engine, [0])
    assert time.monotonic() - began < SECONDS


@pytest.mark.needs("models")
@pytest.mark.parametrize("change", ["shape", "elements"])
def test_another_model_is_told_to_all(engine: Engine, change: str) -> None:
    shapes: dict[str, Any] = {"first": (40, 30), "second": (3, 5, 11)}
    if engine.rank == engine.size - 1:
        shapes["second"] = (5, 3, 11) if change == "shape" else (3, 5, 12)
    refused(engine, engine.train("topk:density=0.1", shapes), "do not train the same model", shapes)


@pytest.mark.controllers
def test_another_version_is_told_to_all(engine: Engine, monkeypatch: Any) -> None:
    last = engine.size - 1
    if engine.rank == last:
        monkeypatch.setattr(agreement, "__version__", "0.0.9")
    refused(engine, engine.train("topk:density=0.1"), rf"version differs: .*, ranks \[{last}\] 0.0.9")


# Two levels: dense within hosts, sparse between them


@pytest.mark.needs("levels")
@pytest.mark.hosts
@pytest.mark.parametrize("case", on_ranks("topk", "exdyna", "cltk-values=int8", "oktopk", "qsgd"))
def test_two_levels_equal_the_simulators(engine: Engine, case: Any, hosts: Topology) -> None:
    recipe = case.at(0.1)
    training = engine.train(recipe, levels="host")
    simulated = Simulated(engine, recipe, topology=hosts)
    for step in range(4):
        run(training, engine, [step])
        simulated.step(training, [given(rank, step) for rank in range(engine.size)])
    simulated.check_held(training, engine.rank)
    assert replicas_agree(engine, training)
    assert training.telemetry.last.bytes_inside > 0
    assert lends(training.parts)


@pytest.mark.needs("levels")
@pytest.mark.hosts
@rows_by("text,dtype", ["topk:density=0.1", "exdyna:density=1.0"], ["float32", "bfloat16"])
def test_shared_memory_gives_the_bits_of_messages(
    engine: Engine, text: str, dtype: str, hosts: Topology, monkeypatch: Any
) -> None:
    """Of any numbers: what is summed is so in the order of ranks, and half types in float32."""
    trainings = []
    for memory in ("0", "1"):
        monkeypatch.setenv(MEMORY_VARIABLE, memory)
        types = {} if dtype == "float32" or "types" not in engine.has else {"dtype": dtype}
        trainings.append(engine.train(text, levels="host", **types))
        for step in range(3):
            generator = np.random.default_rng([engine.rank, step])
            trainings[-1].step({name: generator.standard_normal(shape) for name, shape in SHAPES.items()})
        assert lends(trainings[-1].parts) == (memory == "1")
    assert same(*trainings)


@pytest.mark.needs("levels")
@pytest.mark.hosts
@pytest.mark.parametrize("where", ["first", "one"])
def test_a_bad_rank_of_a_host_is_an_error_on_all(engine: Engine, where: str, hosts: Topology) -> None:
    training = engine.train("exdyna:density=0.2", levels="host")
    run(training, engine, [0])
    before, sick, last_host = copy.deepcopy(training.held()), given(engine.rank, 1), set(hosts.hosts[-1])
    if engine.rank == engine.size - 1:
        sick[where] = np.full(SHAPES[where], np.nan)
    with pytest.raises(NonFiniteGradientError) as caught:
        training.step(sick)
    assert set(caught.value.where) == last_host and set(caught.value.where.values()) == {where}
    for name, values in training.held().items():  # all gradients are dropped, in all buckets
        np.testing.assert_allclose(values, before[name], rtol=0, atol=1e-6)
    run(training, engine, range(2, 4))
    assert replicas_agree(engine, training)


@pytest.mark.needs("levels")
@pytest.mark.hosts
@rows_by(
    "way,feedback",
    [("flat", "host"), ("host", "flat"), ("host", "host")],
    ["error", "momentum(momentum=0.5)"],
    ids="-".join,
)
def test_what_was_saved_loads_at_other_levels(
    engine: Engine, way: Any, feedback: str, hosts: Topology
) -> None:
    text = f"topk:density=0.05,feedback={feedback}"
    before, after = (engine.train(text, levels=levels) for levels in way)
    ledger = Ledger(engine)
    for step in range(3):
        ledger.enter(given(engine.rank, step))
        run(before, engine, [step])
    after.load(before.saved())
    after.step(ZEROS)
    if feedback == "error":
        ledger.balance(after)
    assert replicas_agree(engine, after)
    assert all(getattr(part.bucket, "elsewhere", None) is None for part in after.parts)


@pytest.mark.needs("levels")
@pytest.mark.hosts
def test_levels_are_those_of_all_ranks(engine: Engine, hosts: Topology) -> None:
    refused(
        engine,
        engine.train("topk:density=0.1", levels="host" if engine.rank else "flat"),
        "levels differs",
    )
    with pytest.raises(UnknownNameError, match=r"levels.*auto, flat, host"):
        engine.train("topk:density=0.1", levels="two").step(given(engine.rank, 0))
