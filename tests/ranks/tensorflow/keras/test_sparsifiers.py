"""Keras 3: every sparsifier in an optimizer, eagerly and in a graph, against the simulated cluster."""

from __future__ import annotations

import numpy as np
import pytest

from support.keras_models import keras
from support.keras_sparsifiers import NUM_ELEMENTS, check_every_sparsifier


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_every_sparsifier_in_an_optimizer(rank, size, graph):
    check_every_sparsifier(
        rank,
        size,
        graph,
        lambda: keras.Variable(np.zeros(NUM_ELEMENTS, np.float32)),
        lambda optimizer, gradient, variable: optimizer.apply([gradient], [variable]),
    )
