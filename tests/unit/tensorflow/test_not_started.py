"""Both bindings of Horovod imported and one of them started: ranks would train alone with the other."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.tensorflow
pytest.importorskip("horovod_sparse.tensorflow")

SCRIPT = """
import horovod.torch as other
import tensorflow as tf
import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from horovod_sparse.errors import UnsupportedError

other.init()
weight, made = tf.Variable([1.0, 2.0]), hvd.Compression.topk(density=1.0)

def by_tape():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight)
    hvd.DistributedGradientTape(tape, compression=made).gradient(loss, [weight])

def by_keras(compression):
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), compression=compression)
    optimizer.apply_gradients([(tf.ones([2]), weight)])

for step in (by_tape, lambda: by_keras("topk:density=1.0"), lambda: by_keras(hvd.Compression.none)):
    try:
        step()
    except UnsupportedError as error:
        assert "started for TensorFlow" in str(error) and "horovod.torch" in str(error), error
    else:
        raise AssertionError("it trained alone")
assert weight.numpy().tolist() == [1.0, 2.0]
"""


def test_another_bindings_start_is_not_ours():
    pytest.importorskip("horovod.torch")
    command = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
