"""The alpha-beta model: what a collective costs on a network, by rounds and words."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["AlphaBeta", "CollectiveCost"]


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

    Example:
        >>> gigabit = AlphaBeta(alpha_seconds=50e-6, beta_seconds=8e-9)
        >>> round(gigabit.seconds(AlphaBeta.allreduce(4_000_000, size=8)) * 1e3, 2)
        56.3
    """

    alpha_seconds: float = 50e-6
    beta_seconds: float = 8e-9

    def seconds(self, cost: CollectiveCost) -> float:
        """Time of a cost on this network."""
        return cost.rounds * self.alpha_seconds + cost.bytes_received * self.beta_seconds

    @staticmethod
    def allgather(message_bytes: list[int], rank: int) -> CollectiveCost:
        """Recursive doubling: ceil(log2 P) rounds; everything that is not one's own arrives."""
        return CollectiveCost(_log2(len(message_bytes)), sum(message_bytes) - message_bytes[rank])

    @staticmethod
    def allreduce(num_bytes: int, size: int) -> CollectiveCost:
        """Reduce-scatter and all-gather: 2 ceil(log2 P) rounds, 2 (P - 1) / P of the data."""
        return CollectiveCost(2 * _log2(size), 2 * num_bytes * (size - 1) / size)

    @staticmethod
    def broadcast(num_bytes: int, size: int, is_root: bool) -> CollectiveCost:
        """A binomial tree: ceil(log2 P) rounds; all but the root receive once."""
        return CollectiveCost(_log2(size), 0 if is_root else num_bytes)


def _log2(size: int) -> int:
    return math.ceil(math.log2(size)) if size > 1 else 0
