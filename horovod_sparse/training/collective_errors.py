"""Errors of one rank, raised on all, so that no rank waits for one that has given up; and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_sparse import errors
from horovod_sparse.collectives import AllReduce, Synchronization, shared_lines
from horovod_sparse.training.outcome import worst

#: errors that are made of their message, and so can be made again elsewhere
_TEXT_ALONE = ("CheckpointError", "ProfileMismatchError", "StateMismatchError", "UnsupportedError")


def raise_together(failure: Exception | None) -> Synchronization[None]:
    """Raises on every rank if any rank has failed; one collective.

    Example:
        >>> from horovod_sparse.simulation import run_lockstep
        >>> ends = [raise_together(errors.ProfileMismatchError("no times")), raise_together(None)]
        >>> [str(error) for error in run_lockstep(ends, keep_errors=True)]
        ['no times', 'on rank 0: no times']
    """
    everyone = yield from shared_lines(None if failure is None else [type(failure).__name__, str(failure)])
    if failure is not None:
        raise failure
    for rank, told in enumerate(everyone):
        if told is not None:
            raise error_of_rank(rank, *told)


def error_of_rank(rank: int, name: str, text: str) -> errors.HorovodSparseError:
    """Another rank's error, of the same type where that can be made of its message."""
    if name in _TEXT_ALONE:
        kind: type[errors.HorovodSparseError] = getattr(errors, name)
        return kind(f"on rank {rank}: {text}")
    return errors.HorovodSparseError(f"on rank {rank}: {name}: {text}")


def worst_of_all(failure: BaseException | None) -> Synchronization[BaseException | None]:
    """The worst failure of any rank, of one kind on all ranks; one small collective where none has failed.

    Example:
        >>> from horovod_sparse.simulation import run_lockstep
        >>> bad = errors.NonFiniteGradientError("a", {1: "weight"})
        >>> [error.where for error in run_lockstep([worst_of_all(bad), worst_of_all(None)])]
        [{1: 'weight'}, {1: 'weight'}]
    """
    total = yield AllReduce(np.array([failure is not None], np.float32))
    if not np.array(total)[0]:
        return None
    told: list[Any] | None = None
    if failure is not None:
        placed = (errors.NonFiniteGradientError, errors.EditedGradientError)
        place = [failure.bucket, failure.where] if isinstance(failure, placed) else None
        told = [type(failure).__name__, str(failure), place]
    everyone = yield from shared_lines(told)
    failures = [_again(rank, *one) for rank, one in enumerate(everyone) if one is not None]
    found = worst(failures)
    return failure if type(failure) is type(found) else found


def _again(rank: int, name: str, text: str, placed: list[Any] | None) -> errors.HorovodSparseError:
    if placed is None:
        return error_of_rank(rank, name, text)
    bucket, where = placed[0], {int(one): place for one, place in placed[1].items()}
    kind: Any = getattr(errors, name)
    made: errors.HorovodSparseError = kind(bucket, where)
    return made


def tell_edits(edited: Sequence[str], rank: int, size: int) -> Synchronization[None]:
    """Raises on every rank if any rank has changed gradients after their synchronization had begun."""
    marks = np.zeros(size, np.float32)
    marks[rank] = bool(edited)
    marks = np.array((yield AllReduce(marks)))
    where = {int(one): "its own error says which" for one in np.flatnonzero(marks)}
    if edited:
        where[rank] = some_of(edited)
    if where:
        raise errors.EditedGradientError("a step", where)


def some_of(names: Sequence[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def refuse_absence(hvd: Any, process_set: Any) -> None:
    """Refuses to leave gradients as they are on a rank that the set of all ranks does not hold.

    Horovod's bindings share that set: the one that is imported last takes it over. Where another one is
    started, no rank is in it, and every rank would train for itself, without a word.
    """
    if process_set is not hvd.global_process_set:
        return
    name, started = hvd.__name__, "was" if hvd.is_initialized() else "was not"
    raise errors.UnsupportedError(
        "Horovod's set of all ranks does not hold this one, so nothing would be synchronized: two bindings "
        f"of Horovod are imported, the last of which has the set, and {name} {started} started. Start and "
        "use the binding that is imported last, or import no other one"
    )
