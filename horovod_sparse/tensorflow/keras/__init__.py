"""Keras front end: `import horovod_sparse.tensorflow.keras as hvd` in place of `horovod.tensorflow.keras`.

Works with Keras 3, which `tf.keras` is since TensorFlow 2.16 (Horovod's own optimizer reduces nothing
there), and with tf-keras (``TF_USE_LEGACY_KERAS=1``). Every public name of `horovod.tensorflow.keras` is
here.
"""

# first: it says how to get Horovod where the next lines would only say that there is none
from horovod_sparse.tensorflow import _horovod as _horovod

# isort: split
from horovod.tensorflow.keras import *  # noqa: F403

# isort: split
# "from ... import callbacks" would find Horovod's, which the line above has brought
import horovod_sparse.tensorflow.keras.callbacks as callbacks  # noqa: F401
import horovod_sparse.tensorflow.keras.elastic as elastic  # noqa: F401
from horovod_sparse.tensorflow.compression import Compression as Compression
from horovod_sparse.tensorflow.compression import SparseCompressor as SparseCompressor
from horovod_sparse.tensorflow.keras.optimizer import DistributedOptimizer as DistributedOptimizer
from horovod_sparse.tensorflow.keras.optimizer import load_model as load_model
from horovod_sparse.tensorflow.measuring import measured_profile as measured_profile
from horovod_sparse.tensorflow.state import load as load
from horovod_sparse.tensorflow.state import save as save
