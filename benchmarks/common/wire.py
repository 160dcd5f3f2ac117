"""Bytes on the wire: what the collectives of a step must move, and what an interface has counted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Round:
    """One collective.

    Attributes:
        kind: name of the request's class, such as "AllGather".
        payload: bytes that this rank puts in.
    """

    kind: str
    payload: int


@dataclass(frozen=True)
class Counters:
    """Bytes that went over all interfaces but the loopback, ever."""

    sent: int
    received: int


def counters(table: str | None = None) -> Counters:
    r"""Reads the counters of the network namespace that this process is in.

    Args:
        table: in the form of /proc/net/dev, which is read if left out.

    Example:
        >>> lines = ["", "", "    lo: 7 0 0 0 0 0 0 0 7 0", "  eth0: 9 1 0 0 0 0 0 0 5 1"]
        >>> counters("\n".join(lines))
        Counters(sent=5, received=9)
    """
    text = Path("/proc/net/dev").read_text() if table is None else table
    sent = received = 0
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            fields = numbers.split()
            received, sent = received + int(fields[0]), sent + int(fields[8])
    return Counters(sent, received)


def wire_bytes(rounds: list[Round], size: int) -> float:
    """Payload bytes that a rank must send on average, all ranks alike.

    An allgather sends every message to P - 1 others, as often as that; an allreduce moves
    ``2 (P - 1) / P`` of its buffer (no algorithm moves less; ring and Rabenseifner's move as much);
    a broadcast reaches P - 1 ranks; messages between pairs go once.

    Args:
        rounds: of a step, with the mean payload of all ranks.
        size: P.

    Example:
        >>> wire_bytes([Round("AllReduce", 800), Round("AllGather", 100)], size=4)
        1500.0
    """
    share = (size - 1) / size
    factors = {"AllGather": size - 1, "AllReduce": 2 * share, "Broadcast": size - 1}
    return math.fsum(factors.get(item.kind, 1) * item.payload for item in rounds)


def rounds_of(part: Any) -> list[Round]:
    """The collectives of a bucket's last step.

    Args:
        part: a `Part` whose step is done. With two levels only what goes to other hosts counts, by
            as much as fewer ranks get it.
    """
    bucket = part.bucket
    rounds = list(map(Round, bucket.last.kinds_by_round, bucket.last.bytes_by_round))
    topology = getattr(bucket, "topology", None)
    if topology is None:
        return rounds
    among, of_all = topology.num_hosts, topology.size
    return [
        Round(item.kind, round(item.payload * wire_bytes([item], among) / wire_bytes([item], of_all)))
        for item in rounds[1:-1]
    ]
