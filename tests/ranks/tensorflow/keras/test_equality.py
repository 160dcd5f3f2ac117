"""Keras 3: what a distributed optimizer makes of a model, compared with dense training."""

from __future__ import annotations

import horovod.tensorflow as stock
import numpy as np
import pytest

import horovod_sparse.tensorflow.keras as hvd
from support.keras_models import fit, flat, keras, make_model, trained_densely

EVERYTHING, NIGHT = "topk:density=1.0", pytest.mark.nightly
BOTH = [EVERYTHING, pytest.param("none", marks=NIGHT)]
# a sum of another order differs by rounding
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


@pytest.fixture(scope="module")
def dense():
    """After two epochs with SGD and momentum."""
    return flat(trained_densely(sgd(), stock.rank(), stock.size()))


def check_replicas(model, everywhere):
    weights = everywhere(flat(model))
    assert np.isfinite(weights).all()
    assert (weights == weights[0]).all()


@pytest.mark.parametrize(
    ("compression", "run_eagerly"),
    [
        (EVERYTHING, False),
        pytest.param("none", False, marks=NIGHT),
        pytest.param(EVERYTHING, True, marks=NIGHT),
        pytest.param("none", True, marks=NIGHT),
    ],
)
def test_everything_sent_is_dense_training(dense, compression, run_eagerly, rank, size, everywhere):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(), compression=compression)
    fit(model, optimizer, rank, size, run_eagerly=run_eagerly)
    np.testing.assert_allclose(flat(model), dense, **CLOSE)
    check_replicas(model, everywhere)
    assert int(optimizer.iterations.numpy()) == 12
    assert optimizer.telemetry.num_steps == (12 if compression == EVERYTHING else 0)


@pytest.mark.parametrize("compression", BOTH)
def test_groups(dense, compression, rank, size):
    model = make_model()
    groups = [model.layers[0].trainable_weights, [model.layers[1].trainable_weights[0]]]
    if compression == EVERYTHING:
        groups.append([model.layers[1].trainable_weights[1]])
    optimizer = hvd.DistributedOptimizer(sgd(), compression=compression, groups=groups)
    fit(model, optimizer, rank, size)
    np.testing.assert_allclose(flat(model), dense, **CLOSE)
    if compression == EVERYTHING:
        assert len(optimizer.state_dict()["plan"]["buckets"]) == 3


@pytest.mark.parametrize("compression", [pytest.param(EVERYTHING, marks=NIGHT), "none"])
def test_process_set(compression, rank, size, process_set):
    ranks = process_set([0, size - 1] if size > 2 else [0])
    model = make_model()
    fit(model, hvd.DistributedOptimizer(sgd(), compression=compression, process_set=ranks), rank, size)
    expected = trained_densely(sgd(), rank, size, ranks=ranks)
    np.testing.assert_allclose(flat(model), flat(expected), **CLOSE)


@pytest.mark.parametrize("compression", BOTH)
@pytest.mark.parametrize("average", [pytest.param(False, marks=NIGHT), True])
def test_several_passes_per_step(compression, average, rank, size, everywhere):
    """Two passes add up; Keras' own accumulation, which averages, says what comes out of it."""
    rate = 0.1 if average else 0.05
    model, expected = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(rate),
        compression=compression,
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    fit(model, optimizer, rank, size, epochs=1)
    plain = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    fit(expected, hvd.DistributedOptimizer(plain, compression=EVERYTHING), rank, size, epochs=1)
    np.testing.assert_allclose(flat(model), flat(expected), **CLOSE)
    check_replicas(model, everywhere)
    if compression == EVERYTHING:
        assert optimizer.telemetry.num_steps == 3


@pytest.mark.parametrize("compression", BOTH)
def test_local_layers(compression, rank, size, everywhere):
    model = make_model()
    optimizer = hvd.PartialDistributedOptimizer(
        sgd(), compression=hvd.Compression.parse(compression), local_layers=model.layers[0]
    )
    fit(model, optimizer, rank, size)
    expected = trained_densely(sgd(), rank, size, kept=(0, 1))
    np.testing.assert_allclose(flat(model), flat(expected), **CLOSE)
    weights = everywhere(flat(model))
    assert not (weights == weights[0]).all()
