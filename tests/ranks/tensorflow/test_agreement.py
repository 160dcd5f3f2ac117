"""Ranks that were given different things: an error by name on all of them, by tapes and by Keras."""

from __future__ import annotations

import time
from typing import Any

import horovod.tensorflow as stock
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from horovod_sparse.frontend import agreement
from support.keras_models import keras

pytestmark = [pytest.mark.tensorflow, pytest.mark.once]

TEXT = "topk:density=0.1"
TEXTS = [
    "topk:density=0.2",
    "topk:density=0.1,values=float16",
    "topk:density=0.1,indices=gaps",
    "topk:density=0.1,schedule=exponential(steps=10)",
    "topk:density=0.1,feedback=none",
    "topk:density=0.1,dense_below=100",
    "randomk:density=0.1,seed=1",
    "exdyna:density=0.1",
    "gtopk:density=0.1",
]
#: of a tape, what the last rank is given, and the words of every rank's error
ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "op": ({"op": hvd.Sum}, r"op differs: ranks \[.*\] have Average, ranks \[\d\] Sum"),
    "predivide": ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor differs"),
    "sparse_as_dense": ({"sparse_as_dense": True}, "sparse_as_dense differs"),
    "local": ({"scale_local_gradients": False}, "scale_local_gradients differs"),
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


@pytest.mark.parametrize("wrap", [hvd.DistributedGradientTape, stock.DistributedGradientTape])
@pytest.mark.parametrize("text", TEXTS)
def test_another_compression(rank, size, wrap, text):
    step = descend(wrap, text if rank == size - 1 else TEXT)
    refused(step, rf"compression differs: ranks \[.*\] have topk:density=0.1, ranks \[{size - 1}\] ")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_another_argument(rank, size, name):
    arguments, words = ARGUMENTS[name]
    refused(descend(hvd.DistributedGradientTape, TEXT, **(arguments if rank == size - 1 else {})), words)


@pytest.mark.parametrize("arguments", [{"op": stock.Sum}, {"gradient_predivide_factor": 2.0}], ids=str)
def test_another_argument_to_horovods_own_tape(rank, size, arguments):
    step = descend(stock.DistributedGradientTape, TEXT, **(arguments if rank == size - 1 else {}))
    refused(step, r"(op|prescale_factor) differs: ranks ")


@pytest.mark.parametrize("wrap", [hvd.DistributedGradientTape, stock.DistributedGradientTape])
@pytest.mark.parametrize("change", ["shape", "elements", "dtype"])
def test_another_model(rank, size, wrap, change):
    other: dict[str, Any] = {
        "shape": {"shape": (3, 40)},
        "elements": {"shape": (41, 3)},
        "dtype": {"dtype": tf.bfloat16},
    }[change]
    refused(descend(wrap, TEXT, **(other if rank == size - 1 else {})), "do not train the same model")


@pytest.mark.parametrize("other", ["none", "fp16", "drop-in"])
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
        ({"compression": "none"}, {"compression": "fp16"}, r"compression differs: .* none, .* fp16"),
        (
            {"compression": TEXT},
            {"compression": TEXT, "backward_passes_per_step": 2},
            "backward_passes_per_step differs",
        ),
        ({"compression": TEXT}, {"compression": TEXT, "op": hvd.Sum}, "op differs"),
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


def test_other_code(rank, size, monkeypatch):
    if rank == size - 1:
        monkeypatch.setattr(agreement, "_code_version", lambda: "0.0.9 (0123)")
    refused(descend(hvd.DistributedGradientTape, TEXT), rf"version differs: .*, ranks \[{size - 1}\] 0.0.9")
