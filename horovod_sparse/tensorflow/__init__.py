"""TensorFlow front end: `import horovod_sparse.tensorflow as hvd` in place of `import horovod.tensorflow as hvd`."""

# first: it says how to get Horovod where the next line would only say that there is none
from horovod_sparse.tensorflow import _horovod as _horovod

# isort: split
from horovod.tensorflow import *  # noqa: F403
