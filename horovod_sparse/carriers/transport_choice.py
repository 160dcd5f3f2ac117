"""Which way messages between two ranks go: over MPI beside Horovod, or through its all-to-all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from horovod_sparse.collectives import Request, shared_lines
from horovod_sparse.errors import UnknownNameError, UnsupportedError

if TYPE_CHECKING:
    from horovod_sparse.carriers.pairs import MpiPairs

#: "auto": messages between pairs over MPI, where there is MPI; "alltoall": over Horovod's all-to-all;
#: "pairs": all rounds of sparsifiers are such messages over MPI. The same on all ranks.
TRANSPORT_VARIABLE = "HOROVOD_SPARSE_TRANSPORT"
WAYS = ("auto", "alltoall", "pairs")

_log = logging.getLogger("horovod_sparse")
#: what was warned of
_warned: set[str] = set()


def transport_asked() -> str:
    """What the environment asks for, one of `WAYS`."""
    wanted = os.environ.get(TRANSPORT_VARIABLE, "").strip() or "auto"
    if wanted not in WAYS:
        raise UnknownNameError(TRANSPORT_VARIABLE, wanted, WAYS)
    return wanted


def rounds_by_pairs() -> bool:
    """Whether all rounds of sparsifiers are to travel as messages between pairs of ranks."""
    return transport_asked() == "pairs"


def check_transport(hvd: Any) -> None:
    """Refuses what the environment asks for, where this launch cannot do it; `hvd` is Horovod's binding."""
    if rounds_by_pairs() and hvd.is_initialized() and not hvd.mpi_enabled():
        raise UnsupportedError(
            f"{TRANSPORT_VARIABLE}=pairs needs Horovod on MPI, and it runs on Gloo here: messages between "
            "pairs of ranks go over MPI alone. Unset it, or launch with horovodrun --mpi"
        )


def usable_mpi(hvd: Any) -> tuple[Any, str]:
    """mpi4py's MPI, if this rank can use it beside Horovod; or None and why it cannot."""
    check_transport(hvd)
    if transport_asked() == "alltoall":
        return None, f"{TRANSPORT_VARIABLE} says so"
    if not hvd.mpi_enabled():
        return None, "Horovod does not run on MPI"
    from horovod_sparse.carriers.pairs import mpi_or_reason

    return mpi_or_reason(hvd)


@dataclass(frozen=True)
class Blocking:
    """Work that waits for other ranks: a hook of a backward pass must not do it itself."""

    work: Callable[[], Any]


@dataclass(frozen=True)
class TransportChoice:
    """How messages between two ranks travel: what carries them, None for Horovod; in one word, and why so."""

    pairs: MpiPairs | None
    name: str
    words: str


#: yields requests, and work that blocks
Agreement: TypeAlias = Generator[Request | Blocking, Any, TransportChoice]


def agreed_transport(hvd: Any, process_set: Any, number: int) -> Agreement:
    """What all ranks of a process set can use, and then whether all have reached all: two allgathers.

    `number` tells this agreement from those before it, and is the same on all ranks.
    """
    mpi, reason = usable_mpi(hvd)
    rank = int(process_set.rank())
    if refused := _first_reason((yield from shared_lines(reason)), rank):
        return by_horovod(refused, rank)
    pairs, failure = yield Blocking(lambda: _connected(mpi, process_set.ranks, number))
    if refused := _first_reason((yield from shared_lines(failure)), rank):
        return by_horovod(refused, rank, failed=True)
    chosen = TransportChoice(pairs, "mpi", "MPI, on a communicator of their own (every rank can)")
    _log.info("messages between two ranks go through %s", chosen.words)
    return chosen


def by_horovod(reason: str, rank: int, *, failed: bool = False) -> TransportChoice:
    """Horovod's all-to-all, and why so.

    A warning where it is not what was asked for, or another way was tried in vain: on one rank, and once.
    """
    words = f"Horovod's all-to-all ({reason})"
    if (failed or rounds_by_pairs()) and rank == 0 and words not in _warned:
        _warned.add(words)
        _log.warning("rounds go through %s, though %s=%s", words, TRANSPORT_VARIABLE, transport_asked())
    else:
        _log.info("messages between two ranks go through %s", words)
    return TransportChoice(None, "alltoall", words)


def _first_reason(reasons: list[str], rank: int) -> str:
    """This rank's own, if it has one, or that of the first that has; empty if none has."""
    others = (f"rank {other}: {reason}" for other, reason in enumerate(reasons) if reason)
    return reasons[rank] or next(others, "")


def _connected(mpi: Any, ranks: list[int], number: int) -> tuple[MpiPairs | None, str]:
    """A communicator of these ranks, or None and why there is none."""
    from horovod_sparse.carriers.pairs import MpiPairs

    try:
        return MpiPairs(mpi, ranks, tag=number), ""
    except Exception as error:  # told to all ranks, which then do without
        return None, f"{type(error).__name__}: {error}"
