"""The fast bodies of the primitives on the host.

Importing this package compiles nothing: every kernel is compiled at its first call and kept on disk.
"""

from horovod_sparse.kernels.host.scatter import apply_scaled_sum as apply_scaled_sum
from horovod_sparse.kernels.host.scatter import apply_sum as apply_sum
from horovod_sparse.kernels.host.scatter import clear_all as clear_all
from horovod_sparse.kernels.host.scatter import clear_at as clear_at
