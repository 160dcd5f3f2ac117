"""Collectives are under way while backward goes on."""

import time

import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd

pytestmark = pytest.mark.tensorflow

#: seconds after which a bucket that waits for another one is given up
LIMIT = 60.0
#: float32 elements of a bucket that the host serves alone
LARGE = 1 << 18


def test_buckets_communicate_while_backward_goes_on(rank, size):
    """Backward of one bucket goes on until the other one is done, or to a limit, were that to wait."""
    early, late = tf.Variable(tf.ones([LARGE])), tf.Variable(tf.ones([LARGE]))
    synchronizer, waited = hvd.Compression.exdyna(density=0.5).bind(bucket_bytes=1), []

    def legs():
        by_name = {part.names[0]: part.task.legs for part in synchronizer.parts}
        return [by_name[name] for name in synchronizer.facts]

    def backward(array):
        begun = time.perf_counter()
        while len(legs()[0]) < 3 and time.perf_counter() - begun < LIMIT:
            time.sleep(0.01)
        waited.append(time.perf_counter() - begun)
        time.sleep(0.2)
        return array

    @tf.function
    def run(first, second):
        slow = tf.numpy_function(backward, [second], tf.float32, stateful=False)
        slow.set_shape([LARGE])
        return synchronizer.synchronize([first, slow], [early, late])

    for _ in range(2):
        if waited:
            legs()[0].clear()
        run(tf.fill([LARGE], 1.0 + rank), tf.ones([LARGE]))
        assert waited[-1] < LIMIT
    quick, slow = legs()
    # begin and end of: start, resume, resume. Both rounds are over before the other gradient is there.
    assert len(quick) == len(slow) == 3
    assert quick[-1][1] < slow[0][0]
