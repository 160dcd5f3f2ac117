"""Plans made by arguments and by times, under real ranks: the same on all of them, and nothing lost."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from conformance.engine import Ledger, given, replicas_agree
from conformance.engines_tensorflow import TAPES, TapeTraining
from horovod_sparse.errors import ArgumentError
from horovod_sparse.merging import Plan, Profile
from support.keras_models import fit, flat, keras, make_model, share, trained_densely

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11), "wide": (100, 60)}


def same_everywhere(one) -> bool:
    return len(set(hvd.allgather_object(repr(one)))) == 1


@pytest.mark.parametrize("graph", [True, False])
def test_all_ranks_take_one_plan_by_measured_times_and_lose_nothing(graph, tmp_path):
    compression = hvd.Compression.topk(density=0.05)
    weights = [tf.Variable(tf.ones(shape), name=name) for name, shape in SHAPES.items()]

    def loss():
        return tf.add_n([tf.reduce_sum(weight**2) for weight in weights])

    made = hvd.measured_profile(loss, weights, compression, num_steps=2)
    assert set(made.backward_seconds) == set(SHAPES) and made.forward_seconds > 0.0
    assert same_everywhere(made.digest())
    made.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == made
    arguments = {"merging": "optimal", "tensor_selection": "cost", "wrap": hvd.DistributedGradientTape}
    arguments["profile"] = made
    descent, ledger = TapeTraining("topk:density=0.05", SHAPES, graph=graph, **arguments), Ledger(TAPES[0])
    for number in range(3):
        gradients = given(hvd.rank(), number, SHAPES)
        descent.step(gradients)
        ledger.enter(gradients)
    decision, plan = descent.compression.decision, descent.compression.plan
    assert plan == decision.plan and same_everywhere(plan)
    assert decision.predicted_seconds["taken"] > 0.0
    # it has taken effect: what is synchronized together is what the plan says
    parts = descent.synchronizer.parts
    assert [part.names for part in parts] == [*plan.buckets, *((name,) for name in plan.dense)]
    ledger.balance(descent)
    assert replicas_agree(TAPES[0], descent)
    without = dataclasses.replace(made, backward_seconds={})
    for profile in (None, without):
        with pytest.raises(ArgumentError, match=r"profile=.*hvd\.measured_profile"):
            TapeTraining("topk", SHAPES, graph=graph, **{**arguments, "profile": profile}).step(gradients)


def test_fit_takes_a_plan_by_measured_times(rank, size, everywhere):
    model, compression = make_model(), hvd.Compression.topk(density=1.0)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    images, labels = share(rank, size)
    made = hvd_keras.measured_profile(
        lambda: cross_entropy(labels, model(images)), model.trainable_variables, compression
    )
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvd_keras.DistributedOptimizer(sgd, compression=compression, merging="optimal", profile=made)
    fit(model, optimizer, rank, size)
    expected = flat(trained_densely(keras.optimizers.SGD(0.1, momentum=0.9), rank, size))
    np.testing.assert_allclose(flat(model), expected, rtol=1e-4, atol=1e-6)
    assert isinstance(optimizer.plan, Plan) and optimizer.plan == optimizer.decision.plan
    assert same_everywhere(optimizer.plan) and (everywhere(flat(model)) == flat(model)).all()
