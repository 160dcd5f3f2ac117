"""How long something takes as a function of its size: the shapes that models may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from horovod_sparse.checks import check_seconds


class TimeModel(Protocol):
    """Seconds as a function of an amount (elements or bytes); nothing takes no time."""

    @property
    def fixed_seconds(self) -> float:
        """What is paid once however large the amount: two at once save it once."""
        ...

    def seconds(self, amount: Any) -> Any:
        """Seconds for an amount, or for every amount of an array."""
        ...


@dataclass(frozen=True)
class AffineTime:
    """``seconds = a + b * amount``, and 0 for an amount of 0.

    Args:
        fixed_seconds: a, 0 or more; of a collective: alpha.
        seconds_per_unit: b, 0 or more; of a collective: beta, per byte.

    Source: OMGS-SGD, Eq. (11).

    Example:
        >>> AffineTime(0.001, 1e-8).seconds(100_000)
        0.002
    """

    fixed_seconds: float = 0.0
    seconds_per_unit: float = 0.0

    def __post_init__(self) -> None:
        for argument in ("fixed_seconds", "seconds_per_unit"):
            check_seconds(argument, getattr(self, argument))

    def seconds(self, amount: Any) -> Any:
        """Seconds for an amount, or for every amount of an array."""
        if np.ndim(amount):
            amounts = np.asarray(amount, np.float64)
            return np.where(amounts > 0, self.fixed_seconds + self.seconds_per_unit * amounts, 0.0)
        return self.fixed_seconds + self.seconds_per_unit * amount if amount > 0 else 0.0

    def __add__(self, other: AffineTime) -> AffineTime:
        return AffineTime(
            self.fixed_seconds + other.fixed_seconds, self.seconds_per_unit + other.seconds_per_unit
        )

    def per(self, units: float, offset: float = 0.0) -> AffineTime:
        """The same time as a function of another amount x, where ``amount = offset + units * x``.

        Example:
            >>> AffineTime(1.0, 0.5).per(8.0, offset=2.0)
            AffineTime(fixed_seconds=2.0, seconds_per_unit=4.0)
        """
        return AffineTime(self.fixed_seconds + self.seconds_per_unit * offset, self.seconds_per_unit * units)


@dataclass(frozen=True)
class SortingTime:
    """``seconds = gamma * n * log2(n)``: top-k by sorting n elements.

    Args:
        gamma_seconds: 0 or more.

    Source: OMGS-SGD, Eq. (10), which has a factor rho (the density) besides; the paper's own gamma of
    2.2e-10 s is that of the form without it (its public program has 2.19e-10 and no rho), and with it
    selecting from ResNet-50 would take 0.1 ms where the paper measures more than a forward pass.

    Example:
        >>> SortingTime(1e-9).seconds(1024)
        1.024e-05
    """

    gamma_seconds: float

    def __post_init__(self) -> None:
        check_seconds("gamma_seconds", self.gamma_seconds)

    @property
    def fixed_seconds(self) -> float:
        """Nothing: sorting has no start-up time in this model."""
        return 0.0

    def seconds(self, amount: Any) -> Any:
        """Seconds for n elements, or for every n of an array."""
        if np.ndim(amount):
            amounts = np.asarray(amount, np.float64)
            return self.gamma_seconds * amounts * np.log2(np.maximum(amounts, 1.0))
        return float(self.gamma_seconds * amount * np.log2(amount)) if amount > 1 else 0.0
