"""Messages between two ranks: beside Horovod where all ranks can, through its all-to-all otherwise.

Horovod has no send and receive. An all-to-all in which most messages are empty does the same and works
everywhere, but every round of it takes a cycle of Horovod (1 ms by default); messages of MPI take
microseconds. The ranks agree on it once per process set (`carriers/pairs.py`), by collectives that
nobody waits for: exchanges that are started meanwhile begin when it is known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from horovod_sparse.carriers.exchanges import Rounds, by_exchanges
from horovod_sparse.carriers.pairs import Blocking, TransportChoice, agreed_transport
from horovod_sparse.collectives import Exchange, Request
from horovod_sparse.tensors.driver import Handle
from horovod_sparse.torch._horovod import hvd, present_start

__all__ = ["chosen_transport", "forget_transports", "start_round", "transport_words"]

_SLEEP_SECONDS = 20e-6


#: starts a request under a name with Horovod's own collectives
Start = Callable[[Any, str, Any], Handle]
_Key: TypeAlias = tuple[int | None, tuple[int, ...]]


class _PendingAgreement:
    """The agreement of a process set's ranks under way; `number` tells it from those before it."""

    def __init__(self, process_set: Any, number: int, by_horovod: Start) -> None:
        self.start = present_start()
        self.chosen: TransportChoice | None = None
        #: of the agreement: Horovod gives what ranks have said once
        self.failure: Exception | None = None
        self._process_set, self._by_horovod = process_set, by_horovod
        self._name = f"horovod_sparse.transport.{process_set.process_set_id}.{number}"
        self._steps = agreed_transport(hvd, process_set, number)
        self._round, self._lost = 0, False
        self._under_way = self._start(next(self._steps))

    def _start(self, request: Request | Blocking) -> Handle:
        self._round += 1
        if isinstance(request, Blocking):
            return _Thread(request)
        return self._by_horovod(request, f"{self._name}.{self._round}", self._process_set)

    def is_known(self) -> bool:
        """Whether Horovod is still the one that the ranks agreed through."""
        return not self._lost and present_start() is self.start

    def agreed(self) -> bool:
        """Whether all ranks have said what they can."""
        return self._round > 1 or self.chosen is not None or bool(self._under_way.done())

    def decided(self) -> bool:
        """Whether it is known how messages travel, or never will be (`failure`); asks without waiting."""
        try:
            while self.chosen is None and self.failure is None:
                done = self._under_way.done()
                self._lost = done is None
                if not done:
                    return False
                self._under_way = self._start(self._steps.send(self._under_way.result()))
        except StopIteration as stop:
            self.chosen = stop.value
        except ValueError:  # Horovod was shut down
            self._lost = True
            return False
        except Exception as error:
            self.failure = error
        return True


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


def _chosen(process_set: Any) -> TransportChoice | None:
    agreement = _agreements.get(_key(process_set))
    return agreement.chosen if agreement is not None and agreement.is_known() else None


def chosen_transport(process_set: Any = hvd.global_process_set) -> str:
    """How messages between two ranks travel: "mpi", "alltoall", or "undecided" before the first of them."""
    chosen = _chosen(process_set)
    return "undecided" if chosen is None else chosen.name


def transport_words(process_set: Any = hvd.global_process_set) -> str:
    """How messages between two ranks of a process set travel, and why so; empty before it is decided."""
    chosen = _chosen(process_set)
    return "" if chosen is None else chosen.words


def forget_transports(process_set: Any) -> None:
    """Gives up the communicator of a process set, and with it every message under way.

    After a failure ranks may have stopped in different rounds; what they had sent must not be taken for
    messages of a new start. All ranks do it, or none; the next exchange agrees anew. An agreement that is not
    reached yet is kept: no message has been sent, and ranks that come later answer to it.
    """
    agreement = _agreements.get(_key(process_set))
    if agreement is not None and (not agreement.is_known() or agreement.agreed()):
        del _agreements[_key(process_set)]


class _RoundHandle:
    """A round that begins when it is known how."""

    def __init__(self, request: Request, name: str, process_set: Any, by_horovod: Start) -> None:
        self._agreement = _agreement_of(process_set, by_horovod)
        self._begin = (request, name, process_set)
        self._by_horovod = by_horovod
        self._inner: Handle | None = None
        #: raised by `result`: hooks of a backward pass ask only whether it is done
        self._error: Exception | None = None
        self._try()

    def _try(self) -> None:
        if self._inner is not None or self._error is not None or not self._agreement.decided():
            return
        try:
            self._inner = self._begun()
        except Exception as error:
            self._error = error

    def _begun(self) -> Handle:
        if self._agreement.failure is not None:
            raise self._agreement.failure
        assert self._agreement.chosen is not None
        pairs, (request, name, process_set) = self._agreement.chosen.pairs, self._begin
        if pairs is None:
            return self._by_horovod(request, name, process_set)
        if isinstance(request, Exchange):
            return pairs.start(request, name, process_set.rank())
        rank, size = process_set.rank(), process_set.size()
        return Rounds(partial(pairs.start, rank=rank), by_exchanges(request, rank, size), name)

    def done(self) -> bool | None:
        if self._agreement.is_known():
            self._try()
        if not self._agreement.is_known():
            return None
        if self._error is not None or self._inner is None:
            return self._error is not None
        return self._inner.done()

    def result(self) -> Any:
        while self.done() is False:
            time.sleep(_SLEEP_SECONDS)
        if self._error is not None:
            raise self._error
        return self._inner.result() if self._inner is not None else {}


def start_round(request: Request, name: str, process_set: Any, by_horovod: Start) -> Handle:
    """Starts messages between pairs of ranks, or a collective made of them, and returns without waiting.

    Ranks in the request count within the process set, which has two or more. The name is the same on all
    ranks, and no other exchange in flight has it.
    """
    return _RoundHandle(request, name, process_set, by_horovod)
