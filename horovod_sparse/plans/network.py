"""A network in two numbers, alpha and beta, and what a collective of so many ranks makes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from horovod_sparse.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Level,
    ReduceScatter,
    Request,
)

#: The kinds of collective, by the names that profiles use.
COLLECTIVES: dict[type[Request], str] = {
    AllGather: "allgather",
    AllReduce: "allreduce",
    Exchange: "exchange",
    Broadcast: "broadcast",
    AllToAll: "alltoall",
    ReduceScatter: "reducescatter",
}


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

    Example:
        >>> gigabit = AlphaBeta(alpha_seconds=50e-6, beta_seconds=8e-9)
        >>> round(gigabit.seconds(CollectiveCost(rounds=6, bytes_received=7_000_000)) * 1e3, 2)
        56.3
    """

    alpha_seconds: float = 50e-6
    beta_seconds: float = 8e-9

    def seconds(self, cost: CollectiveCost) -> float:
        """Time of a cost on this network."""
        return cost.rounds * self.alpha_seconds + cost.bytes_received * self.beta_seconds


#: between the ranks of a host, where nobody has measured it: shared memory, or the loopback device
HOST_NETWORK = AlphaBeta(20e-6, 2.5e-10)


def network_at(
    kind: str,
    level: Level,
    network: AlphaBeta,
    num_hosts: int,
    per_host: int,
    inside: AlphaBeta = HOST_NETWORK,
) -> AlphaBeta:
    """The network as a rank sees it in a collective, where the ranks of a host share its card.

    Within a host it is another one. Among one rank of every host, L such groups are at work at a time. Among
    all ranks, what goes in a ring passes from host to host once, whatever number of ranks a host has, and
    messages between pairs of ranks are each rank's own.

    Args:
        kind: of the collective, see `COLLECTIVES`.
        level: among whom it is.
        network: between hosts.
        num_hosts: N.
        per_host: L.
        inside: within a host.

    Example:
        >>> one = AlphaBeta(1e-4, 1.0)
        >>> [network_at("allgather", level, one, 4, 2).beta_seconds for level in ("all", "across")]
        [1.0, 2.0]
        >>> round(network_at("exchange", "all", one, 4, 2).beta_seconds, 2)
        1.71
    """
    size = num_hosts * per_host
    if level == "host" or num_hosts == 1:
        return inside if size > 1 and per_host > 1 else network
    crowded = 1.0
    if level == "across":
        crowded = per_host
    elif kind in ("exchange", "alltoall"):
        crowded = per_host * (size - per_host) / (size - 1)
    return AlphaBeta(network.alpha_seconds, network.beta_seconds * crowded)


def collective_seconds(
    kind: str,
    level: Level,
    network: AlphaBeta,
    num_hosts: int,
    per_host: int,
    inside: AlphaBeta = HOST_NETWORK,
) -> tuple[float, float]:
    """Seconds of a collective, and of each byte that a rank puts in: ``rounds alpha``, ``share beta``."""
    on = network_at(kind, level, network, num_hosts, per_host, inside)
    among = {"all": num_hosts * per_host, "host": per_host, "across": num_hosts}[level]
    return num_rounds(kind, among) * on.alpha_seconds, share_of_bytes(kind, among) * on.beta_seconds
