"""Runs P ranks' coroutines in one process in lock-step, and counts their bytes; it is no real network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from horovod_sparse import collectives
from horovod_sparse.collectives import Request, Synchronization
from horovod_sparse.errors import CollectiveMismatchError
from horovod_sparse.feedback.bucket import num_bytes_sent
from horovod_sparse.topology import Topology


def num_rounds(kind: str, size: int) -> int:
    """Returns how many messages follow one another in a collective of this kind, by its usual algorithm.

    Example:
        >>> num_rounds("allgather", 8), num_rounds("allreduce", 8), num_rounds("exchange", 8)
        (3, 6, 1)
    """
    doublings = math.ceil(math.log2(size)) if size > 1 else 0
    if kind == "alltoall":
        return size - 1
    return {"allreduce": 2 * doublings, "exchange": min(1, doublings)}.get(kind, doublings)


def share_of_bytes(kind: str, size: int) -> float:
    """Returns the ratio of the bytes that a rank receives in a collective to the bytes that it puts in.

    Example:
        >>> share_of_bytes("allgather", 8), share_of_bytes("allreduce", 8), share_of_bytes("exchange", 8)
        (7.0, 1.75, 1.0)
    """
    if kind == "allgather":
        return float(size - 1)
    if kind in ("allreduce", "reducescatter"):
        return (2.0 if kind == "allreduce" else 1.0) * (size - 1) / size
    return float(size > 1)


@dataclass(frozen=True)
class CollectiveCost:
    """One rank's cost of collectives: successive messages, and bytes received."""

    #: number of successive messages; each costs alpha
    rounds: int
    #: payload bytes that this rank receives; each costs beta
    bytes_received: float


@dataclass
class Recorder:
    """Records the kinds, bytes and costs of P ranks' collectives, by round and rank."""

    kinds: list[type[Request]] = field(default_factory=list)
    levels: list[collectives.Level] = field(default_factory=list)
    #: payload bytes put in
    bytes_sent: list[list[int]] = field(default_factory=list)
    costs: list[list[CollectiveCost]] = field(default_factory=list)

    def record(self, requests: Sequence[Request], topology: Topology | None = None) -> None:
        """Records one round, given the requests of all ranks in rank order."""
        costs = [CollectiveCost(0, 0)] * len(requests)
        sent = [0] * len(requests)
        for ranks in groups_of(requests, topology):
            group = [requests[rank] for rank in ranks]
            for place, (rank, cost) in enumerate(zip(ranks, _costs_by_rank(group), strict=True)):
                costs[rank], sent[rank] = cost, num_bytes_sent(requests[rank], place)
        self.kinds.append(type(requests[0]))
        self.levels.append(requests[0].level)
        self.bytes_sent.append(sent)
        self.costs.append(costs)

    def total(self, rank: int) -> CollectiveCost:
        """Returns one rank's cost of all recorded rounds."""
        own = [costs[rank] for costs in self.costs]
        return CollectiveCost(sum(one.rounds for one in own), sum(one.bytes_received for one in own))


def groups_of(requests: Sequence[Request], topology: Topology | None) -> Sequence[Sequence[int]]:
    """Returns the groups of ranks that communicate in a round: all ranks, or by level hosts or columns."""
    if topology is None:
        return [range(len(requests))]
    return topology.groups(requests[0].level)


def _costs_by_rank(requests: Sequence[Request]) -> list[CollectiveCost]:
    size, first, received = len(requests), requests[0], [0] * len(requests)
    if isinstance(first, (collectives.AllToAll, collectives.Exchange)):
        rounds = []
        for sender, request in enumerate(requests):
            exchange = request if isinstance(request, collectives.Exchange) else None
            messages = exchange.sends if exchange else dict(enumerate(request.buffers))  # type: ignore[union-attr]
            rounds.append(max(len(exchange.sources), len(messages)) if exchange else size - 1)
            for receiver, buffer in messages.items():
                received[receiver] += buffer.nbytes if receiver != sender else 0
        return list(map(CollectiveCost, rounds, received))
    kind = collectives.COLLECTIVES[type(first)]
    lengths = [request.buffer.nbytes for request in requests]  # type: ignore[union-attr]
    arrives = [lengths[0] * share_of_bytes(kind, size)] * size
    if isinstance(first, collectives.AllGather):
        arrives = [sum(lengths) - length for length in lengths]
    elif isinstance(first, collectives.Broadcast):
        arrives[first.root] = 0
    return [CollectiveCost(num_rounds(kind, size), num_bytes) for num_bytes in arrives]


Result = TypeVar("Result")


def run_lockstep(
    coroutines: Sequence[Synchronization[Result]],
    recorder: Recorder | None = None,
    *,
    keep_errors: bool = False,
    topology: Topology | None = None,
) -> list[Result]:
    """Runs the coroutines of all ranks in one process, answering their collectives round by round.

    Args:
        coroutines: one per rank, in rank order.
        recorder: counts rounds and bytes, if given.
        keep_errors: put an exception that a coroutine raises into its place in the result instead of
            raising the first one after all are done.
        topology: which ranks share a host, where requests are made of single levels.

    Returns:
        What each rank's coroutine returned.

    Raises:
        CollectiveMismatchError: if ranks disagree about the round: on a cluster that would hang.

    Example:
        >>> def rank(value):
        ...     total = yield collectives.AllReduce(np.array([value]))
        ...     return float(total[0])
        >>> run_lockstep([rank(1.0), rank(2.0)])
        [3.0, 3.0]
    """
    size = len(coroutines)
    finished: list[Any] = [None] * size
    answers: list[Any] = [None] * size
    errors: dict[int, Exception] = {}
    for round_number in range(1_000_000):
        requests: dict[int, Request] = {}
        for rank, coroutine in enumerate(coroutines):
            try:
                requests[rank] = coroutine.send(answers[rank])
            except StopIteration as stop:
                finished[rank] = stop.value
            except Exception as error:
                errors[rank] = error
        if not requests:
            break
        _check_round(round_number, requests, errors, size, topology)
        ordered = [requests[rank] for rank in range(size)]
        for ranks in groups_of(ordered, topology):
            for rank, given in zip(ranks, answer([ordered[rank] for rank in ranks]), strict=True):
                answers[rank] = given
        if recorder is not None:
            recorder.record(ordered, topology)
    if errors and not keep_errors:
        raise errors[min(errors)]
    for rank, raised in errors.items():
        finished[rank] = raised
    return finished


def _check_round(
    round_number: int,
    requests: dict[int, Request],
    errors: dict[int, Exception],
    size: int,
    topology: Topology | None,
) -> None:
    """Raises if ranks of a group yield different collectives in a round, or some have already ended."""
    missing = [rank for rank in range(size) if rank not in requests]
    if missing:
        failed = f" (rank {min(errors)} raised {errors[min(errors)]!r})" if errors else ""
        raise CollectiveMismatchError(
            f"round {round_number}: ranks {missing[:8]} are done{failed} while ranks {sorted(requests)[:8]} "
            f"ask for {type(next(iter(requests.values()))).__name__}"
        ) from (errors[min(errors)] if errors else None)
    levels = {rank: request.level for rank, request in requests.items()}
    if topology is None and set(levels.values()) != {"all"}:
        raise CollectiveMismatchError("collectives of level 'host' or 'across' need topology=...")
    _check_same_on_ranks(round_number, levels)
    for ranks in groups_of([requests[rank] for rank in range(size)], topology):
        _check_same_on_ranks(round_number, {rank: _signature(requests[rank], len(ranks)) for rank in ranks})


def _check_same_on_ranks(round_number: int, asked: Mapping[int, str]) -> None:
    kinds: dict[str, list[int]] = {}
    for rank, kind in asked.items():
        kinds.setdefault(kind, []).append(rank)
    if len(kinds) > 1:
        told = "; ".join(f"ranks {ranks[:8]}: {kind}" for kind, ranks in kinds.items())
        raise CollectiveMismatchError(f"round {round_number}: ranks ask for different collectives ({told})")


def _signature(request: Request, size: int) -> str:
    """Returns a request's kind, dtype and length as text, which has to be equal on all ranks."""
    name = type(request).__name__
    if isinstance(request, (collectives.AllReduce, collectives.ReduceScatter)):
        return f"{name} of {request.buffer.size} {request.buffer.dtype}"
    if isinstance(request, collectives.Broadcast):
        return f"{name} of {request.buffer.size} {request.buffer.dtype} from {request.root}"
    if isinstance(request, collectives.AllToAll) and len(request.buffers) != size:
        return f"{name} with {len(request.buffers)} messages"
    return name


def answer(requests: Sequence[Request]) -> list[Any]:
    """Returns each rank's result of one collective, given all ranks' requests."""
    first, size = requests[0], len(requests)
    if isinstance(first, collectives.AllGather):
        return [np.concatenate([request.buffer for request in requests])] * size  # type: ignore[union-attr]
    if isinstance(first, (collectives.AllReduce, collectives.ReduceScatter)):
        total = first.buffer.copy()
        with np.errstate(over="ignore"):  # ranks cancel a step with an infinite sum
            for request in requests[1:]:
                total += request.buffer  # type: ignore[union-attr]
        if isinstance(first, collectives.AllReduce):
            return [total.copy() for _ in requests]
        parts = (collectives.rank_part(total.size, rank, size) for rank in range(size))
        return [total[slice(*one)].copy() for one in parts]
    if isinstance(first, collectives.Broadcast):
        return [requests[first.root].buffer.copy() for _ in requests]  # type: ignore[union-attr]
    if isinstance(first, collectives.AllToAll):
        return [[request.buffers[rank].copy() for request in requests] for rank in range(size)]  # type: ignore[union-attr]
    return _answer_exchanges(requests)  # type: ignore[arg-type]


def _answer_exchanges(requests: Sequence[collectives.Exchange]) -> list[dict[int, Any]]:
    """Returns each rank's received messages; raises if its senders are not the ranks it awaits."""
    inbox: list[dict[int, Any]] = [{} for _ in requests]
    for sender, request in enumerate(requests):
        for receiver, buffer in request.sends.items():
            inbox[receiver][sender] = buffer.copy()
    for rank, request in enumerate(requests):
        if set(inbox[rank]) != set(request.sources):
            raise CollectiveMismatchError(
                f"rank {rank} awaits messages from {sorted(request.sources)}, "
                f"but {sorted(inbox[rank])} send to it"
            )
    return inbox
