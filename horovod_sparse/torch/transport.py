"""Messages between two ranks: beside Horovod where all ranks can, through its all-to-all otherwise.

Horovod has no send and receive. An all-to-all in which most messages are empty does the same and works
everywhere, but every round of it takes a cycle of Horovod (1 ms by default); messages of MPI or ZeroMQ take
microseconds. Which of these it is has to be the same on all ranks, so they agree on it, once per
process set, by two allgathers that nobody waits for: exchanges that are started meanwhile begin when it is
known.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from horovod_sparse.collectives import Exchange, Request
from horovod_sparse.frontend.messages import Pairs, carrier_for, log_transport
from horovod_sparse.frontend.transport import Rounds
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.handles import finished, held_besides, present_start

__all__ = ["chosen_transport", "forget_transports", "start_round", "transport_words"]

_SLEEP_SECONDS = 20e-6


class _Handle(Protocol):
    def is_known(self) -> bool: ...
    def done(self) -> bool: ...
    def result(self) -> Any: ...


Start = Callable[[Any, str, Any], _Handle]
_Key: TypeAlias = tuple[int | None, tuple[int, ...]]


class _Choice:
    """The agreement of a process set's ranks: what all can use, and then whether all have reached all.

    Args:
        process_set: the ranks.
        number: how many agreements there were before; the same on all ranks.
    """

    def __init__(self, process_set: Any, number: int) -> None:
        self.start = present_start()
        self.name, self.words = "undecided", ""
        self.pairs: Pairs | None = None
        #: of the agreement: Horovod gives what ranks have said once
        self.failure: Exception | None = None
        self._process_set, self._number = process_set, number
        self._carrier, reason = carrier_for(hvd, process_set.size())
        offer = None if self._carrier is None else self._carrier.offer()
        try:
            self._told = self._tell("able", [reason, offer])
        except BaseException:
            self.give_up()
            raise
        self._connecting: threading.Thread | None = None
        self._made: Pairs | None = None
        self._failure = ""
        self._connected: _Told | None = None

    def _tell(self, name: str, value: Any) -> _Told:
        process_set = self._process_set
        return _Told(
            f"horovod_sparse.transport.{process_set.process_set_id}.{self._number}.{name}", value, process_set
        )

    def is_known(self) -> bool:
        """Whether Horovod is still the one that the ranks agreed through."""
        return present_start() is self.start

    def agreed(self) -> bool:
        """Whether all ranks have said what they can."""
        known = self.name != "undecided" or self.failure is not None or self._connecting is not None
        return known or self._told.is_there()

    def decided(self) -> bool:
        """Whether it is known how messages travel, or never will be (`failure`); asks without waiting.

        Raises:
            ValueError: if Horovod was shut down, as its handles do.
        """
        try:
            return self.failure is not None or self._decided()
        except ValueError:
            raise
        except Exception as error:
            self.failure = error
            return True

    def _decided(self) -> bool:
        if self.name != "undecided":
            return True
        if self._connecting is None:
            if not self._told.is_there():
                return False
            answers = self._told.by_rank()
            if refused := self._first_reason(reason if offer is None else "" for reason, offer in answers):
                self._settle(None, refused)
                return True
            # connecting waits for the others, which a hook must not
            work = partial(self._connect, [offer for _, offer in answers])
            self._connecting = threading.Thread(target=work, name="horovod_sparse.transport", daemon=True)
            self._connecting.start()
        if self._connecting.is_alive():
            return False
        if self._connected is None:
            self._connected = self._tell("connected", self._failure)
        if not self._connected.is_there():
            return False
        failed = self._first_reason(self._connected.by_rank())
        self._settle(None if failed else self._made, failed, tried=True)
        return True

    def _first_reason(self, reasons: Iterable[str]) -> str:
        """This rank's own, if it has one, or that of the first that has; empty if none has."""
        told = dict(enumerate(reasons))
        own = told.get(self._process_set.rank())
        return own or next((f"rank {rank}: {reason}" for rank, reason in told.items() if reason), "")

    def _connect(self, offers: list[Any]) -> None:
        assert self._carrier is not None
        try:
            self._made = self._carrier.connect(offers, self._process_set.ranks, self._number)
        except BaseException as error:  # told to all ranks, which then do without
            self._failure = f"{type(error).__name__}: {error}"

    def _settle(self, pairs: Pairs | None, reason: str, *, tried: bool = False) -> None:
        self.pairs = pairs
        if pairs is None:
            self.give_up()
            self.name, self.words = "alltoall", f"Horovod's all-to-all ({reason})"
        else:
            assert self._carrier is not None
            self.name, self.words = self._carrier.name, self._carrier.words
        rank = int(self._process_set.rank())
        log_transport(self.words, rank, beside=pairs is not None, failed=tried and pairs is None)

    def give_up(self) -> None:
        """Lets go of what carries messages, and of all that are under way."""
        if self._carrier is not None:
            self._carrier.forget()


class _Told:
    """What every rank says, under way."""

    def __init__(self, name: str, value: Any, process_set: Any) -> None:
        line = torch.frombuffer(bytearray(json.dumps(value).encode() + b"\n"), dtype=torch.uint8)
        self._handle = held_besides(hvd.allgather_async(line, name=name, process_set=process_set))

    def is_there(self) -> bool:
        return bool(hvd.poll(self._handle))

    def by_rank(self) -> list[Any]:
        return [json.loads(line) for line in finished(self._handle).numpy().tobytes().splitlines()]


#: by number and ranks: Horovod gives the number of a process set that was removed to the next one
_choices: dict[_Key, _Choice] = {}
#: how many choices there were for a process set, under which of Horovod's starts
_numbers: dict[_Key, tuple[Any, int]] = {}


def _key(process_set: Any) -> _Key:
    return process_set.process_set_id, tuple(process_set.ranks or ())


def _choice_of(process_set: Any) -> _Choice:
    key, start = _key(process_set), present_start()
    if key not in _choices or not _choices[key].is_known():
        # those of process sets that there are no more have open sockets, too
        for former in [one for one, choice in _choices.items() if not choice.is_known()]:
            _choices.pop(former).give_up()
        since, number = _numbers.get(key, (start, 0))
        if since is not start:  # Horovod was started anew: all ranks count from 0 again
            number = 0
        _numbers[key] = start, number + 1
        _choices[key] = _Choice(process_set, number)
    return _choices[key]


def chosen_transport(process_set: Any = hvd.global_process_set) -> str:
    """How messages between two ranks of a process set travel.

    Returns:
        "mpi", "alltoall", or "undecided" before the first of them.
    """
    choice = _choices.get(_key(process_set))
    return choice.name if choice is not None and choice.is_known() else "undecided"


def transport_words(process_set: Any = hvd.global_process_set) -> str:
    """How messages between two ranks of a process set travel, and why so; empty before it is decided."""
    choice = _choices.get(_key(process_set))
    return choice.words if choice is not None and choice.is_known() else ""


def forget_transports(process_set: Any) -> None:
    """Gives up the communicator of a process set, and with it every message under way.

    After a failure ranks may have stopped in different rounds; what they had sent must not be taken for
    messages of a new start. All ranks do it, or none; the next exchange agrees anew. An agreement that
    is not reached yet is kept: no message has been sent, and ranks that come later answer to it.
    """
    choice = _choices.get(_key(process_set))
    if choice is not None and (not choice.is_known() or choice.agreed()):
        _choices.pop(_key(process_set)).give_up()


class _RoundHandle:
    """A round that begins when it is known how."""

    def __init__(self, request: Request, name: str, process_set: Any, by_horovod: Start) -> None:
        self._choice = _choice_of(process_set)
        self._begin = (request, name, process_set)
        self._by_horovod = by_horovod
        self._inner: _Handle | None = None
        #: raised by `result`: hooks of a backward pass ask only whether it is done
        self._error: Exception | None = None
        self._try()

    def _try(self) -> None:
        if self._inner is not None or self._error is not None or not self._choice.decided():
            return
        try:
            self._inner = self._begun()
        except Exception as error:
            self._error = error

    def _begun(self) -> _Handle:
        if self._choice.failure is not None:
            raise self._choice.failure
        pairs, (request, name, process_set) = self._choice.pairs, self._begin
        if pairs is None:
            return self._by_horovod(request, name, process_set)
        if isinstance(request, Exchange):
            return pairs.start(request, name, process_set.rank())
        rank, size = process_set.rank(), process_set.size()
        return Rounds(partial(pairs.start, rank=rank), request, name, rank, size)

    def is_known(self) -> bool:
        return self._choice.is_known() and (self._inner is None or self._inner.is_known())

    def done(self) -> bool:
        self._try()
        return self._error is not None or (self._inner is not None and self._inner.done())

    def result(self) -> Any:
        while not self.done():
            time.sleep(_SLEEP_SECONDS)
        if self._error is not None:
            raise self._error
        return self._inner.result() if self._inner is not None else {}


def start_round(request: Request, name: str, process_set: Any, by_horovod: Start) -> _Handle:
    """Starts messages between pairs of ranks, or a collective made of them, and returns without waiting.

    Args:
        request: which. Ranks count within the process set.
        name: the same on all ranks; no other exchange in flight has it.
        process_set: who takes part, two ranks or more.
        by_horovod: starts it with Horovod's own collectives.

    Returns:
        A handle, as `horovod_sparse.pytorch.driver.Handle` says.
    """
    return _RoundHandle(request, name, process_set, by_horovod)
