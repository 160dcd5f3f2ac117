"""Messages between two ranks beside Horovod, which has none: over MPI, or ZeroMQ where it runs on Gloo."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from horovod_sparse.errors import UnknownNameError
from horovod_sparse.frontend.messages.mpi import MpiPairs, mpi_carrier
from horovod_sparse.frontend.messages.pairs import Pairs
from horovod_sparse.frontend.messages.zeromq import ZmqPairs, zmq_carrier

__all__ = [
    "TRANSPORT_VARIABLE",
    "WAYS",
    "Carrier",
    "MpiPairs",
    "Pairs",
    "ZmqPairs",
    "carrier_for",
    "log_transport",
    "rounds_by_pairs",
    "transport_asked",
]

#: "auto": messages between pairs over MPI, where there is MPI; "alltoall": over Horovod's all-to-all;
#: "pairs": all rounds of sparsifiers are such messages, over MPI or ZeroMQ, where all ranks can. The same on
#: all ranks.
TRANSPORT_VARIABLE = "HOROVOD_SPARSE_TRANSPORT"
WAYS = ("auto", "alltoall", "pairs")

_log = logging.getLogger("horovod_sparse")
#: what was warned of
_warned: set[str] = set()


class Carrier(Protocol):
    """What can carry messages between ranks, before they have agreed to use it.

    Attributes:
        name: of it, in one word.
        words: what a user is told of it.
    """

    name: str
    words: str

    def offer(self) -> dict[str, Any]:
        """What the others have to know of this rank: plain values."""

    def connect(self, offers: Sequence[Mapping[str, Any]], ranks: Sequence[int], number: int) -> Pairs:
        """Connects to the others; may wait for them.

        Args:
            offers: of all ranks, in their order.
            ranks: of the process set, in the world.
            number: how many agreements there were before; the same on all ranks.

        Raises:
            Exception: if it cannot.
        """

    def forget(self) -> None:
        """Gives up all that is under way, on all ranks or none."""


def transport_asked() -> str:
    """What the environment asks for, one of `WAYS`.

    Raises:
        UnknownNameError: if it is none of them.
    """
    wanted = os.environ.get(TRANSPORT_VARIABLE, "").strip() or "auto"
    if wanted not in WAYS:
        raise UnknownNameError(TRANSPORT_VARIABLE, wanted, WAYS)
    return wanted


def rounds_by_pairs() -> bool:
    """Whether all rounds of sparsifiers are to travel as messages between pairs of ranks."""
    return transport_asked() == "pairs"


def carrier_for(hvd: Any, size: int) -> tuple[Carrier | None, str]:
    """What this rank can use beside Horovod.

    Args:
        hvd: Horovod's binding for a framework.
        size: number of ranks that are to be connected.

    Returns:
        It, or None and why there is none.

    Raises:
        UnknownNameError: if the environment asks for something else than there is.
    """
    wanted = transport_asked()
    if wanted == "alltoall":
        return None, f"{TRANSPORT_VARIABLE} says so"
    if hvd.mpi_enabled():
        return mpi_carrier(hvd)
    if wanted == "auto":
        return None, "Horovod does not run on MPI"
    return zmq_carrier(size)


def log_transport(words: str, rank: int, *, beside: bool, failed: bool = False) -> None:
    """Says how messages between two ranks travel.

    A warning where that is not what was asked for: of the first rank alone, and once in a process.

    Args:
        words: how, and why so.
        rank: of this process among those that agreed.
        beside: whether it is beside Horovod.
        failed: whether that was tried in vain.
    """
    refused = not beside and (failed or rounds_by_pairs())
    if refused and rank == 0 and words not in _warned:
        _warned.add(words)
        _log.warning("rounds go through %s, though %s=%s", words, TRANSPORT_VARIABLE, transport_asked())
    else:
        _log.info("messages between two ranks go through %s", words)
