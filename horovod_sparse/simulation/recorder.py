"""Counts what a network would see: rounds and bytes, and how long they would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from horovod_sparse.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Request,
    num_bytes_sent,
)
from horovod_sparse.cost.times import AlphaBeta, CollectiveCost

__all__ = ["Recorder"]


@dataclass
class Recorder:
    """Counts the collectives of P ranks, and runs an alpha-beta clock.

    Attributes:
        network: the clock's constants.
        kinds: type of every round, in order.
        bytes_sent: round -> rank -> payload bytes put in.
        costs: round -> rank -> cost on the network.
        seconds: the clock: rounds one behind the other, each as slow as its slowest rank.
    """

    network: AlphaBeta = field(default_factory=AlphaBeta)
    kinds: list[type[Request]] = field(default_factory=list)
    bytes_sent: list[list[int]] = field(default_factory=list)
    costs: list[list[CollectiveCost]] = field(default_factory=list)
    seconds: float = 0.0

    def record(self, requests: Sequence[Request]) -> None:
        """Takes note of one round: the requests of all ranks, in rank order."""
        self.kinds.append(type(requests[0]))
        self.bytes_sent.append([num_bytes_sent(request, rank) for rank, request in enumerate(requests)])
        self.costs.append(_costs(requests))
        self.seconds += max(self.network.seconds(cost) for cost in self.costs[-1])

    def total(self, rank: int) -> CollectiveCost:
        """Cost of everything recorded so far, for one rank."""
        return sum((costs[rank] for costs in self.costs), CollectiveCost(0, 0))


def _costs(requests: Sequence[Request]) -> list[CollectiveCost]:
    size, first = len(requests), requests[0]
    if isinstance(first, AllGather):
        lengths = [request.buffer.nbytes for request in requests]  # type: ignore[union-attr]
        rounds, total = AlphaBeta.allgather(lengths, 0).rounds, sum(lengths)
        return [CollectiveCost(rounds, total - length) for length in lengths]
    if isinstance(first, AllReduce):
        return [AlphaBeta.allreduce(first.buffer.nbytes, size)] * size
    if isinstance(first, Broadcast):
        return [AlphaBeta.broadcast(first.buffer.nbytes, size, rank == first.root) for rank in range(size)]
    if isinstance(first, AllToAll):
        received = [0] * size
        for sender, request in enumerate(requests):
            for receiver, buffer in enumerate(request.buffers):  # type: ignore[union-attr]
                received[receiver] += buffer.nbytes if receiver != sender else 0
        return [CollectiveCost(size - 1, num_bytes) for num_bytes in received]
    exchanges = [request for request in requests if isinstance(request, Exchange)]
    received = [0] * size
    for sender, exchange in enumerate(exchanges):
        for receiver, buffer in exchange.sends.items():
            received[receiver] += buffer.nbytes if receiver != sender else 0
    return [
        CollectiveCost(max(len(exchange.sources), len(exchange.sends)), received[rank])
        for rank, exchange in enumerate(exchanges)
    ]
