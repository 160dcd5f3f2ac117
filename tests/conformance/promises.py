"""What every engine computes and saves: see `conformance.engine` for what a test may do with one."""

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest

from conformance.engine import RATE, SHAPES, Engine, Ledger, Simulated, given, replicas_agree, run, same
from horovod_sparse.collectives import AllGather, AllReduce, AllToAll, Broadcast, Exchange
from horovod_sparse.errors import ArgumentError, StateMismatchError
from horovod_sparse.feedback import parse_recipe, recipe
from horovod_sparse.merging import Plan
from horovod_sparse.sparsifiers import Traffic
from support.cases import on_ranks
from support.memories import choose_memory

# What is computed


FEEDBACKS = [
    "dgc:density=0.1,feedback=momentum(momentum=0.5,nesterov=true)",
    "dgc:density=0.1,feedback=momentum(momentum=0.5,masking=false,clip_norm=2.0)",
    "dgc:density=0.1,feedback=momentum(momentum=0.5),dense=('bias','scalar'),densities={'first':0.02}",
]


@pytest.mark.controllers
@pytest.mark.parametrize("case", [*on_ranks(), *FEEDBACKS])
def test_it_equals_the_simulator(engine: Engine, case: Any) -> None:
    """So every law that holds there holds here."""
    recipe = parse_recipe(case) if isinstance(case, str) else case.at(0.1)
    training, simulated = engine.train(recipe), Simulated(engine, recipe)
    for step in range(5):
        run(training, engine, [step])
        simulated.step(training, [given(rank, step) for rank in range(engine.size)])
    simulated.check_held(training, engine.rank)
    assert replicas_agree(engine, training)
    assert training.telemetry.last.step == training.telemetry.num_steps == 5
    kept = recipe.rules.dense
    assert not any(np.any(training.held().get(name, 0.0)) for name in kept)


@pytest.mark.needs("plans")
def test_what_a_plan_leaves_dense_trains_with_momentum(engine: Engine) -> None:
    plan = Plan((("second", "first"),), ("one", "scalar", "bias"))
    training = engine.train("topk:density=0.1,feedback=momentum(momentum=0.5)", merging=plan)
    velocity, wanted = dict.fromkeys(plan.dense, 0.0), dict.fromkeys(plan.dense, 1.0)
    for step in range(4):
        run(training, engine, [step])
        for name in plan.dense:
            mean = sum(given(rank, step)[name] for rank in range(engine.size)) / engine.size
            velocity[name] = 0.5 * velocity[name] + mean
            wanted[name] = wanted[name] - RATE * velocity[name]
    for name, values in wanted.items():
        np.testing.assert_allclose(training.weights()[name], values, rtol=0, atol=1e-6)


@pytest.mark.needs("adopts", "horovod")
@pytest.mark.parametrize("feedback", ["adam", pytest.param("rmsprop", marks=pytest.mark.nightly)])
def test_steps_of_adam_equal_the_simulators(engine: Engine, feedback: str) -> None:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring(type(recipe("topk").sparsifier)):  # type: ignore[misc]
    """Top-k after a round of every kind: of lengths that only the sender knows, of nothing, and read-only."""

    def synchronize(self, accumulator: Any, state: Any, info: Any) -> Any:
        mine, total = np.full(info.rank + 1, info.rank, np.int32), np.full(3, info.rank + 0.5, np.float32)
        mine.flags.writeable = False
        after, before = (info.rank + 1) % info.size, (info.rank - 1) % info.size
        inbox = yield Exchange({after: mine}, (before,))
        assert {peer: words.tolist() for peer, words in inbox.items()} == {before: [before] * (before + 1)}
        arrived = yield AllToAll(tuple(mine + peer for peer in range(info.size)))
        assert [words.tolist() for words in arrived] == [
            [peer + info.rank] * (peer + 1) for peer in range(info.size)
        ]
        root = (state.step + 1) % info.size
        assert (yield Broadcast(np.full(3, info.rank + 0.5), root)).tolist() == [root + 0.5] * 3
        summed = yield AllReduce(total)
        assert summed.dtype == np.float32 and (total == info.rank + 0.5).all(), "it is not written to"
        assert summed.tolist() == [sum(rank + 0.5 for rank in range(info.size))] * 3
        gathered = yield AllGather(mine)
        assert gathered.tolist() == [rank for rank in range(info.size) for _ in range(rank + 1)]
        assert (yield AllGather(np.empty(0, np.int32))).size == 0
        return (yield from super().synchronize(accumulator, state, info))

    def traffic(self, info: Any, counts: Any, step: int = 0) -> Any:
        kinds = Exchange, AllToAll, Broadcast, AllReduce, AllGather, AllGather
        return (*(Traffic(kind, 0) for kind in kinds), *super().traffic(info, counts, step))


@pytest.mark.needs("members")
@pytest.mark.controllers
@pytest.mark.parametrize("everyone", [True, False])
def test_every_kind_of_request_is_carried_out(engine: Engine, everyone: bool, process_set: Any) -> None:
    inside = list(range(engine.size))[0 if everyone else engine.size > 2 :]
    members = None if everyone else process_set(inside)
    if engine.rank not in inside:
        return
    training = engine.train(
        dataclasses.replace(recipe("topk"), sparsifier=Ring(density=1.0)), members=members
    )
    run(training, engine, range(engine.size + 1))  # the root moves on
    for name, weights in training.weights().items():
        total = sum(given(rank, step)[name] for rank in inside for step in range(engine.size + 1))
        np.testing.assert_allclose(weights, 1.0 - RATE * total / len(inside), rtol=0, atol=1e-5)


@pytest.mark.needs("members")
@pytest.mark.controllers
def test_some_of_the_ranks_train_alone(engine: Engine, process_set: Any) -> None:
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
    recipe = parse_recipe(text)
    shared, own = ([engine.train(one), engine.train(one)] for one in (recipe, text))
    for step in range(4):
        for number, training in enumerate(shared + own):
            training.step(given(engine.rank, 2 * step + number % 2))
    assert all(same(*pair) for pair in zip(shared, own, strict=True))


@pytest.mark.needs("models")
def test_one_made_on_one_rank_alone_holds_up_nobody(engine: Engine) -> None:
    alone = engine.train("topk:density=0.1") if engine.rank == 0 else None
    training = engine.train("topk:density=0.1")
    run(training, engine, range(3))
    assert replicas_agree(engine, training)
    assert alone is None or all((values == 1.0).all() for values in alone.weights().values())


@pytest.mark.parametrize("text", ["topk:density=1.0", "exdyna:density=1.0"])
def test_everything_sent_is_dense_training(engine: Engine, text: str) -> None:
    more = [{"groups": 2}, {"gradient_predivide_factor": 2.0}] if "horovod" in engine.has else []
    for options in [{}, *more]:
        training = engine.train(text, **options)
        run(training, engine, range(3))
        for name, weights in training.weights().items():
            total = sum(given(rank, step)[name] for rank in range(engine.size) for step in range(3))
            np.testing.assert_allclose(weights, 1.0 - RATE * total / engine.size, rtol=0, atol=1e-6)
        assert training.telemetry.num_steps == 3 and training.telemetry.last.density_union == 1.0
        assert replicas_agree(engine, training)


def left_out(rank: int, step: int) -> list[str]:
    """Of the first step nothing, and later what only some ranks have, or none."""
    return [] if step == 0 else ["bias"] * ((rank + step) % 2) + ["second"] * (step > 5)


#: options of a training, what an engine has that takes them, and by how much its ledger may be off
KEPT: dict[str, tuple[str, dict[str, Any], str, float]] = {
    **{text: (text, {}, "", 1e-4) for text in ("topk:density=0.1", "exdyna:density=0.1")},
    "dense": ("topk:density=0.2,dense=('*bias','scalar')", {}, "", 1e-4),
    "absent": ("topk:density=0.1", {"absent": True}, "absent", 1e-4),
    **{
        dtype: ("topk:density=0.2", {"dtype": dtype}, "types", atol)
        for dtype, atol in (("float16", 0.03), ("bfloat16", 0.25), ("float64", 1e-9))
    },
}


@pytest.mark.parametrize("what", KEPT)
def test_nothing_is_lost_in_any_order(engine: Engine, what: str) -> None:
    """Gradients of other types lose no more than their last unit."""
    text, options, needed, atol = KEPT[what]
    if needed and needed not in engine.has:
        pytest.skip("no such training")
    training, ledger = engine.train(text, **options), Ledger(engine)
    for step in range(4 if "dtype" in options else 10):
        gradients, left = given(engine.rank, step), left_out(engine.rank, step) if what == "absent" else []
        order = np.random.default_rng([engine.rank, step]).permutation(list(SHAPES))
        gradients = {str(name): gradients[str(name)] for name in order if name not in left}
        ledger.enter(gradients)
        training.step(gradients)
    ledger.balance(training, atol)
    assert replicas_agree(engine, training)
    held = training.held()
    assert all(np.any(held[name]) for name in ("first", "second"))
    assert not any(np.any(held.get(name, 0.0)) for name in ("bias", "scalar") if "dense" in text)


@pytest.mark.needs("merging")
def test_all_ranks_take_one_plan_by_measured_times_and_lose_nothing(engine: Engine) -> None:
    """Law 1 also through changes of the plan by hand, dense to sparse and back, where they can be made."""
    text = "topk:density=0.05"
    profile = engine.measured(text)
    assert set(profile.backward_seconds) == set(SHAPES) and profile.forward_seconds > 0.0
    arguments = {"merging": "optimal", "tensor_selection": "cost"}
    training, ledger = engine.train(text, **arguments, profile=profile), Ledger(engine)
    changes = {
        1: Plan((("first", "second"),), ("one", "scalar", "bias")),
        3: Plan((("bias",), ("second", "one")), ("first", "scalar")),
    }
    for step in range(5):
        ledger.enter(given(engine.rank, step))
        run(training, engine, [step])
        plan = training.keeper.plan
        told = engine.everyone([profile.digest(), repr(plan)])
        assert all(one == told[0] for one in told)
        # it has taken effect: what is synchronized together is what the plan says
        assert [tuple(part.names) for part in training.parts] == [*plan.buckets]
        if step == 0:
            decision = training.keeper.decision
            assert decision.plan == plan and decision.predicted_seconds["taken"] > 0.0
        if step in changes and hasattr(training.keeper, "replan"):
            training.keeper.replan(changes[step])
    ledger.balance(training)
    assert replicas_agree(engine, training)
    for wrong in (None, dataclasses.replace(profile, backward_seconds={})):
        with pytest.raises(ArgumentError, match=r"profile=.*hvd\.measured_profile"):
            engine.train(text, **arguments, profile=wrong).step(given(engine.rank, 0))


def test_telemetry_counts_what_was_sent(engine: Engine) -> None:
    training = engine.train("topk:density=0.1")
    run(training, engine, range(3))
    last = training.telemetry.last
    numbers = [part.bucket.info.num_elements for part in training.parts]
    counts = [max(1, round(0.1 * number)) for number in numbers]
    assert last.num_elements == sum(numbers) and last.dense_bytes == 4 * sum(numbers)
    assert last.num_selected == last.num_target == sum(counts)
    assert last.bytes_sent == sum(4 * (6 + 2 * count) for count in counts)
    assert sum(counts) <= last.num_union <= engine.size * sum(counts)
    assert "x less" in training.telemetry.summary()


# What is saved


def resume(engine: Engine, text: str, **options: Any) -> None:
    whole, later = (engine.train(text, **options) for _ in range(2))
    run(whole, engine, range(3))
    saved = whole.saved()
    run(whole, engine, range(3, 6))
    later.load(saved)
    run(later, engine, range(3, 6))
    assert same(whole, later)
    assert later.steps() == {6}


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
    resume(engine, text)


@pytest.mark.needs("saved")
@pytest.mark.parametrize("text", ["exdyna:density=0.1", "cltk:density=0.1"])
def test_ranks_that_stand_at_different_steps_start_alike(engine: Engine, text: str) -> None:
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
@pytest.mark.parametrize("text", ["exdyna:density=0.1", "topk:density=0.1,feedback=momentum"])
def test_a_state_of_another_compression_is_refused(engine: Engine, text: str) -> None:
    training, other = engine.train(text), engine.train("topk:density=0.1")
    for one in (training, other):
        run(one, engine, range(2))
    before = copy.deepcopy(other.held())
    with pytest.raises(StateMismatchError, match=r"exdyna|feedback"):
        other.load_state(training.saved())
    assert all(np.array_equal(values, before[name]) for name, values in other.held().items())
