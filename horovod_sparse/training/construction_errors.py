"""Errors of one rank while it makes its optimizer or tape, told to those that wait for it in the first step.

Making an optimizer is no collective, so a rank that cannot (a misspelt argument, on one rank alone) would
leave the others waiting until their deadline. It puts its error into the launcher's store, and ranks that
have waited for a moment look there. A collective would not do: one that not all ranks join is a stall.

An error is taken out again when the rank has made what it wanted after all, or begins to agree with the
others; and who has read one waits a little more.
"""

from __future__ import annotations

import atexit
import functools
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from horovod_sparse.carriers.choice import check_transport
from horovod_sparse.errors import HorovodSparseError
from horovod_sparse.training.collective_errors import error_of_rank
from horovod_sparse.training.deadline import asked_store

Function = TypeVar("Function", bound=Callable[..., Any])

_SCOPE = "horovod_sparse.building"
#: waiting shorter than this asks nobody; how often then; and how long an error that was read may be got over
_PATIENCE_SECONDS, _PAUSE_SECONDS, _GRACE_SECONDS = 1.0, 0.5, 2.0
#: the process of an error that others have not read yet ends so much later
_END_SECONDS = 5.0


class ConstructionErrors:
    """What one binding of Horovod tells and hears of errors while building."""

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        #: this rank and the others, whom it has told of an error that stands
        self._told: tuple[int, list[int]] | None = None
        self._waits_at_end = False

    def _ranks(self, process_set: Any) -> tuple[int, list[int]] | None:
        """This rank and all of a process set, as Horovod counts them in the world; None outside of it."""
        if not self._hvd.is_initialized():
            return None
        chosen = process_set
        if getattr(process_set, "process_set_id", None) is None:  # none, or what is none
            chosen = self._hvd.global_process_set
        own, ranks = int(self._hvd.rank()), list(chosen.ranks or ())
        return (own, ranks) if own in ranks else None

    def tell(self, error: Exception, process_set: Any) -> None:
        """Lets the others know, where there are others; waits for none of them."""
        found = self._ranks(process_set)
        if found is None or len(found[1]) == 1:
            return
        _put(str(found[0]), [type(error).__name__, str(error)])
        self._told = found
        if not self._waits_at_end:
            self._waits_at_end = True
            atexit.register(self._end)

    def got_over(self) -> None:
        """What was told of this rank is no more."""
        if self._told is not None:
            _put(str(self._told[0]), None)
            self._told = None

    def looking(self, process_set: Any) -> Callable[[], None]:
        """What is to be called again and again while this rank waits for all others to agree with it."""
        self.got_over()
        found = self._ranks(process_set)
        next_look = time.monotonic() + _PATIENCE_SECONDS
        read: dict[int, tuple[float, HorovodSparseError]] = {}

        def look() -> None:
            nonlocal next_look
            now = time.monotonic()
            if found is None or now < next_look:
                return
            next_look = now + _PAUSE_SECONDS
            for number, other in enumerate(found[1]):
                told = _get(str(other)) if other != found[0] else None
                if told is None:
                    read.pop(other, None)
                    continue
                since, error = read.setdefault(other, (now, error_of_rank(number, *told)))
                if now - since > _GRACE_SECONDS:
                    _put(f"{other}.{found[0]}", True)
                    raise error

        return look

    def telling(self, function: Function, *, is_last: bool = True) -> Function:
        """Has a function that makes something tell the others of its errors."""

        @functools.wraps(function)
        def told(*arguments: Any, **named: Any) -> Any:
            try:
                # a rank that found out in its first step would leave the others waiting
                check_transport(self._hvd)
                made = function(*arguments, **named)
            except Exception as error:
                self.tell(error, named.get("process_set"))
                raise
            if is_last:
                self.got_over()
            return made

        return told  # type: ignore[return-value]

    def _end(self) -> None:
        """Before the process ends: who waits is to read of the error, and not that this rank has gone."""
        end = time.monotonic() + _END_SECONDS
        if self._told is None:
            return
        own, ranks = self._told
        missing = [rank for rank in ranks if rank != own]
        while missing and time.monotonic() < end:
            # others have the same error, or have read of it
            missing = [rank for rank in missing if _get(str(rank)) is None and _get(f"{own}.{rank}") is None]
            time.sleep(0.1)


def _put(key: str, value: Any) -> None:
    asked_store(_SCOPE, key, json.dumps(value).encode())


def _get(key: str) -> Any:
    found = asked_store(_SCOPE, key)
    return None if found is None else json.loads(found)
