"""tf-keras: every sparsifier in an optimizer, eagerly and in a graph, against the simulated cluster."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from support.keras_sparsifiers import NUM_ELEMENTS, check_every_sparsifier


def descend(optimizer, gradient, variable):
    # tf-keras reduces where it computes gradients
    optimizer.minimize(lambda: tf.reduce_sum(variable * gradient), [variable])


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_every_sparsifier_in_an_optimizer(rank, size, graph):
    check_every_sparsifier(
        rank, size, graph, lambda: tf.Variable(np.zeros(NUM_ELEMENTS, np.float32)), descend
    )
