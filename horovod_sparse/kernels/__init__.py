"""The fast bodies of the primitives, and a plain reference for each.

Importing this package compiles nothing: every kernel is compiled at its first call and kept on disk.
"""

from __future__ import annotations

from horovod_sparse.kernels.host import at_least, kth_magnitude, largest
from horovod_sparse.kernels.host_apply import apply_sum, clear_at
from horovod_sparse.kernels.layout import Layout, block_size

__all__ = [
    "Layout",
    "apply_sum",
    "at_least",
    "block_size",
    "clear_at",
    "kth_magnitude",
    "largest",
]
