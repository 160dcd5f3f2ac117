"""The primitives on a GPU, in Triton, under the names that they have in `horovod_sparse.pytorch.plain`."""

from __future__ import annotations

from horovod_sparse.pytorch.triton.fold import fold, raise_maxima, refresh_maxima, scan_maxima
from horovod_sparse.pytorch.triton.scatter import add, add_sum, clear, put
from horovod_sparse.pytorch.triton.select import at_least, count_at_least, kth, largest, moments

__all__ = [
    "add",
    "add_sum",
    "at_least",
    "clear",
    "count_at_least",
    "fold",
    "kth",
    "largest",
    "moments",
    "put",
    "raise_maxima",
    "refresh_maxima",
    "scan_maxima",
]
