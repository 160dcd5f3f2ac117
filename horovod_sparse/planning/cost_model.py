"""What a bucket costs, and the shapes that times may have: what plans and tensor selection are decided by."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from horovod_sparse.checks import check_seconds
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.plans.dense import bytes_by_round
from horovod_sparse.sparsifiers import Sparsifier


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


#: Horovod's default (HOROVOD_FUSION_THRESHOLD).
FUSION_BYTES = 128 * 2**20


@dataclass(frozen=True)
class CostModel:
    """Times of what happens to a bucket or a dense parameter, for one sparsifier, density and cluster.

    Args:
        selection: of a bucket, by its elements n: what the thread that runs backward does for it.
        communication: of a bucket, by its n: from the first message to the last one's arrival.
        dense: allreduce of a parameter that stays dense, by its bytes.
        dense_work: for a parameter that stays dense, by its elements: what that thread does for it.
        fuse_dense: dense parameters that wait for the network together go as one allreduce, as Horovod
            does it: all but one save `dense.fixed_seconds`.
        fuse_sparse: the same for buckets. Horovod does this too for what waits at the same time; the
            paper's model, and `optimal`'s proof, are without it.
        fusion_bytes: at most so many bytes in one fused allreduce.

    Example:
        >>> cost = CostModel(AffineTime(0.0, 1e-9), AffineTime(1e-3, 1e-10), AffineTime(1e-3, 1e-8))
        >>> cost.communication.seconds(10_000_000)
        0.002
    """

    selection: TimeModel
    communication: TimeModel
    dense: TimeModel = dataclasses.field(default_factory=AffineTime)
    dense_work: TimeModel = dataclasses.field(default_factory=AffineTime)
    fuse_dense: bool = True
    fuse_sparse: bool = False
    fusion_bytes: int = FUSION_BYTES


#: a and b of the allgather on 1 Gbit/s Ethernet, by number of ranks; the paper only plots them (Fig. 2b).
_OMGS_GIGABIT = {2: (1.6e-3, 1.0e-8), 4: (2.7e-3, 1.3e-8), 8: (4.0e-3, 1.5e-8), 16: (1.1e-2, 1.7e-8)}


def omgs_cost(size: int, density: float) -> CostModel:
    """The constants that OMGS-SGD was evaluated with: P102-100 GPUs, 1 Gbit/s Ethernet.

    ``t_s = 2.19e-10 n log2 n``, ``t_c = 2 (a + b * 4 P d n)``: one allgather for values, one for indices.

    Args:
        size: P: 2, 4, 8 or 16, the only ones there are.
        density: rho.

    Source: OMGS-SGD, Fig. 2; the numbers themselves stand in the public program that it names.

    Raises:
        ArgumentError: for another size.

    Example:
        >>> round(omgs_cost(16, 0.001).communication.seconds(25_557_032), 4)
        0.0776
    """
    if size not in _OMGS_GIGABIT:
        raise ArgumentError("size", size, f"one of {sorted(_OMGS_GIGABIT)}, for which there are constants")
    alpha, beta = _OMGS_GIGABIT[size]
    gather = AffineTime(2 * alpha, 2 * beta * 4 * size * density)
    # no constants for allreduce are given: twice the latency, and 2 (P - 1) / P of the bytes one way
    return CostModel(
        selection=SortingTime(2.18896957e-10),
        communication=gather,
        dense=AffineTime(2 * alpha, 2 * (size - 1) / size * beta),
    )


def communication_of(
    sparsifier: Sparsifier, size: int, collectives: Mapping[str, AffineTime], *, dtype: str = "float32"
) -> AffineTime:
    """Time of a bucket's rounds as a function of its n, from fitted collectives.

    What each round carries is the algorithm's own declaration (`Sparsifier.traffic`), read off at two
    bucket sizes; ranks are taken to select equally many.

    Args:
        sparsifier: which algorithm, at which density.
        size: P.
        collectives: time by the bytes that a rank puts in, by kind ("allgather", ...).
        dtype: of the gradients.

    Raises:
        UnknownNameError: if a kind that the sparsifier needs was not measured.
    """
    small, large = (bytes_by_round(sparsifier, size, n, dtype) for n in (2**20, 2**24))
    total = AffineTime()
    for (name, few), (_, many) in zip(small, large, strict=True):
        if name not in collectives:
            raise UnknownNameError("measured collective", name, collectives)
        per_element = (many - few) / (2**24 - 2**20)
        total += collectives[name].per(per_element, offset=max(0.0, few - per_element * 2**20))
    return total
