"""The few tensor primitives a sparsifier needs, and the memories that have them."""

from __future__ import annotations

from horovod_sparse.arrays.gradient_parts import GradientParts
from horovod_sparse.arrays.host import HostAccumulator
from horovod_sparse.arrays.moments import Moments
from horovod_sparse.arrays.protocol import Accumulator, FoldReport, Indices, Values
from horovod_sparse.arrays.scaled_sum import apply_scaled_sum
from horovod_sparse.kernels import apply_sum, clear_all, clear_at

__all__ = [
    "Accumulator",
    "FoldReport",
    "GradientParts",
    "HostAccumulator",
    "Indices",
    "Moments",
    "Values",
    "apply_scaled_sum",
    "apply_sum",
    "clear_all",
    "clear_at",
]
