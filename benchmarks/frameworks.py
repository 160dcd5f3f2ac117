"""`scripts/bench frameworks`: a step of TensorFlow beside the same step of PyTorch.

Both front ends synchronize the same gradient as they do in a training, alone (size 1), so that nothing
waits for a network. The baseline is PyTorch's step of the same sparsifier, in the same round.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from benchmarks.common import timing
from benchmarks.common.tables import timings_table
from benchmarks.common.timing import Work

#: largest ratio of TensorFlow's step to PyTorch's that is allowed
_BUDGET = 1.5


def _pytorch_step(text: str, gradient: np.ndarray) -> Work:
    """Returns the work of PyTorch's step: backward's last hook and `synchronize()`; the gradient is given."""
    import torch

    import horovod_sparse.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(gradient.size))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.1),
        named_parameters=[("parameter", parameter)],
        compression=hvd.Compression.parse(text),
    )
    source = torch.from_numpy(gradient)

    def prepare() -> None:
        parameter.grad = source.clone()

    def run() -> None:
        optimizer._synchronizer.on_gradient(parameter)
        optimizer.synchronize()

    return Work(f"{text.partition(':')[0]}, PyTorch", run, prepare)


def _tensorflow_step(text: str, gradient: np.ndarray) -> Work:
    """Returns the work of TensorFlow's step: one call of the function that tapes and optimizers call."""
    import tensorflow as tf

    import horovod_sparse.tensorflow as hvd

    hvd.init()
    variable = tf.Variable(tf.zeros([gradient.size]), name="parameter")
    synchronizer, source = hvd.Compression.parse(text).bind(), tf.constant(gradient)

    def run() -> None:
        synchronizer.synchronize([source], [variable])[0][:1].numpy()

    return Work(f"{text.partition(':')[0]}, TensorFlow", run, budget=_BUDGET)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything that the command line asks for; returns what is written to JSON."""
    # As stock: one rank alone synchronizes nothing, unless others may join it.
    os.environ.setdefault("HOROVOD_ELASTIC", "1")

    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    gradient = np.random.default_rng(0).standard_normal(options.elements).astype(np.float32)
    timings: list[timing.Timing] = []
    for name in options.sparsifiers.split(","):
        text = f"{name}:density={options.density}"
        work = _pytorch_step(text, gradient), [_tensorflow_step(text, gradient)]
        timings += timing.measure(*work, options.repeat)
    return timing.timed(timings, options, baseline="PyTorch")


tables = timings_table


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = timing.rank_parser("frameworks", __doc__, 0.001)
    made.add_argument("--sparsifiers", default="topk,exdyna", help="names (default %(default)s)")
    return made
