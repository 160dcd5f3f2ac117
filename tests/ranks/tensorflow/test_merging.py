"""Plans made by arguments and by times, under real ranks: the same on all of them, and nothing lost."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from conformance.engine import Ledger, given, replicas_agree
from conformance.engines_tensorflow import TAPES, TapeTraining
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.merging import Fit, Plan
from support.keras_models import fit, flat, keras, make_model, trained_densely
from support.merging_models import profile_of_two

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11), "wide": (100, 60)}
#: steps until backward is measured
MEASURED = 7
#: of a profile that has all but that
TO_MEASURE: dict[str, float] = {}


class Descent(TapeTraining):
    def __init__(self, text="topk:density=0.05", graph=True, **arguments):
        super().__init__(text, SHAPES, wrap=hvd.DistributedGradientTape, graph=graph, **arguments)
        self.ledger = Ledger(TAPES[0])

    def trace(self):
        self._functions.clear()

    def run(self, number: int):
        gradients = given(hvd.rank(), number, SHAPES)
        self.step(gradients)
        self.ledger.enter(gradients)


def same_everywhere(plan: Plan) -> bool:
    everyone = hvd.allgather_object(plan.to_dict())
    return all(other == everyone[0] for other in everyone)


def profile(**changed):
    made = profile_of_two({"topk": Fit(1e-5, 1e-9)}, dict.fromkeys(SHAPES, 1e-3), 1e-3)
    return dataclasses.replace(made, size=hvd.size(), framework="tensorflow", **changed)


@pytest.mark.parametrize(
    "arguments",
    [
        {"merging": "optimal", "tensor_selection": "cost"},
        pytest.param({"merging": "optimal", "levels": "host"}, marks=pytest.mark.nightly),
    ],
    ids=["optimal-cost", "two-levels"],
)
def test_all_ranks_change_to_one_plan_and_lose_nothing(arguments, monkeypatch):
    size = hvd.size()
    per_host = 2 if size % 2 == 0 else size
    monkeypatch.setenv("HOROVOD_SPARSE_RANKS_PER_HOST", str(per_host))
    descent = Descent(**arguments)
    compression, number = descent.compression, iter(range(1000))
    for _ in range(MEASURED):
        assert not compression.is_measured
        descent.run(next(number))
    assert compression.is_measured and compression.decision is None
    default = compression.plan
    compression.replan()
    decision = compression.decision
    assert compression.plan == decision.plan and not compression.is_measured
    assert decision.predicted_seconds["taken"] > 0.0
    assert len(set(hvd.allgather_object(decision.profile.digest()))) == 1
    assert decision.profile.per_host == (per_host if "levels" in arguments else 1)
    # the graph of the old plan is refused, on all ranks and without a word to the others
    with pytest.raises((UnsupportedError, tf.errors.OpError), match="trace it again"):
        descent.run(next(number))
    for plan in (decision.plan, Plan((("bias",), ("first", "second")), ("wide",)), default):
        if plan is not decision.plan:
            compression.replan(plan)
        descent.trace()
        for _ in range(2):
            descent.run(next(number))
        assert compression.plan == plan and same_everywhere(compression.plan)
        # it has taken effect: what is synchronized together is what the plan says
        parts = compression.synchronizer.parts
        assert [part.names for part in parts] == [*plan.buckets, *((name,) for name in plan.dense)]
        assert all(len(part.task.legs) == 1 + len(part.task.kinds) for part in parts)
        descent.ledger.balance(descent)
    compression.replan(measure_steps=2)
    descent.trace()
    for _ in range(1 + 2):
        assert not compression.is_measured
        descent.run(next(number))
    assert compression.is_measured
    assert replicas_agree(TAPES[0], descent)


def test_where_no_time_can_be_taken_that_is_said():
    descent = Descent(merging="optimal", graph=False)
    with pytest.raises(UnsupportedError, match=r"eager steps.*give a profile"):
        descent.run(0)
    with pytest.raises(UnsupportedError, match=r"backward_passes_per_step.*give a profile"):
        hvd_keras.DistributedOptimizer(
            keras.optimizers.SGD(0.1), compression="topk", merging="optimal", backward_passes_per_step=2
        )
    with pytest.raises(UnsupportedError, match=r"LossScaleOptimizer.*give a profile"):
        scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        hvd_keras.DistributedOptimizer(scaler, compression="topk", merging="optimal")


def test_fit_changes_its_plan_by_a_callback(rank, size, everywhere):
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    given = profile(backward_seconds=TO_MEASURE)
    optimizer = hvd_keras.DistributedOptimizer(
        sgd, compression="topk:density=1.0", merging="optimal", profile=given
    )
    model = make_model()
    fit(model, optimizer, rank, size, callbacks=[hvd_keras.callbacks.ReplanCallback()])
    expected = flat(trained_densely(keras.optimizers.SGD(0.1, momentum=0.9), rank, size))
    np.testing.assert_allclose(flat(model), expected, rtol=1e-4, atol=1e-6)
    assert optimizer.decision is not None and optimizer.telemetry.num_steps == 12
    assert same_everywhere(optimizer.plan)
    weights = everywhere(flat(model))
    assert (weights == weights[0]).all()
