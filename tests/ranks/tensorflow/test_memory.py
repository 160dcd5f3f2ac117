"""What is no longer used is freed: optimizers, compressors, and the residuals that they keep."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from conformance.engine import run
from conformance.engines_tensorflow import KERAS, TAPES
from horovod_sparse.feedback import Bucket

pytestmark = pytest.mark.tensorflow


def _by_optimizer(fit):
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression="topk:density=0.5")
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(4)])
    model.compile(optimizer, "mse", jit_compile=False, run_eagerly=not fit)
    model.fit(np.ones((4, 3), np.float32), np.ones((4, 4), np.float32), verbose=0)
    return optimizer


def test_optimizers_and_compressors_are_freed(rank, size):
    """Of every engine, and of `fit`. The garbage is collected once, which takes seconds."""
    used, buckets, created = {}, [], Bucket.__init__

    def noted(bucket, *arguments, **more):
        buckets.append(weakref.ref(bucket))
        created(bucket, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "__init__", noted)
        for engine in (*TAPES, *KERAS):
            training = engine.train("topk:density=0.5")
            run(training, engine, range(2))
            used[engine.name] = weakref.ref(getattr(training, "optimizer", training.compression))
            del training
        for fit in (False, True):
            used["fit", fit] = weakref.ref(_by_optimizer(fit))
    tf.keras.backend.clear_session()
    gc.collect()
    assert [way for way, one in used.items() if one() is not None] == []
    assert len(buckets) >= len(used) and not any(bucket() for bucket in buckets)


def test_a_graph_that_outlives_its_compressor_says_so(rank, size):
    weight = tf.Variable(tf.ones([100]))

    def made():
        synchronizer = hvd.Compression.topk(density=1.0).bind(average=False)
        return tf.function(lambda: synchronizer.synchronize([tf.ones([100])], [weight])[0])

    function = made()
    assert function().numpy().tolist() == [float(size)] * 100, "the function keeps it"
    step = function.get_concrete_function()
    del function
    gc.collect()
    with pytest.raises(tf.errors.OpError, match="was deleted"):
        step()
