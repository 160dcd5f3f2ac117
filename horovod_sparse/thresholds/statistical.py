"""Quantiles of distributions fitted to magnitudes by their moments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from horovod_sparse.arrays.moments import Moments
from horovod_sparse.errors import UnknownNameError

__all__ = ["FITS", "Excess", "Exponential", "Fit", "Gamma", "GeneralizedPareto", "fit_named"]


@dataclass(frozen=True)
class Excess:
    """Moments of |x| - threshold over the magnitudes that reach the threshold.

    Attributes:
        mean: of the excess.
        variance: of the excess.
        mean_logarithm: of ln |x| (not of the excess; only the first fit, at threshold 0, uses it).
    """

    mean: float
    variance: float
    mean_logarithm: float = 0.0

    @classmethod
    def of(cls, moments: Moments, threshold: float) -> Excess:
        """From the moments of the magnitudes themselves; there must be at least one."""
        variance = max(0.0, moments.mean_square - moments.mean**2)
        return cls(moments.mean - threshold, variance, moments.mean_logarithm)


class Fit(Protocol):
    """A distribution of magnitudes above 0, fitted by excess."""

    def quantile(self, excess: Excess, density: float) -> float:
        """The excess that the share `density` exceeds.

        Args:
            excess: over the last threshold (over 0 at first); its mean is above 0.
            density: in (0, 1).
        """


@dataclass(frozen=True)
class Exponential:
    """``beta = mean,  threshold = beta * ln(1 / density)``."""

    def quantile(self, excess: Excess, density: float) -> float:
        """See `Fit.quantile`.

        Example:
            >>> round(Exponential().quantile(Excess(mean=2.0, variance=4.0), 0.5), 4)
            1.3863
        """
        return excess.mean * math.log(1.0 / density)


@dataclass(frozen=True)
class GeneralizedPareto:
    """Generalized Pareto.

    ``alpha = (1 - q) / 2,  beta = mean (q + 1) / 2,  q = mean^2 / variance``;
    ``threshold = (beta / alpha) (density^-alpha - 1)``.
    """

    def quantile(self, excess: Excess, density: float) -> float:
        """See `Fit.quantile`; an alpha near 0 is the exponential distribution.

        Example:
            >>> round(GeneralizedPareto().quantile(Excess(mean=2.0, variance=4.0), 0.5), 4)
            1.3863
        """
        if excess.variance <= 0.0:
            return excess.mean
        quotient = excess.mean**2 / excess.variance
        alpha, beta = 0.5 * (1.0 - quotient), 0.5 * excess.mean * (quotient + 1.0)
        if abs(alpha) < 1e-9:
            return beta * math.log(1.0 / density)
        return beta / alpha * math.expm1(-alpha * math.log(density))


@dataclass(frozen=True)
class Gamma:
    """Gamma.

    ``s = ln mean - mean ln,  alpha = (3 - s + sqrt((s - 3)^2 + 24 s)) / (12 s),  beta = mean / alpha``;
    ``threshold = -beta (ln density + ln Gamma(alpha))``, an approximation far out in the tail.
    """

    def quantile(self, excess: Excess, density: float) -> float:
        """See `Fit.quantile`; 0 where the approximation is not positive."""
        spread = math.log(excess.mean) - excess.mean_logarithm
        if not spread > 1e-12:
            return excess.mean
        alpha = (3.0 - spread + math.sqrt((spread - 3.0) ** 2 + 24.0 * spread)) / (12.0 * spread)
        return max(0.0, -excess.mean / alpha * (math.log(density) + math.lgamma(alpha)))


FITS: dict[str, tuple[Fit, Fit]] = {
    "exponential": (Exponential(), Exponential()),
    "pareto": (GeneralizedPareto(), GeneralizedPareto()),
    "gamma": (Gamma(), GeneralizedPareto()),
}


def fit_named(distribution: str, stage: int) -> Fit:
    """The fit that a named method uses in a stage (from 0).

    Example:
        >>> fit_named("gamma", 1)
        GeneralizedPareto()
    """
    if distribution not in FITS:
        raise UnknownNameError("distribution", distribution, FITS)
    return FITS[distribution][min(stage, 1)]
