"""The few tensor primitives a sparsifier needs, and the host memory that has them."""

from __future__ import annotations

from horovod_sparse.arrays.accumulator import Accumulator as Accumulator
from horovod_sparse.arrays.gradients import GradientParts as GradientParts
from horovod_sparse.arrays.gradients import MovedParts as MovedParts
from horovod_sparse.arrays.gradients import WeightedParts as WeightedParts
from horovod_sparse.arrays.host import HostAccumulator as HostAccumulator
from horovod_sparse.arrays.protocol import FoldReport as FoldReport
from horovod_sparse.arrays.protocol import FoldRule as FoldRule
from horovod_sparse.arrays.protocol import Indices as Indices
from horovod_sparse.arrays.protocol import Moments as Moments
from horovod_sparse.arrays.protocol import Values as Values
from horovod_sparse.arrays.whole import WholeGradient as WholeGradient
