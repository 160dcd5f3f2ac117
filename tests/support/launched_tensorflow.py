"""What all tests of TensorFlow and of tf-keras on ranks have; see `launched`."""

import os
from collections.abc import Callable, Iterator

from support.launched import fixtures, measure_little, pytest_itemcollected, runtest_hook

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# isort: split
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd

__all__ = ["pytest_itemcollected"]


def pytest_sessionstart(session: pytest.Session) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    measure_little()


pytest_runtest_call = runtest_hook(
    hvd, lambda name: hvd.allreduce(tf.constant(0.0), name=f"end.{name}"), (tf.errors.OpError, ValueError)
)
rank, size, process_set, folder = fixtures(hvd, lambda made: hvd.broadcast_object(made, 0, name="folder"))


@pytest.fixture
def everywhere() -> Callable[[np.ndarray], np.ndarray]:
    """An array of every rank, stacked."""

    def gather(array: np.ndarray) -> np.ndarray:
        return hvd.allgather(tf.constant(array[None]), name="everywhere").numpy()

    return gather


@pytest.fixture
def mixed() -> Iterator[None]:
    module = tf.keras.mixed_precision
    choose = getattr(module, "set_dtype_policy", None) or module.set_global_policy
    choose("mixed_float16")
    yield
    choose("float32")
