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


def _two_buckets():
    """A synchronizer, and a step in which backward of one bucket goes on until the other one is done.

    Were the other one to wait for it, the step would take until a limit; the time it took comes back.
    """
    early, late = tf.Variable(tf.ones([LARGE])), tf.Variable(tf.ones([LARGE]))
    synchronizer = hvd.Compression.exdyna(density=0.5).bind(bucket_bytes=1)
    waited = []

    def quick():
        return next(part for part in synchronizer.parts if part.names[0] == next(iter(synchronizer.facts)))

    def backward(array):
        begun = time.perf_counter()
        while len(quick().task.legs) < 3 and time.perf_counter() - begun < LIMIT:
            time.sleep(0.01)
        waited.append(time.perf_counter() - begun)
        time.sleep(0.2)
        return array

    @tf.function
    def run(first, second):
        slow = tf.numpy_function(backward, [second], tf.float32, stateful=False)
        slow.set_shape([LARGE])
        return synchronizer.synchronize([first, slow], [early, late])

    def step(value):
        if synchronizer.parts:
            quick().task.legs.clear()
        run(tf.fill([LARGE], value), tf.ones([LARGE]))
        return waited[-1]

    return synchronizer, step


def test_buckets_communicate_while_backward_goes_on(rank, size):
    synchronizer, step = _two_buckets()
    for _ in range(2):
        assert step(1.0 + rank) < LIMIT
    by_name = {part.names[0]: part.task.legs for part in synchronizer.parts}
    quick, slow = (by_name[name] for name in synchronizer.facts)
    # begin and end of: start, resume, resume. Both rounds are over before the other gradient is there.
    assert len(quick) == len(slow) == 3
    assert quick[-1][1] < slow[0][0]
