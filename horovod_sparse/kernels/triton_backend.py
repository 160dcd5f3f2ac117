"""The Triton kernels under the names that `torch_plain` has."""

from __future__ import annotations

from horovod_sparse.kernels.triton_fold import fold
from horovod_sparse.kernels.triton_kth import kth
from horovod_sparse.kernels.triton_maxima import raise_maxima, refresh_maxima, scan_maxima
from horovod_sparse.kernels.triton_scatter import add, add_sum, clear, put
from horovod_sparse.kernels.triton_select import at_least, largest
from horovod_sparse.kernels.triton_statistics import count_at_least, moments

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
