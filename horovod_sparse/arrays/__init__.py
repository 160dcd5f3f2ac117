"""The accumulator, residual plus gradient, and the primitives that sparsifiers call."""

from __future__ import annotations

from horovod_sparse.arrays.accumulator import Accumulator
from horovod_sparse.arrays.gradients import GradientParts, WeightedParts
from horovod_sparse.arrays.host import HostAccumulator
from horovod_sparse.arrays.protocol import FoldReport, FoldRule, Indices, Values
from horovod_sparse.arrays.whole import WholeGradient
