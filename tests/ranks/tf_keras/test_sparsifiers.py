"""tf-keras: every sparsifier in an optimizer, eagerly and in a graph, against the simulated cluster."""

from __future__ import annotations

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd
from support.keras_models import fit, flat, keras, make_model
from support.keras_sparsifiers import NUM_ELEMENTS, check_every_sparsifier


def descend(optimizer, gradient, variable):
    # tf-keras reduces where it computes gradients
    optimizer.minimize(lambda: tf.reduce_sum(variable * gradient), [variable])


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_every_sparsifier_in_an_optimizer(rank, size, graph):
    check_every_sparsifier(
        rank, size, graph, lambda: tf.Variable(np.zeros(NUM_ELEMENTS, np.float32)), descend
    )


def test_an_optimizer_of_two_levels(monkeypatch, size):
    """All ranks count as one host: summed densely within it, selected from by each rank's shard."""
    monkeypatch.setenv("HOROVOD_SPARSE_RANKS_PER_HOST", str(size))
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression="topk:density=0.5", levels="host"
    )
    model = make_model(seed=0)
    fit(model, optimizer, stock.rank() % 3, size, epochs=1)
    assert optimizer.telemetry.last.bytes_inside > 0
    own = flat(model)
    np.testing.assert_array_equal(stock.broadcast(tf.constant(own), 0, name="of_levels").numpy(), own)
