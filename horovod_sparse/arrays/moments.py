"""What statistical thresholds are fitted to."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Moments"]


@dataclass(frozen=True)
class Moments:
    """Sums over the magnitudes that are >= a threshold and not 0.

    Attributes:
        count: how many there are.
        total: sum of |x|.
        total_squares: sum of x**2.
        total_logarithms: sum of ln |x|.

    Example:
        >>> Moments(2, 4.0, 10.0, 1.0986).mean
        2.0
    """

    count: int
    total: float
    total_squares: float
    total_logarithms: float

    @property
    def mean(self) -> float:
        """Mean |x|; 0 if there is none."""
        return self.total / self.count if self.count else 0.0

    @property
    def mean_square(self) -> float:
        """Mean x**2; 0 if there is none."""
        return self.total_squares / self.count if self.count else 0.0

    @property
    def mean_logarithm(self) -> float:
        """Mean ln |x|; 0 if there is none."""
        return self.total_logarithms / self.count if self.count else 0.0
