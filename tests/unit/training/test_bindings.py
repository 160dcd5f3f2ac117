"""Both bindings of Horovod imported, and one started: our modules are ours, and nobody trains for itself."""

import sys

import pytest

from support.jobs import ran

pytestmark = pytest.mark.tensorflow

PROGRAM = """
import torch, horovod_sparse.torch as hvd_torch
import horovod.tensorflow.keras  # before ours: `keras` was Horovod's then, callbacks and all
import tensorflow as tf, horovod_sparse.tensorflow as hvd, horovod_sparse.tensorflow.keras as hvd_keras
import horovod_sparse.tensorflow.mpi_ops
from horovod_sparse.errors import UnsupportedError

for module in hvd.keras, hvd.elastic, hvd.functions, hvd.compression, hvd_keras.callbacks, hvd_keras.elastic:
    assert module.__name__.startswith("horovod_sparse."), module
assert hvd.mpi_ops is horovod_sparse.tensorflow.mpi_ops is horovod.tensorflow.mpi_ops

{started}.init()
weight = tf.Variable([1.0, 2.0])

def by_torch(compression):
    model = torch.nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    made = hvd_torch.Compression.parse(compression)
    optimizer = hvd_torch.DistributedOptimizer(sgd, model.named_parameters(), made)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()

def by_tape(compression):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight)
    made = hvd.Compression.parse(compression)
    hvd.DistributedGradientTape(tape, compression=made).gradient(loss, [weight])

def by_keras(compression):
    made = hvd.Compression.parse(compression)
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.0), compression=made)
    optimizer.apply_gradients([(tf.ones([2]), weight)])

WORDS = {{by_tape: "started for TensorFlow", by_keras: "started for TensorFlow"}}
if {started} is hvd_torch:
    WORDS[by_torch] = "two bindings of Horovod are imported"
for step, words in WORDS.items():
    for compression in ("topk:density=0.5", "none"):
        try:
            step(compression)
        except UnsupportedError as error:
            assert words in str(error), error
            print(step.__name__, "refused")
        else:
            print(step.__name__, "trained")
assert weight.numpy().tolist() == [1.0, 2.0]
"""


@pytest.mark.parametrize("started", ["hvd_torch", pytest.param("hvd", marks=pytest.mark.nightly)])
def test_no_rank_trains_alone_by_the_binding_that_was_not_started(started: str) -> None:
    ended = ran(sys.executable, "-c", PROGRAM.format(started=started))
    end, steps = ("refused", 6) if started == "hvd_torch" else ("trained", 4)
    assert ended.stdout.split()[1::2] == [end] * steps
