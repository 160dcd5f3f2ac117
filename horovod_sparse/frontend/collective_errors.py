"""Errors of one rank, raised on all, so that no rank waits for one that has given up; and what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from horovod_sparse import errors
from horovod_sparse.collectives import AllReduce, Synchronization
from horovod_sparse.frontend.agreement import shared_lines

Failure = TypeVar("Failure", bound=BaseException)

#: errors that are made of their message, and so can be made again elsewhere
_TEXT_ALONE = ("CheckpointError", "ProfileMismatchError", "StateMismatchError", "UnsupportedError")


def raise_together(failure: Exception | None) -> Synchronization[None]:
    """Raises on every rank if any rank has failed; one collective.

    Args:
        failure: of this rank, or None.

    Raises:
        Exception: the rank's own failure, where it has one.
        HorovodSparseError: on the others, naming the first rank that failed, and its error; of the same
            type where that can be made of its message.

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
    """Another rank's error, of the same type where that can be made of its message.

    Args:
        rank: that has it.
        name: of its type.
        text: of it.
    """
    if name in _TEXT_ALONE:
        kind: type[errors.HorovodSparseError] = getattr(errors, name)
        return kind(f"on rank {rank}: {text}")
    return errors.HorovodSparseError(f"on rank {rank}: {name}: {text}")


def worst_of_all(failure: BaseException | None) -> Synchronization[BaseException | None]:
    """The worst failure of any rank, of one kind on all ranks; one small collective where none has failed.

    Args:
        failure: of this rank, or None.

    Returns:
        The rank's own failure, where that is of the kind; that of another rank made again otherwise.

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
    """Raises on every rank if any rank has changed gradients after their synchronization had begun.

    Args:
        edited: names of the parameters, on this rank.
        rank: of this process.
        size: P.

    Raises:
        EditedGradientError: on every rank alike; it names parameters of this rank alone.
    """
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

    Args:
        hvd: Horovod's binding for a framework.
        process_set: that this rank is not in.

    Raises:
        UnsupportedError: if it is the set of all ranks.
    """
    if process_set is not hvd.global_process_set:
        return
    name, started = hvd.__name__, "was" if hvd.is_initialized() else "was not"
    raise errors.UnsupportedError(
        "Horovod's set of all ranks does not hold this one, so nothing would be synchronized: two bindings "
        f"of Horovod are imported, the last of which has the set, and {name} {started} started. Start and "
        "use the binding that is imported last, or import no other one"
    )


def worst(failures: Iterable[Failure]) -> Failure:
    """Of a step's errors the one to look at: what stands on this rank alone, or else an edit."""
    kinds = (errors.EditedGradientError, errors.NonFiniteGradientError)
    return min(failures, key=lambda error: 1 + kinds.index(type(error)) if type(error) in kinds else 0)


def has_bad_gradient(failures: Iterable[BaseException], rank: int) -> bool:
    """Whether a gradient of this rank is not finite: all of the rank's gradients are dropped then."""
    return any(isinstance(error, errors.NonFiniteGradientError) and rank in error.where for error in failures)
