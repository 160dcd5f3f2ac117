"""Messages between two ranks: beside Horovod where all ranks can, through its all-to-all otherwise.

Horovod has no send and receive. An all-to-all in which most messages are empty does the same and works
everywhere, but every round of it takes a cycle of Horovod (1 ms by default); messages of MPI take
microseconds. The ranks agree on it once per process set (`carriers/pairs.py`), by collectives that
nobody waits for: exchanges that are started meanwhile begin when it is known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from horovod_sparse.carriers.exchanges import Handle, Rounds, by_exchanges
from horovod_sparse.carriers.pairs import Blocking, TransportChoice, agreed_transport
from horovod_sparse.collectives import Request
from horovod_sparse.torch._horovod import hvd, present_start

#: starts a request under a name with Horovod's own collectives
Start = Callable[[Any, str, Any], Handle]
_Key: TypeAlias = tuple[int | None, tuple[int, ...]]


class _PendingAgreement(Rounds):
    """The agreement of a process set's ranks under way; `number` tells it from those before it."""

    def __init__(self, process_set: Any, number: int, by_horovod: Start) -> None:
        def begin(request: Request | Blocking, name: str) -> Any:
            if isinstance(request, Blocking):
                return _Thread(request)
            return by_horovod(request, name, process_set)

        self._since, steps = present_start(), agreed_transport(hvd, process_set, number)
        super().__init__(begin, steps, f"horovod_sparse.transport.{process_set.process_set_id}.{number}")

    def done(self) -> bool | None:
        done = super().done()
        return None if isinstance(self._error, ValueError) else done  # Horovod was shut down

    @property
    def chosen(self) -> TransportChoice | None:
        """What ranks have agreed upon, as far as it is known."""
        chosen: TransportChoice | None = self._answer if self.done() else None
        return chosen

    def is_known(self) -> bool:
        """Whether Horovod is still the one that the ranks agree through."""
        return present_start() is self._since and self.done() is not None

    def agreed(self) -> bool:
        """Whether all ranks have said what they can."""
        return self._number > 1 or self._ended or (self._inner is not None and bool(self._inner.done()))


class _Thread:
    """Work under way that waits for other ranks, which a hook must not."""

    def __init__(self, request: Blocking) -> None:
        self._thread = threading.Thread(target=self._run, name="horovod_sparse.transport", daemon=True)
        self._work, self._answer = request.work, None
        self._thread.start()

    def _run(self) -> None:
        self._answer = self._work()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join()
        return self._answer


#: by number and ranks: Horovod gives the number of a process set that was removed to the next one
_agreements: dict[_Key, _PendingAgreement] = {}
#: how many choices there were for a process set, under which of Horovod's starts
_numbers: dict[_Key, tuple[Any, int]] = {}


def _key(process_set: Any) -> _Key:
    return process_set.process_set_id, tuple(process_set.ranks or ())


def _agreement_of(process_set: Any, by_horovod: Start) -> _PendingAgreement:
    key, start = _key(process_set), present_start()
    if key not in _agreements or not _agreements[key].is_known():
        for former in [one for one, agreement in _agreements.items() if not agreement.is_known()]:
            del _agreements[former]
        since, number = _numbers.get(key, (start, 0))
        if since is not start:  # Horovod was started anew: all ranks count from 0 again
            number = 0
        _numbers[key] = start, number + 1
        _agreements[key] = _PendingAgreement(process_set, number, by_horovod)
    return _agreements[key]


def transport_words(process_set: Any = hvd.global_process_set) -> str:
    """How messages between two ranks of a process set travel, and why so; empty before it is decided."""
    agreement = _agreements.get(_key(process_set))
    chosen = agreement.chosen if agreement is not None and agreement.is_known() else None
    return "" if chosen is None else chosen.words


def forget_transports(process_set: Any) -> None:
    """Gives up the communicator of a process set, and with it every message under way; all ranks do, or none.

    After a failure ranks may have stopped in different rounds. The next exchange agrees anew. An agreement
    that is not reached yet is kept: ranks that come later answer to it.
    """
    agreement = _agreements.get(_key(process_set))
    if agreement is not None and (not agreement.is_known() or agreement.agreed()):
        del _agreements[_key(process_set)]


class _Round(Rounds):
    """A round that begins when it is known how."""

    def __init__(self, request: Request, name: str, process_set: Any, by_horovod: Start) -> None:
        self._agreement: Any = _agreement_of(process_set, by_horovod)
        rank, size = process_set.rank(), process_set.size()

        def begin(item: Any, numbered: str) -> Any:
            if item is self._agreement:
                return item
            pairs = self._agreement.chosen.pairs
            return by_horovod(item, name, process_set) if pairs is None else pairs.start(item, numbered, rank)

        super().__init__(begin, self._steps_of(request, rank, size), name)

    def _steps_of(self, request: Request, rank: int, size: int) -> Generator[Any, Any, Any]:
        chosen = yield self._agreement
        if chosen.pairs is None:
            return (yield request)
        return (yield from by_exchanges(request, rank, size))

    def done(self) -> bool | None:
        return super().done() if self._agreement.is_known() else None


def start_round(request: Request, name: str, process_set: Any, by_horovod: Start) -> Handle:
    """Starts messages between pairs, or a collective of them; on all ranks under a name of their own."""
    return _Round(request, name, process_set, by_horovod)
