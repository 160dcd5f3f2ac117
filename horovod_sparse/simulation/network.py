"""A network in two numbers, alpha and beta, and what a collective of so many ranks makes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass


def num_rounds(kind: str, size: int) -> int:
    """Messages one behind the other in a collective, by its usual algorithm.

    Example:
        >>> [num_rounds(kind, 8) for kind in ("allgather", "allreduce", "exchange")]
        [3, 6, 1]
    """
    doublings = math.ceil(math.log2(size)) if size > 1 else 0
    if kind == "alltoall":
        return size - 1
    return {"allreduce": 2 * doublings, "exchange": min(1, doublings)}.get(kind, doublings)


def share_of_bytes(kind: str, size: int) -> float:
    """Bytes that arrive at a rank for every byte that a rank puts in.

    Example:
        >>> [share_of_bytes(kind, 8) for kind in ("allgather", "allreduce", "exchange")]
        [7.0, 1.75, 1.0]
    """
    if kind == "allgather":
        return float(size - 1)
    if kind in ("allreduce", "reducescatter"):
        return (2.0 if kind == "allreduce" else 1.0) * (size - 1) / size
    return float(size > 1)


@dataclass(frozen=True)
class CollectiveCost:
    """Cost of a collective for one rank.

    Attributes:
        rounds: messages one behind the other (each pays alpha).
        bytes_received: payload that arrives at this rank (each byte pays beta).
    """

    rounds: int
    bytes_received: float

    def __add__(self, other: CollectiveCost) -> CollectiveCost:
        return CollectiveCost(self.rounds + other.rounds, self.bytes_received + other.bytes_received)


@dataclass(frozen=True)
class AlphaBeta:
    """A network: ``time = rounds * alpha + bytes * beta``.

    Args:
        alpha_seconds: latency of one message.
        beta_seconds: time of one byte, the inverse of the bandwidth.
    """

    alpha_seconds: float = 50e-6
    beta_seconds: float = 8e-9

    def seconds(self, cost: CollectiveCost) -> float:
        """Time of a cost on this network."""
        return cost.rounds * self.alpha_seconds + cost.bytes_received * self.beta_seconds
