"""Ranks that were given different things: an error by name on all of them, by tapes and by Keras."""

from __future__ import annotations

import time
from typing import Any

import horovod.tensorflow as stock
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from support.keras_models import keras

pytestmark = pytest.mark.tensorflow

TEXT = "topk:density=0.1"
#: of a tape, what the last rank is given, and the words of every rank's error
ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "op": ({"op": hvd.Sum}, r"op differs: ranks \[.*\] have Average, ranks \[\d\] Sum"),
    "predivide": ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor differs"),
    "merging": ({"merging": "single"}, "asks for None"),
}
SECONDS = 10.0


def refused(step: Any, words: str) -> None:
    """One step ends soon in an error with these words."""
    begun = time.monotonic()
    with pytest.raises(Exception, match=words):
        step()
    assert time.monotonic() - begun < SECONDS


def descend(
    wrap: Any, compression: Any, shape: Any = (40, 3), dtype: Any = tf.float32, **arguments: Any
) -> Any:
    """A step by a tape: its gradients."""
    variables = [tf.Variable(tf.ones(shape, dtype), name="weight"), tf.Variable(tf.ones(7), name="bias")]
    compression = hvd.Compression.parse(compression) if isinstance(compression, str) else compression

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.cast(tf.reduce_sum(variable), tf.float32) for variable in variables])
        return wrap(tape, compression=compression, **arguments).gradient(loss, variables)

    return step


@pytest.mark.parametrize("name", ARGUMENTS)
def test_another_argument(rank, size, name):
    arguments, words = ARGUMENTS[name]
    refused(descend(hvd.DistributedGradientTape, TEXT, **(arguments if rank == size - 1 else {})), words)


def test_another_argument_to_horovods_own_tape(rank, size):
    arguments = {"gradient_predivide_factor": 2.0} if rank == size - 1 else {}
    refused(descend(stock.DistributedGradientTape, TEXT, **arguments), r"prescale_factor differs: ranks ")


@pytest.mark.parametrize("other", ["none", "drop-in"])
def test_another_way_of_one_tape(rank, size, other):
    wrap, compression = hvd.DistributedGradientTape, TEXT
    if rank == size - 1 and other == "drop-in":
        wrap = stock.DistributedGradientTape
    elif rank == size - 1:
        compression = other
    refused(descend(wrap, compression), "(compression|engine) differs")


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
    """What no variable tells of, so that replicas part in the third step."""
    sgd = keras.optimizers.SGD(0.1, momentum=0.9 if rank == size - 1 else 0.5)
    optimizer, variable = hvd_keras.DistributedOptimizer(sgd, compression=TEXT), keras.Variable([1.0] * 30)
    refused(lambda: optimizer.apply([tf.ones(30)], [variable]), r"momentum differs: ranks \[.*\] have 0.5")
