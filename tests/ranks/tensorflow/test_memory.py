"""What is no longer used is freed: optimizers, compressors, and the residuals that they keep."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from conformance.engines_tensorflow import KERAS, TAPES
from horovod_sparse.feedback import Bucket
from support.keras_models import fit, keras, make_model

pytestmark = pytest.mark.tensorflow


def test_nothing_is_left_of_it(rank, size):
    """Of any way, eager or in a graph. The garbage is collected once, which takes seconds."""
    used, buckets, created = {}, [], Bucket.__init__

    def noted(bucket, *arguments, **more):
        buckets.append(weakref.ref(bucket))
        created(bucket, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "__init__", noted)
        for engine in [*TAPES, *KERAS]:
            training = engine.train("topk:density=0.5", {"weight": (100,)})
            for _ in range(2):
                training.step({"weight": np.ones(100)})
            used[engine.name] = weakref.ref(training.compression)
        optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="topk:density=0.5")
        fit(make_model(), optimizer, rank, size, epochs=1, run_eagerly=True)
        used["fit"] = weakref.ref(optimizer)
    del training, optimizer
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
    with pytest.raises(tf.errors.OpError, match="outlives"):
        step()
