"""Every sparsifier as the compression of a Keras optimizer: for Keras 3 and for tf-keras alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.simulation import SimulatedCluster
from support.cases import CASES, case_id

__all__ = ["NUM_ELEMENTS", "check_every_sparsifier"]

NUM_ELEMENTS, STEPS = 300, 4


def check_every_sparsifier(
    rank: int,
    size: int,
    graph: bool,
    new_variable: Callable[[], Any],
    apply: Callable[[Any, tf.Tensor, Any], Any],
) -> None:
    """Weights become what the simulated cluster's sums make of them, bit for bit.

    All optimizers are in one function: tracing is most of what a case costs.

    Args:
        rank: of this process.
        size: number of processes.
        graph: whether the function is a graph.
        new_variable: makes zeros, float32 [NUM_ELEMENTS].
        apply: a step of an optimizer, with the gradient of a variable.
    """
    generator = np.random.default_rng(7)
    # with few large ones, as SIDCo's distributions have them
    drawn = np.prod(generator.integers(-32, 33, (2, size, NUM_ELEMENTS)), axis=0)
    everyone = list((drawn / 256).astype(np.float32))
    variables = [new_variable() for _ in CASES]
    compressions = [hvd.SparseCompressor(case.recipe) for case in CASES]
    optimizers = [
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), compression=made, op=hvd.Sum)
        for made in compressions
    ]
    for optimizer, variable in zip(optimizers, variables, strict=True):
        optimizer.build([variable])

    def step(gradient: tf.Tensor) -> None:
        for optimizer, variable in zip(optimizers, variables, strict=True):
            apply(optimizer, gradient, variable)

    run, clusters = (tf.function(step) if graph else step), []
    expected = [np.zeros(NUM_ELEMENTS, np.float32) for _ in CASES]
    for _ in range(STEPS):
        run(tf.constant(everyone[rank]))
        if not clusters:
            names = [made.synchronizer.sparse[0].bucket.info.name for made in compressions]
            clusters = [
                SimulatedCluster(case.recipe, NUM_ELEMENTS, size, name=name)
                for case, name in zip(CASES, names, strict=True)
            ]
        for weights, cluster in zip(expected, clusters, strict=True):
            weights -= cluster.step([array.copy() for array in everyone], 1.0)
        wrong = [
            case_id(case)
            for case, weights, variable in zip(CASES, expected, variables, strict=True)
            if not np.array_equal(np.asarray(variable), weights)
        ]
        assert not wrong, wrong
    assert all(optimizer.telemetry.num_steps == STEPS for optimizer in optimizers)
    assert all(weights.any() for weights in expected)
