"""The Triton kernels under the names that `plain` has."""

from __future__ import annotations

from horovod_sparse.device.triton.fold import fold
from horovod_sparse.device.triton.kth import kth
from horovod_sparse.device.triton.maxima import raise_maxima, refresh_maxima, scan_maxima
from horovod_sparse.device.triton.scatter import add, add_sum, clear, put
from horovod_sparse.device.triton.select import at_least, largest
from horovod_sparse.device.triton.statistics import count_at_least, moments

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
