"""Bytes on the wire: what the collectives of a step must move, and what an interface has counted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_sparse.simulation import share_of_bytes


@dataclass(frozen=True)
class Round:
    """One collective.

    Attributes:
        kind: name of the request's class, such as "AllGather".
        payload: bytes that this rank puts in.
    """

    kind: str
    payload: int


def bytes_sent(table: str | None = None) -> int:
    r"""Counts what all interfaces but the loopback of this process's network namespace ever sent.

    Args:
        table: in the form of /proc/net/dev, which is read if left out.

    Example:
        >>> lines = ["", "", "    lo: 7 0 0 0 0 0 0 0 7 0", "  eth0: 9 1 0 0 0 0 0 0 5 1"]
        >>> bytes_sent("\n".join(lines))
        5
    """
    text = Path("/proc/net/dev").read_text() if table is None else table
    lines = (line.partition(":") for line in text.splitlines()[2:])
    return sum(int(numbers.split()[8]) for name, _, numbers in lines if name.strip() != "lo")


def wire_bytes(rounds: list[Round], size: int) -> float:
    """Payload bytes that a rank must send on average, all ranks alike.

    As many as arrive at one, and of a broadcast P - 1 messages.

    Args:
        rounds: of a step, with the mean payload of all ranks.
        size: P.

    Example:
        >>> wire_bytes([Round("AllReduce", 800), Round("AllGather", 100)], size=4)
        1500.0
    """
    return math.fsum(
        item.payload * (size - 1 if item.kind == "Broadcast" else share_of_bytes(item.kind.lower(), size))
        for item in rounds
    )


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
