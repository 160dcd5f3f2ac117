"""Raises the errors of one rank on all ranks, so that none waits for ever; and decides what they mean.

Making an optimizer or a tape is no collective, so a rank that cannot (a misspelt argument, on one rank alone)
would leave the others waiting until their deadline. It puts its error into the launcher's store, and ranks
that have waited for a moment look there. A collective would not do: one that not all ranks join is a stall.
A rank withdraws its error once it makes an optimizer after all, or begins to agree with the others; so a
rank that has read one waits a moment before it raises it.
"""

from __future__ import annotations

import atexit
import enum
import functools
import importlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from horovod_sparse import errors
from horovod_sparse.collectives import AllReduce, Synchronization, gather_values
from horovod_sparse.errors import EditedGradientError, HorovodSparseError, NonFiniteGradientError
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.training.deadline import Store, launcher_store, set_horovod_stall_limit
from horovod_sparse.training.settings import RAISE, check_transport

Failure = TypeVar("Failure", bound=BaseException)
_log = logging.getLogger("horovod_sparse")
#: errors whose only argument is their text, so that other ranks can raise them too
_TEXT_ALONE = ("CheckpointError", "ProfileMismatchError", "StateMismatchError", "UnsupportedError")


def raise_together(failure: Exception | None) -> Synchronization[None]:
    """Raises on every rank if one has a `failure`, else returns; all ranks run it, by one collective."""
    everyone = yield from gather_values(None if failure is None else [type(failure).__name__, str(failure)])
    if failure is not None:
        raise failure
    for rank, told in enumerate(everyone):
        if told is not None:
            raise error_of_rank(rank, *told)


def error_of_rank(rank: int, name: str, text: str, place: Any = None) -> errors.HorovodSparseError:
    """Makes the error that another rank has sent as name and text, of the same type if possible."""
    kind: Any = getattr(errors, name, None)
    made: errors.HorovodSparseError
    if place is not None:
        made = kind(place[0], dict(place[1]))
    elif name in _TEXT_ALONE:
        made = kind(f"on rank {rank}: {text}")
    else:
        made = errors.HorovodSparseError(f"on rank {rank}: {name}: {text}")
    return made


def worst_of_all(failure: BaseException | None) -> Synchronization[BaseException | None]:
    """Exchanges ranks' failures; returns the gravest (`worst`) on all ranks, or None if none has failed."""
    total = yield AllReduce(np.array([failure is not None], np.float32))
    if not np.array(total)[0]:
        return None
    told: list[Any] | None = None
    if failure is not None:
        placed = (NonFiniteGradientError, EditedGradientError)
        place = [failure.bucket, list(failure.where.items())] if isinstance(failure, placed) else None
        told = [type(failure).__name__, str(failure), place]
    everyone = yield from gather_values(told)
    failures = [error_of_rank(rank, *one) for rank, one in enumerate(everyone) if one is not None]
    found = worst(failures)
    return failure if type(failure) is type(found) else found


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def raise_if_second_binding(hvd: Any, process_set: Any) -> None:
    """Raises if Horovod's module for another framework, imported later, owns the global process set."""
    if process_set is not hvd.global_process_set:
        return
    started = "was" if hvd.is_initialized() else "was not"
    raise errors.UnsupportedError(
        "Horovod's set of all ranks does not hold this one, so nothing would be synchronized: two bindings "
        f"of Horovod are imported, the last of which has the set, and {hvd.__name__} {started} started. "
        "Start and use the binding that is imported last, or import no other one"
    )


def horovod_binding(framework: str, has: str) -> Any:
    """Returns Horovod's module for "PyTorch" or "TensorFlow"; raises if it lacks the function `has`."""
    name = "horovod.torch" if framework == "PyTorch" else "horovod.tensorflow"
    found: Any
    try:
        found = importlib.import_module(name)
    except ImportError as error:
        raise errors.HorovodMissingError.explained(f"{name} cannot be imported ({error})") from error
    # Horovod may be importable without its extension for this framework, and then has no functions
    if not hasattr(found, has):
        reason = f"Horovod is installed, but it was built without {framework} (or for another one)"
        raise errors.HorovodMissingError.explained(reason)
    init = found.mpi_ops._basics.init

    @functools.wraps(init)
    def started(*arguments: Any, **named: Any) -> None:
        set_horovod_stall_limit()
        if not found.is_initialized():
            found._horovod_sparse_start = object()
        init(*arguments, **named)

    found._horovod_sparse_start = object()
    found.mpi_ops._basics.init = started  # every way to start Horovod calls it
    return found


def raise_if_unlinked(hvd: Any) -> None:
    """Raises if a launcher started several processes but Horovod does not connect them."""
    if not hvd.is_initialized() or hvd.size() > 1 or "HOROVOD_RANK" in os.environ:
        return
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else ""
    number = os.environ.get("WORLD_SIZE" if launcher else "OMPI_COMM_WORLD_SIZE", "1")
    if number != "1" and (launcher or not hvd.mpi_enabled()):
        raise errors.UnsupportedError(
            f"{launcher or 'mpirun'} has started {number} processes, and Horovod does not know the others, "
            "so each would train for itself: start them with horovodrun -np, or use horovod_sparse.ddp"
        )


class Outcome(enum.IntEnum):
    """Says whether all ranks apply a step, skip it, show a loss scaler Inf, or raise the step's error."""

    APPLIED = 0
    SKIPPED = 1
    #: a loss scaler shall find Inf in the gradients of every rank
    OVERFLOW = 2
    #: every rank raises the error
    RAISE = 3


@dataclass(frozen=True)
class Verdict:
    """A step's outcome and error; with `drop` the step's gradients have to leave the residuals."""

    outcome: Outcome
    error: BaseException | None = None
    drop: bool = False


class NonFinitePolicy:
    """Decides what becomes of a step in which some rank has NaN or Inf gradients: skip or raise.

    Either way no rank applies it, and it is rolled back. So is a sum that overflows though every gradient
    is finite.
    """

    def __init__(self, on_nonfinite: str, telemetry: Telemetry) -> None:
        self.on_nonfinite, self._telemetry = on_nonfinite, telemetry

    def judge(self, errors: Sequence[BaseException], *, scaled: bool = False) -> Verdict:
        """Returns the verdict on a step's errors; counts skipped steps."""
        if not errors:
            return Verdict(Outcome.APPLIED)
        error = worst(errors)
        # all ranks know this error; after an edit the gradient is not the one that was folded
        drop = isinstance(error, NonFiniteGradientError)
        if scaled and drop:
            return Verdict(Outcome.OVERFLOW, error, drop)
        findings = [one.finding for one in errors if isinstance(one, NonFiniteGradientError)]
        if self.on_nonfinite == RAISE or len(findings) < len(errors):
            return Verdict(Outcome.RAISE, error, drop)
        count = self._telemetry.num_skipped = self._telemetry.num_skipped + 1
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, ...: a training that has blown up fills no disk
            words = "%s; all ranks skip this step, as on_nonfinite='skip' asks (%d so far)"
            _log.warning(words, findings[0], count)
        return Verdict(Outcome.SKIPPED, error, drop)


def worst(failures: Iterable[Failure]) -> Failure:
    """Returns the gravest of the errors: NaN counts least, then an edited gradient; any other is graver."""
    kinds = (EditedGradientError, NonFiniteGradientError)
    return min(failures, key=lambda error: 1 + kinds.index(type(error)) if type(error) in kinds else 0)


Function = TypeVar("Function", bound=Callable[..., Any])

_SCOPE = "horovod_sparse.building"
#: seconds of waiting before the store is read; between reads; and in which a read error may be withdrawn
_PATIENCE_SECONDS, _PAUSE_SECONDS, _GRACE_SECONDS = 1.0, 0.5, 2.0
#: seconds by which a failed process ends later, unless the other ranks have errors of their own
_END_SECONDS = 5.0


class ConstructionErrors:
    """Publishes an error in making an optimizer or tape, so that other ranks raise it and do not hang.

    `ranks` returns, for a process set, this rank and all ranks by their numbers in the world (None outside of
    it); `check` raises errors that this rank would raise in its first step only.
    """

    def __init__(
        self,
        ranks: Callable[[Any], tuple[int, list[int]] | None],
        store: Store = launcher_store,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._ranks, self._store, self._check = ranks, store, check
        #: this rank and the ranks for which it has published an error
        self._told: tuple[int, list[int]] | None = None

    @classmethod
    def of_horovod(cls, hvd: Any) -> ConstructionErrors:
        """Returns an object that publishes errors in `horovodrun`'s key-value store."""

        def ranks(process_set: Any) -> tuple[int, list[int]] | None:
            if not hvd.is_initialized():
                return None
            chosen = process_set
            if getattr(process_set, "process_set_id", None) is None:  # None, or no process set
                chosen = hvd.global_process_set
            own, everyone = int(hvd.rank()), list(chosen.ranks or ())
            return (own, everyone) if own in everyone else None

        def check() -> None:
            raise_if_unlinked(hvd)
            check_transport(hvd)

        return cls(ranks, check=check)

    def publish(self, error: Exception, process_set: Any) -> None:
        """Publishes this rank's error in the store for the other ranks; does not wait for them."""
        found = self._ranks(process_set)
        if found is None or len(found[1]) == 1:
            return
        self._write_store(str(found[0]), [type(error).__name__, str(error)])
        self._told = found
        atexit.unregister(self._delay_exit)
        atexit.register(self._delay_exit)

    def withdraw_error(self) -> None:
        if self._told is not None:
            self._write_store(str(self._told[0]), None)
            self._told = None

    def watcher(self, process_set: Any) -> Callable[[], None]:
        """Withdraws this rank's error; returns a function that raises other ranks': call it while waiting."""
        self.withdraw_error()
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
                told = self._read_store(str(other)) if other != found[0] else None
                if told is None:
                    read.pop(other, None)
                    continue
                since, error = read.setdefault(other, (now, error_of_rank(number, *told)))
                if now - since > _GRACE_SECONDS:
                    raise error

        return look

    def publishing_errors(self, function: Function, *, is_last: bool = True) -> Function:
        """Wraps a constructor, so that its errors are published to the other ranks."""

        @functools.wraps(function)
        def publishing(*arguments: Any, **named: Any) -> Any:
            try:
                self._check()
                made = function(*arguments, **named)
            except Exception as error:
                self.publish(error, named.get("process_set"))
                raise
            if is_last:
                self.withdraw_error()
            return made

        return publishing  # type: ignore[return-value]

    def _delay_exit(self) -> None:
        """Delays the end of this process, so that ranks without an error of their own read this one."""
        end = time.monotonic() + _END_SECONDS
        own, ranks = self._told or (0, [0])
        while time.monotonic() < end and not all(self._read_store(str(one)) for one in ranks if one != own):
            time.sleep(0.1)

    def _write_store(self, key: str, value: Any) -> None:
        self._store(_SCOPE, key, json.dumps(value).encode())

    def _read_store(self, key: str) -> Any:
        found = self._store(_SCOPE, key)
        return None if found is None else json.loads(found)
