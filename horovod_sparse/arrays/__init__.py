"""The few tensor primitives a sparsifier needs, and the host memory that has them."""

from __future__ import annotations

from horovod_sparse.arrays.gradients import GradientParts
from horovod_sparse.arrays.host import HostAccumulator
from horovod_sparse.arrays.protocol import Accumulator, FoldReport, Indices, Moments, Values
from horovod_sparse.arrays.summed import SummedParts

__all__ = [
    "Accumulator",
    "FoldReport",
    "GradientParts",
    "HostAccumulator",
    "Indices",
    "Moments",
    "SummedParts",
    "Values",
]
