"""What every engine does about bad gradients, and about ranks that come apart or are given other things."""

import contextlib
import copy
from typing import Any

import numpy as np
import pytest

from conformance.engine import SHAPES, ZEROS, Engine, Ledger, given, replicas_agree, run, same
from horovod_sparse import errors
from horovod_sparse.training import agreement

# What goes wrong


@pytest.mark.controllers
@pytest.mark.parametrize(
    ("text", "bad", "where"),
    [
        ("topk:density=0.1", np.inf, "second"),
        ("topk:density=0.1,dense_below=10", np.nan, "bias"),
        ("exdyna:density=0.1", np.nan, "second"),
        ("gtopk:density=0.1", np.nan, "second"),
        ("topk:density=0.1,feedback=momentum(momentum=0.5)", np.inf, "second"),
        pytest.param(
            *("topk:density=0.1,feedback=error(clip_norm=20.0)", np.inf, "second"), marks=pytest.mark.nightly
        ),
    ],
)
def test_a_bad_gradient_of_one_rank_is_an_error_on_all(
    engine: Engine, text: str, bad: float, where: str
) -> None:
    """Nothing is applied, and nothing of it arrives later: all ranks drop their gradients, of all buckets."""
    training, ledger, sick = engine.train(text), Ledger(engine), engine.size - 1
    for step in range(6):
        gradients = given(engine.rank, step)
        if step not in (0, 3):
            ledger.enter(gradients)
            training.step(gradients)
            continue
        before = training.weights()
        if engine.rank == sick:
            for values in gradients.values():
                values.reshape(-1)[:1] += 4096.0
            gradients[where].reshape(-1)[3] = bad
        if engine.rank % 2:  # each finds the same, whatever it asks for first
            gradients = dict(reversed(gradients.items()))
        with pytest.raises(errors.NonFiniteGradientError, match=f"rank {sick}: {where}") as caught:
            training.step(gradients)
        assert caught.value.where == {sick: where}
        assert all(np.array_equal(values, before[name]) for name, values in training.weights().items())
    if "feedback" not in text:
        ledger.balance(training)
    assert all(np.abs(values).max() < 100 for values in training.weights().values())
    assert replicas_agree(engine, training)
    assert training.telemetry.last.step == 4


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
def test_a_step_that_is_skipped_leaves_nothing(engine: Engine, text: str) -> None:
    skipping, without = engine.train(text, on_nonfinite="skip"), engine.train(text)
    for step in range(5):
        gradients = given(engine.rank, step)
        if step == 2 and engine.rank == engine.size - 1:
            gradients["bias"][2] = np.nan
        before = skipping.weights()
        skipping.step(gradients)
        if step != 2:
            without.step(given(engine.rank, step))
        moved = any(not np.array_equal(one, before[name]) for name, one in skipping.weights().items())
        assert moved == (step != 2)
    assert same(skipping, without)
    assert (skipping.telemetry.num_skipped, skipping.telemetry.num_steps) == (1, 4)
    assert replicas_agree(engine, skipping)


@pytest.mark.parametrize("name", ["exdyna", "gtopk", "oktopk"])
def test_a_sum_that_is_not_finite_is_applied_by_nobody(engine: Engine, name: str) -> None:
    for options in [{}, *([{"on_nonfinite": "skip"}] if "nonfinite" in engine.has else [])]:
        training = engine.train(f"{name}:density=0.1", **options)
        run(training, engine, range(2))
        before, gradients = training.weights(), copy.deepcopy(ZEROS)
        gradients["first"][3, 7] = 3e38
        with contextlib.nullcontext() if options else pytest.raises(errors.NonFiniteSumError, match="first"):
            training.step(gradients)
        assert all(np.array_equal(values, before[key]) for key, values in training.weights().items())
    if "nonfinite" in engine.has:
        run(training, engine, range(2, 4))
        assert training.telemetry.num_skipped == 1
        assert all(np.isfinite(values).all() for values in training.weights().values())
        assert replicas_agree(engine, training)


@pytest.mark.needs("adopts", "buckets")
def test_momentum_that_comes_later_is_refused_and_leaves_nothing(engine: Engine) -> None:
    training = engine.train("topk:density=0.1,feedback=momentum")
    for step in range(9):
        momentum = 0.9 if step in (3, 5, 6) else 0.0
        training.optimizer.param_groups[0]["momentum"] = momentum
        if momentum:
            with pytest.raises(errors.ArgumentError, match="momentum=0 to the optimizer"):
                run(training, engine, [step])
        else:
            run(training, engine, [step])
    assert training.telemetry.last.step == 6
    assert replicas_agree(engine, training)


@pytest.mark.needs("drift")
def test_replicas_that_come_apart_are_found(engine: Engine) -> None:
    training = engine.train("topk:density=0.1", check_every=3)
    run(training, engine, range(3))
    if engine.rank == engine.size - 1:
        training.change("second")
    words = rf"after step [36] .*second differs: ranks \[0.* have .*ranks \[{engine.size - 1}\]"
    with pytest.raises(errors.DriftError, match=words):
        run(training, engine, range(3, 7))


# What ranks are given


OTHERS = ["topk:density=0.1,values=float16", "topk:density=0.1,dense_below=100", "gtopk:density=0.1"]
#: of all ranks but one, of that one, what is said of it, and what an engine has that takes such arguments
ARGUMENTS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"op": 1}, r"op differs: .* Average, ranks \[\d\] Sum", "horovod"),
    ({}, {"gradient_predivide_factor": 2.0}, "(gradient_predivide|prescale)_factor differs: ", "horovod"),
    ({"check_every": 3}, {"check_every": 4}, "check_every differs: .* 3, .* 4", "drift"),
    ({}, {"on_nonfinite": "skip"}, "on_nonfinite differs", "nonfinite"),
    (
        {"merging": "layerwise"},
        {"merging": "single"},
        r"plan differs: .*merging=layerwise.*, ranks \[\d\] .*merging=single",
        "merging",
    ),
    (
        {"merging": "layerwise", "tensor_selection": "all"},
        {"merging": "layerwise", "tensor_selection": "cost"},
        r"plan differs: .* tensor_selection=all.*, ranks \[\d\] .*tensor_selection=cost",
        "merging",
    ),
    ({}, {"backward_passes_per_step": 2}, r"backward_passes_per_step differs: .* 1, .* 2", "clips"),
    ({}, {"sparse_as_dense": True}, "sparse_as_dense differs: .* False, .* True", "clips"),
    ({}, {"max_grad_norm": 1.0}, "max_grad_norm differs: .* None, .* 1.0", "clips"),
    ({}, {"synchronize_at": "step"}, "synchronize_at differs: .* backward, .* step", "clips"),
]


def refused(engine: Engine, training: Any, words: str, shapes: Any = SHAPES) -> None:
    with pytest.raises(errors.StateMismatchError, match=words):
        training.step(given(engine.rank, 0, shapes))


@pytest.mark.parametrize("other", OTHERS)
def test_another_compression_is_told_to_all(engine: Engine, other: str) -> None:
    last = engine.size - 1
    training = engine.train(other if engine.rank == last else "topk:density=0.1")
    refused(engine, training, rf"compression differs: ranks \[.*\] have topk:density=0.1, ranks \[{last}\]")


@pytest.mark.needs("saved")
def test_other_arguments_are_told_to_all(engine: Engine) -> None:
    for first, last, words, feature in ARGUMENTS:
        if feature in engine.has:
            arguments = last if engine.rank == engine.size - 1 else first
            training = engine.train("topk:density=0.1", **arguments)
            refused(engine, training, words)


@pytest.mark.needs("retries")
def test_what_one_rank_cannot_use_is_told_to_all(engine: Engine) -> None:
    text = "topk:densty=0.1" if engine.rank == engine.size - 1 else "topk:density=0.1"
    with pytest.raises(errors.HorovodSparseError, match="densty"):
        run(engine.train(text), engine, [0])


@pytest.mark.needs("models")
@pytest.mark.parametrize("change", ["shape", "elements", "name"])
def test_another_model_is_told_to_all(engine: Engine, change: str) -> None:
    shapes: dict[str, Any] = {"first": (40, 30), "second": (3, 5, 11)}
    if engine.rank == engine.size - 1:
        other = {"shape": (5, 3, 11), "elements": (3, 5, 12)}.get(change, shapes.pop("second"))
        shapes["third" if change == "name" else "second"] = other
    refused(
        engine,
        engine.train("topk:density=0.1", shapes),
        "trained parameter .*second differs: .* elements of float32, shape",
        shapes,
    )


@pytest.mark.controllers
def test_another_version_is_told_to_all(engine: Engine, monkeypatch: Any) -> None:
    last = engine.size - 1
    if engine.rank == last:
        monkeypatch.setattr(agreement, "__version__", "0.0.9")
    refused(engine, engine.train("topk:density=0.1"), rf"version differs: .*, ranks \[{last}\] 0.0.9")
