"""Ok-Topk and TopkDSA seen from above: all ranks at once, dense arrays, as their papers tell them.

Nothing here knows of regions' messages, of codecs or of who holds what in between: those must not change
what comes out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

__all__ = ["OkTopkReference", "topk_dsa_step"]


def kth(magnitudes: np.ndarray, k: int) -> float:
    """The k-th largest."""
    return float(np.sort(magnitudes)[-k])


@dataclass
class OkTopkReference:
    """Algorithms 1 and 2 of Ok-Topk (Li & Hoefler 2022), with thresholds steered between exact steps.

    Attributes:
        residuals: float64 [P, n], epsilon.
        k: of the global selection.
        threshold_steps: tau', how often both thresholds are found exactly.
        step: t, from 0.
        local: [P], thresholds of the ranks.
        whole: threshold of the sums.
        counts: of the last step: elements that each rank selected.
        passed: of the last step: elements of the sum.
    """

    residuals: np.ndarray
    k: int
    threshold_steps: int
    step: int = 0
    local: list[float] = field(default_factory=list)
    whole: float = 0.0
    counts: list[int] = field(default_factory=list)
    passed: int = 0

    def synchronize(self, gradients: np.ndarray, owners: np.ndarray | None = None) -> np.ndarray:
        """One step; the synchronized sum, dense, NaN where nothing came back.

        Args:
            gradients: [P, n].
            owners: [n], ranks that keep the sums that do not come back, where that is not as in the paper.
        """
        size, n = gradients.shape
        self.local = self.local or [0.0] * size
        accumulators = self.residuals + gradients
        exact = self.step % self.threshold_steps == 0
        selected = np.zeros((size, n), bool)
        for rank, accumulator in enumerate(accumulators):
            if exact or self.local[rank] == 0.0:
                self.local[rank] = kth(np.abs(accumulator), self.k)
            selected[rank] = (np.abs(accumulator) >= self.local[rank]) & (accumulator != 0.0)
        total = np.where(selected, accumulators, 0.0).sum(axis=0)
        union = selected.any(axis=0)
        if exact or self.whole == 0.0:
            self.whole = kth(np.abs(total[union]), self.k) if union.sum() > self.k else 0.0
        chosen = union & (np.abs(total) >= self.whole)
        # Algorithm 2: what was selected here and came back leaves the residual
        self.residuals = np.where(selected & chosen, 0.0, accumulators)
        if owners is not None:
            self.residuals[selected] = 0.0
            dropped = np.flatnonzero(union & ~chosen)
            self.residuals[owners[dropped], dropped] += total[dropped]
        self.counts, self.passed = selected.sum(axis=1).tolist(), int(chosen.sum())
        return np.where(chosen, total, np.nan)

    def steer(self) -> None:
        """After a step: local / 1.012 below 2k/3, * 1.012 above 5k/4; whole by 1.008 outside [2k/3, 4k/3]."""
        for rank, count in enumerate(self.counts):
            if count < 2 * self.k / 3:
                self.local[rank] /= 1.012
            elif count > 5 * self.k / 4:
                self.local[rank] *= 1.012
        if self.passed < 2 * self.k / 3:
            self.whole /= 1.008
        elif self.passed > 4 * self.k / 3:
            self.whole *= 1.008
        self.step += 1


def topk_dsa_step(accumulators: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """SparCML's direct-send sum of everyone's k largest.

    Args:
        accumulators: [P, n].
        k: of every rank.

    Returns:
        The sum [n]; which elements some rank has selected; residuals [P, n]; whether the sums are shorter
        without indices: n words against two for each of the union and four in front of each of P messages.
    """
    size, n = accumulators.shape
    selected = np.zeros((size, n), bool)
    for rank, accumulator in enumerate(accumulators):
        selected[rank, np.argsort(-np.abs(accumulator), kind="stable")[:k]] = True
    union = selected.any(axis=0)
    total = np.where(selected, accumulators, 0.0).sum(axis=0)
    return total, union, np.where(selected, 0.0, accumulators), n < 4 * size + 2 * int(union.sum())
