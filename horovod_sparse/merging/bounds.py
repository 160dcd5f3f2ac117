"""How soon a step can end at the earliest, whatever its plan: what keeps the exact search small."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.merging.chain import SegmentTables

__all__ = ["Bounds"]

_KEPT = 16

Array = NDArray[np.float64]


class Bounds:
    """Lower bounds of a step's end, for any beginning of a plan, and a good plan found on the way.

    A step ends when the longest path through its two queues does: path q computes every segment up to
    the one that holds parameter q, and communicates from that one on. With weights p_q that sum to 1,
    the end is no earlier than the weighted mean of the paths,

    ``sum over segments (i, j] of Pr(q >= i) * computation + Pr(q < j) * network``,

    and the plan that makes this least is a shortest path over boundaries (path -1 communicates only).
    The weights are improved
    step by step: paths that are long under the present least plan gain weight (exponentiated
    subgradient); the plans met on the way are good ones. For a beginning that leaves (x, y) at boundary j
    the same weights give ``Pr(q >= j) x + Pr(q < j) y + rest[j]``.

    Args:
        tables: of all segments.
        num_iterations: improvements of the weights; more make better bounds and a shorter search.

    Attributes:
        segments: the best plan met.
        seconds: its time.
        first_start: for every boundary, where the longest segment that may end there in a better plan
            than `segments` begins.
    """

    def __init__(self, tables: SegmentTables, num_iterations: int = 160) -> None:
        self._tables, m = tables, tables.num_sparse
        # shortest paths need numbers where there is no segment
        large = 4.0 * float(np.max(tables.computation[0, m]) + np.sum(np.diagonal(tables.network, 1)) + 1.0)
        self._computation = np.where(np.isfinite(tables.computation), tables.computation, large)
        self._network = np.where(np.isfinite(tables.network), tables.network, large)
        self.segments: list[int] = [m]
        self.seconds = tables.seconds([m])
        found: list[tuple[float, Array, Array]] = []
        weights = np.zeros(m + 1)
        for share in np.linspace(0.0, 1.0, 5):  # all communication, all computation, and between
            weights[0], weights[-1] = 1.0 - share, share
            self._try(found, weights)
        simple = found[:]
        weights = np.full(m + 1, 1.0 / m)
        weights[0] = 0.0
        for _ in range(num_iterations):
            paths = self._try(found, weights)
            excess = paths - found[-1][0]
            least = max(bound for bound, _, _ in found)
            if self.seconds - least <= 1e-12 * self.seconds:
                break
            step = (self.seconds - least) / max(float(np.sum(weights * excess**2)), 1e-300)
            step = min(step, 5.0 / max(float(np.max(np.abs(excess))), 1e-300))
            weights = weights * np.exp(step * excess)
            weights /= weights.sum()
        # the best ones, and those that say most about beginnings far from the best plan's
        kept = sorted(found, key=lambda item: -item[0])[:_KEPT] + simple
        self._later = np.stack([later for _, later, _ in kept])
        self._rest = np.stack([rest for _, _, rest in kept])
        self.first_start = self._first_start()

    def _try(self, found: list[tuple[float, Array, Array]], weights: Array) -> Array:
        """The bound of some weights, remembered; returns the paths' lengths under its least plan."""
        m = self._tables.num_sparse
        sooner = np.cumsum(weights)  # Pr(q < j)
        later = 1.0 - sooner
        spent = self._spent(later)
        rest, follows = np.zeros(m + 1), np.zeros(m + 1, np.int64)
        # what follows the last sparse parameter: a path that has switched pays network, and all have
        rest[m] = self._tables.tail[0]
        for start in range(m - 1, -1, -1):
            sums = spent[start, start:] + rest[start + 1 :]
            best = int(np.argmin(sums))
            rest[start], follows[start] = sums[best], start + 1 + best
        segments = [int(follows[0])]
        while segments[-1] < m:
            segments.append(int(follows[segments[-1]]))
        if (seconds := self._tables.seconds(segments)) < self.seconds:
            self.segments, self.seconds = segments, seconds
        found.append((float(rest[0]), later, rest))
        ends = np.array([0, *segments])
        network = self._network[ends[:-1], ends[1:]]
        paths = np.cumsum(self._computation[ends[:-1], ends[1:]]) + np.cumsum(network[::-1])[::-1]
        through = np.repeat(paths, np.diff(ends))
        return np.concatenate([[network.sum()], through]) + self._tables.tail[0]

    def _spent(self, later: Array) -> Array:
        """Weighted time of segment (i, j] at [i, j - 1]."""
        m = self._tables.num_sparse
        return later[:m, None] * self._computation[:m, 1:] + (1.0 - later[1:]) * self._network[:m, 1:]

    def _first_start(self) -> NDArray[np.int64]:
        m = self._tables.num_sparse
        possible = np.triu(np.ones((m, m), bool))
        for later, rest in zip(self._later[:2], self._rest[:2], strict=True):
            spent = self._spent(later)
            before = np.zeros(m + 1)
            for stop in range(1, m + 1):
                before[stop] = np.min(before[:stop] + spent[:stop, stop - 1])
            possible &= before[:m, None] + spent + rest[1:] < self.seconds
        first = np.concatenate([[0], np.argmax(possible, axis=0)])
        first[1:][~possible.any(axis=0)] = np.arange(m)[~possible.any(axis=0)]
        return first.astype(np.int64)

    def least(self, boundary: int, computation: Array, communication: Array, *, rough: bool = False) -> Array:
        """The earliest end that each beginning at a boundary can lead to.

        Args:
            boundary: number of sparse parameters behind it.
            computation: when computation is done, of each beginning.
            communication: when the network is free, of each.
            rough: by the best two weights only: a lower bound, too, and sooner computed.
        """
        rows = slice(0, 2) if rough else slice(None)
        later = self._later[rows, boundary, None]
        bounds: Array = np.max(
            later * computation + (1.0 - later) * communication + self._rest[rows, boundary, None], axis=0
        )
        return bounds
