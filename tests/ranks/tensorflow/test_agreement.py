"""Ranks that were given different things: an error by name on all of them, by tapes and by Keras."""

import time
from typing import Any

import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from conformance.engine import given
from conformance.engines_tensorflow import TAPES
from support.keras_models import keras

pytestmark = pytest.mark.tensorflow

TEXT = "topk:density=0.1"
SECONDS = 10.0
OWN = next(one for one in TAPES if one.name == "graph")


def refused(step: Any, words: str) -> None:
    begun = time.monotonic()
    with pytest.raises(Exception, match=words):
        step()
    assert time.monotonic() - begun < SECONDS


def test_another_way_of_one_tape(rank, size):
    training = OWN.train(TEXT if rank < size - 1 else "none", tensor_selection=None)
    refused(lambda: training.step(given(rank, 0)), "compression differs")


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        ({"compression": TEXT}, {"compression": "none"}, r"compression differs: .* none"),
        (
            {"compression": TEXT},
            {"compression": TEXT, "backward_passes_per_step": 2},
            "backward_passes_per_step differs",
        ),
    ],
)
def test_keras(rank, size, first, last, words):
    arguments = last if rank == size - 1 else first
    if isinstance(arguments["compression"], str):
        arguments = {**arguments, "compression": hvd.Compression.parse(arguments["compression"])}
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), **arguments)
    variable = keras.Variable([1.0] * 30)
    optimizer.build([variable])

    def step() -> None:
        for _ in range(arguments.get("backward_passes_per_step", 1)):
            optimizer.apply([tf.ones(30)])

    refused(step, words)


def test_keras_optimizers_that_are_set_differently(rank, size):
    sgd = keras.optimizers.SGD(0.1, momentum=0.9 if rank == size - 1 else 0.5)
    optimizer, variable = hvd_keras.DistributedOptimizer(sgd, compression=TEXT), keras.Variable([1.0] * 30)
    refused(lambda: optimizer.apply([tf.ones(30)], [variable]), r"momentum differs: ranks \[.*\] have 0.5")
