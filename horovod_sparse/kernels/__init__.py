"""The fast bodies of the primitives, and a plain reference for each.

Importing this package compiles nothing: every kernel is compiled at its first call and kept on disk.
"""

from __future__ import annotations

from horovod_sparse.kernels.host import at_least, kth_magnitude, largest
from horovod_sparse.kernels.host_apply import apply_sum, clear_all, clear_at
from horovod_sparse.kernels.host_folds import Folded, fold, fold_factors
from horovod_sparse.kernels.layout import Layout, block_size
from horovod_sparse.kernels.warm import warm_up

__all__ = [
    "Folded",
    "Layout",
    "apply_sum",
    "at_least",
    "block_size",
    "clear_all",
    "clear_at",
    "fold",
    "fold_factors",
    "kth_magnitude",
    "largest",
    "warm_up",
]
