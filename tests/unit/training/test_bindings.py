"""Both bindings of Horovod imported, and one of them started: they share the set of all ranks."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.tensorflow

_TORCH = """
def train(compression):
    model = torch.nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    hvd = horovod_sparse.torch
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), hvd.Compression.parse(compression))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
"""
_TENSORFLOW = """
def train(compression, wrap=None):
    weights = tf.Variable(tf.ones(3))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights)
    hvd = horovod_sparse.tensorflow
    tape = (wrap or hvd.DistributedGradientTape)(tape, compression=hvd.Compression.parse(compression))
    tape.gradient(loss, [weights])
"""
_PROGRAM = """
import torch, horovod_sparse.torch
import tensorflow as tf, horovod_sparse.tensorflow
from horovod_sparse.errors import UnsupportedError
{train}
horovod_sparse.{starts}.init()
for compression in ("topk:density=0.5", "none"):
    try:
        train(compression)
    except UnsupportedError as error:
        assert "{words}" in str(error), error
        print("refused")
    else:
        print("trained")
"""


@pytest.mark.parametrize(
    ("framework", "starts", "end"),
    [
        ("torch", "torch", "refused"),
        pytest.param("tensorflow", "torch", "refused", marks=pytest.mark.nightly),
        pytest.param("tensorflow", "tensorflow", "trained", marks=pytest.mark.nightly),
    ],
)
def test_nobody_trains_for_itself_without_a_word(framework: str, starts: str, end: str) -> None:
    train = _TORCH if framework == "torch" else _TENSORFLOW
    words = "two bindings of Horovod are imported" if framework == starts else "has not been started"
    program = _PROGRAM.format(train=train, starts=starts, words=words)
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout.split() == [end, end], ended.stderr[-3000:]
