"""Fast bodies of the array primitives on the host, compiled by numba.

Importing this package compiles nothing: every kernel is compiled at its first call and kept on disk.
"""

from horovod_sparse.kernels.host.scatter import apply_scaled_sum
