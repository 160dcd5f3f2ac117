"""What Ok-Topk remembers between steps: two thresholds, steered by counts, and the regions of ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays.protocol import Indices
from horovod_sparse.collectives import LOCAL
from horovod_sparse.sparsifiers.base import BucketInfo, SparsifierState
from horovod_sparse.sparsifiers.windows import Window, equal_part

__all__ = ["OkTopkState", "equal_regions", "propose_regions", "regions_of", "steered"]


@dataclass
class OkTopkState(SparsifierState):
    """State of Ok-Topk.

    Attributes:
        step: synchronizations done.
        local_threshold: for this rank's accumulator; 0 before the first step.
        global_threshold: for the sums; 0 where all of them are to be kept.
        bounds: int64 [P - 1], where the regions of ranks 1, 2, ... begin.
    """

    step: int = 0
    local_threshold: float = field(default=0.0, metadata=LOCAL)
    global_threshold: float = 0.0
    bounds: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


def equal_regions(info: BucketInfo) -> NDArray[np.int64]:
    """Bounds of P equal regions."""
    return np.array([equal_part(info.num_elements, info.size, r)[0] for r in range(1, info.size)], np.int64)


def regions_of(bounds: NDArray[np.int64], info: BucketInfo) -> list[Window]:
    """The regions between the bounds."""
    edges = [0, *bounds.tolist(), info.num_elements]
    return list(itertools.pairwise(edges))


def propose_regions(selection: Indices, info: BucketInfo) -> NDArray[np.int64]:
    """Bounds that cut this rank's selection into P equal numbers of elements."""
    if not selection.size:
        return equal_regions(info)
    return selection[np.arange(1, info.size) * selection.size // info.size].astype(np.int64)


def steered(threshold: float, count: int, low: float, high: float, factor: float) -> float:
    """The threshold for the next step: lower if fewer than `low` passed, higher if more than `high`.

    Example:
        >>> [steered(1.0, count, 60, 120, 1.25) for count in (50, 100, 150)]
        [0.8, 1.0, 1.25]
    """
    if count < low:
        return threshold / factor
    return threshold * factor if count > high else threshold
