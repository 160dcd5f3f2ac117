"""Deadlines: a rank that waits too long for the others raises an error that names who is missing."""

from __future__ import annotations

import contextlib
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, TypeAlias

from horovod_sparse import checks
from horovod_sparse.errors import DeadlineError

#: environment variable: seconds; 0 for no deadline
DEADLINE_VARIABLE = "HOROVOD_SPARSE_DEADLINE_SECONDS"
_SECONDS = 300.0
#: seconds between two checks; a longer gap means that this process was suspended, and does not count
_LOOK_SECONDS = 2.0
#: seconds by which Horovod's own stall limit is later, since our error says more
_LATER_SECONDS = 30

_STALL_VARIABLE = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_SCOPE = "horovod_sparse.waiting"
_ANSWER_SECONDS = 2.0
#: writes a value under scope and key, or reads it; None if there is no value or no store
Store: TypeAlias = Callable[..., "bytes | None"]
#: opens the store's address without a proxy, as Horovod's own threads do
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def deadline_of(given: float | None = None) -> float:
    """Returns the deadline in seconds: the argument, else the environment's, else 300; inf if it is 0."""
    value: Any = given
    name = "deadline_seconds"
    if value is None:
        name, text = DEADLINE_VARIABLE, os.environ.get(DEADLINE_VARIABLE, "").strip()
        try:
            value = float(text) if text else _SECONDS
        except ValueError:
            value = text
    allowed = "a number of seconds, or 0 to wait for ever"
    checks.check_seconds(name, value, allowed)
    return float(value) or math.inf


def set_horovod_stall_limit() -> None:
    """Sets Horovod's environment so that it ends all ranks when a collective stalls; before `init`.

    It keeps the user's own setting. Horovod 0.28.1 does so on MPI alone; on Gloo it waits for ever.
    """
    if math.isfinite(seconds := deadline_of()):
        os.environ.setdefault(_STALL_VARIABLE, str(math.ceil(seconds) + _LATER_SECONDS))


class Deadline:
    """Raises `DeadlineError` once a collective has waited longer than `deadline_seconds`.

    A rank that waits for long writes to the launcher's store what it waits for, so that errors can name the
    ranks that do not wait. Time in which this process was stopped (Ctrl-Z) does not count.
    """

    def __init__(
        self, given: float | None, place: Callable[[], tuple[int, list[int]]], store: Store | None = None
    ) -> None:
        self.seconds, self._place, self._store = deadline_of(given), place, store or launcher_store
        self._told = ""
        #: seconds waited at the last check, and for how many of these the process was suspended
        self._looked = self._stopped = 0.0

    def check(self, waited: float, name: str, number: int) -> None:
        """Raises if `waited` seconds exceed the deadline; called repeatedly during a wait."""
        if waited < self._looked:  # another wait
            self._stopped = 0.0
        else:
            self._stopped += max(0.0, waited - self._looked - _LOOK_SECONDS)
        self._looked = waited
        waited -= self._stopped
        if waited < self.seconds / 2:
            return
        what = f"{name} {number}"
        if self._told != what:
            self._told = what
            self._publish_wait(what)
        if waited >= self.seconds:
            raise DeadlineError(name, number, self.seconds, self._ranks_not_waiting(what))

    def saw_progress(self) -> None:
        self._looked = self._stopped = 0.0
        if self._told:
            self._told = ""
            self._publish_wait("")

    def _publish_wait(self, what: str) -> None:
        rank, ranks = self._place()
        self._store(_SCOPE, str(ranks[rank]), json.dumps(what).encode())

    def _ranks_not_waiting(self, what: str) -> dict[int, str] | None:
        """Returns {rank: what it waits for} of ranks that do not wait for `what`; None without a store."""
        rank, ranks = self._place()
        missing = {}
        for number, key in enumerate(ranks):
            found = self._store(_SCOPE, str(key))
            if number == rank and found is None:
                return None
            told = "" if found is None else str(json.loads(found))
            if told != what:
                missing[number] = told
        return missing


def launcher_store(scope: str, key: str, value: bytes | None = None) -> bytes | None:
    """Writes a value to the launcher's key-value store, or reads one; returns None if there is none."""
    address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}", "") for name in ("ADDR", "PORT"))
    if not address or checks.whole_number(port) < 0:
        return None
    url, method = f"http://{address}:{int(port)}/{scope}/{key}", "GET" if value is None else "PUT"
    with contextlib.suppress(urllib.error.URLError, OSError, ValueError):
        request = urllib.request.Request(url, data=value, method=method)
        with _DIRECTLY.open(request, timeout=_ANSWER_SECONDS) as answer:
            found: bytes = answer.read()
            return found
    return None
