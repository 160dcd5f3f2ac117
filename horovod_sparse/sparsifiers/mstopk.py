"""MSTopk: top-k by bisection of a threshold, counting instead of sorting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from horovod_sparse.arrays import Accumulator, Indices
from horovod_sparse.checks import check_count
from horovod_sparse.sparsifiers.base import BucketInfo, SelectAndGather, Selected, SparsifierState

#: from so few times k elements above the lower threshold on, counting goes on among them alone
_FEW = 4


@dataclass(frozen=True, kw_only=True)
class MSTopK(SelectAndGather):
    """Each rank sends exactly k elements: all above a threshold found by bisection, then others up to k.

    Bisection between 0 and the maximum magnitude counts how many elements pass, and keeps the highest
    threshold seen that at least k pass, and the lowest that fewer than k pass. Everything above the
    latter is sent, and elements between the two fill up to exactly k.

    One round, as top-k. The fill takes the lowest indices, so among elements between the two thresholds
    it is not the largest that are sent; more passes narrow that gap.

    Args:
        num_passes: most counting passes; each halves the interval of the threshold.

    Source: Shi et al., MLSys 2021 (MSTopk). Departures: bisection starts from 0, not the mean (where
    more than k elements are below the mean the paper's never ends well; the first passes are cheap,
    since counting looks only inside blocks whose maximum passes); once few elements pass the lower
    threshold they are collected, and the passes that are left count among them; the paper fills from a
    random place.
    """

    name: ClassVar[str] = "mstopk"

    num_passes: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_passes", self.num_passes)

    def select(self, accumulator: Accumulator, k: int, state: SparsifierState, info: BucketInfo) -> Selected:
        if k >= accumulator.num_elements:
            return Selected(accumulator.largest(k))
        # at least k elements reach `low` (if there are so many that are not 0), fewer than k reach `high`
        low, high = 0.0, float(np.nextafter(accumulator.kth_magnitude(1), np.inf))
        reserve: Indices | None = None
        magnitudes = np.empty(0)
        for _ in range(self.num_passes):
            mid = low + (high - low) / 2
            found: Any = accumulator.at_least(mid) if reserve is None else np.flatnonzero(magnitudes >= mid)
            low, high = (mid, high) if found.size >= k else (low, mid)
            if reserve is None and k <= found.size <= _FEW * k:
                reserve, magnitudes = found, _magnitudes(accumulator, found)
            if found.size == k:
                break
        if reserve is None:
            reserve = accumulator.at_least(low)
            magnitudes = _magnitudes(accumulator, reserve)
        if reserve.size < k:
            return Selected(accumulator.largest(k))  # zeros have to fill up
        chosen = magnitudes >= high
        between = np.flatnonzero((magnitudes >= low) & ~chosen)
        chosen[between[: k - int(np.count_nonzero(chosen))]] = True
        return Selected(reserve[chosen])


def _magnitudes(accumulator: Accumulator, indices: Indices) -> np.ndarray:
    return np.abs(accumulator.take(indices).astype(np.float64))
