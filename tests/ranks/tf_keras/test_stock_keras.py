"""Stock Horovod's Keras optimizers (tf-keras) with a sparsifier as `compression=`."""

import horovod.tensorflow as stock
import horovod.tensorflow.keras as stock_keras
import numpy as np
import pytest

import horovod_sparse.tensorflow as hvd
from conformance.keras import sgd
from horovod_sparse.errors import ArgumentError
from support.keras_models import fit, flat, make_model, trained_densely

pytestmark = pytest.mark.tensorflow


def _fitted(compression, kind, eager=False, momentum=0.0, **arguments):
    model, plain = make_model(), sgd(kind, 0.125, momentum)
    optimizer = stock_keras.DistributedOptimizer(plain, compression=compression, **arguments)
    fit(model, optimizer, stock.rank(), stock.size(), epochs=1, run_eagerly=eager)
    return flat(model)


def _dense(**arguments):
    """By hand, since `fit` takes seconds to trace; but for several passes."""
    if "backward_passes_per_step" in arguments:
        return _fitted(stock.Compression.none, "legacy", **arguments)
    op = arguments.get("op", stock.Average)
    return flat(trained_densely(sgd("new", 0.125, 0.0), stock.rank(), stock.size(), epochs=1, op=op))


NIGHT = pytest.mark.nightly
PASSES = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}


@pytest.mark.parametrize(
    ("kind", "eager", "arguments"),
    [
        ("legacy", False, PASSES),
        ("legacy", False, {"groups": 2}),
        ("new", False, {"op": hvd.Sum}),
        pytest.param("new", True, {}, marks=NIGHT),
        pytest.param("legacy", True, {}, marks=NIGHT),
    ],
)
def test_density_1_is_dense(kind, eager, arguments):
    compression = hvd.Compression.exdyna(density=1.0)
    found = _fitted(compression, kind, eager, **arguments)
    np.testing.assert_allclose(found, _dense(**arguments), rtol=0, atol=1e-5)
    assert compression.telemetry.num_steps == 6 // arguments.get("backward_passes_per_step", 1)


@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_momentum_twice_is_refused(kind):
    compression = hvd.Compression.parse("dgc:density=0.2,feedback=momentum")
    with pytest.raises(ArgumentError, match=r"momentum=0\.9.*momentum=0 to the optimizer"):
        stock_keras.DistributedOptimizer(sgd(kind, 0.125, 0.9), compression=compression)
