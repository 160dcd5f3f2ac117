"""The fast bodies of the primitives on the host.

Importing this package compiles nothing: every kernel is compiled at its first call and kept on disk.
"""

from horovod_sparse.kernels.host.scatter import apply_scaled_sum
