"""TensorFlow front end: `import horovod_sparse.tensorflow as hvd` in place of `horovod.tensorflow`.

Every public name of `horovod.tensorflow` is here; `Compression` has the sparsifiers beside Horovod's own.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# first: it says how to get Horovod where the next line would only say that there is none
from horovod_sparse.tensorflow import _horovod as _horovod

# isort: split
from horovod.tensorflow import *  # noqa: F403

# isort: split
from horovod_sparse.tensorflow.compression import Compression as Compression
from horovod_sparse.tensorflow.compression import SparseCompressor as SparseCompressor
from horovod_sparse.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizer
from horovod_sparse.tensorflow.tape import DistributedGradientTape as DistributedGradientTape
from horovod_sparse.tensorflow.tape import PartialDistributedGradientTape as PartialDistributedGradientTape

if _TYPE_CHECKING:
    # horovod.tensorflow has no types: what the star brings is unknown to type checkers
    def __getattr__(name: str) -> _Any: ...
