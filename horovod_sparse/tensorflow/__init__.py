"""TensorFlow front end: `import horovod_sparse.tensorflow as hvd` in place of `horovod.tensorflow`.

Every public name of `horovod.tensorflow` is here; `Compression` has the sparsifiers beside Horovod's own.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# first: it says how to get Horovod where others would only say that there is none
from horovod_sparse.tensorflow._horovod import *  # noqa: F403

# isort: split
import horovod_sparse.tensorflow.elastic  # noqa: F401
from horovod_sparse.tensorflow.compression import Compression as Compression
from horovod_sparse.tensorflow.compression import SparseCompressor as SparseCompressor
from horovod_sparse.tensorflow.functions import broadcast_variables as broadcast_variables
from horovod_sparse.tensorflow.measuring import measured_profile as measured_profile
from horovod_sparse.tensorflow.state import load as load
from horovod_sparse.tensorflow.state import save as save
from horovod_sparse.tensorflow.wrappers import DistributedGradientTape as DistributedGradientTape
from horovod_sparse.tensorflow.wrappers import DistributedOptimizer as DistributedOptimizer

if _TYPE_CHECKING:
    # horovod.tensorflow has no types: what the star brings is unknown to type checkers
    def __getattr__(name: str) -> _Any: ...
