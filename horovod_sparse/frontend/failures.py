"""An error of one rank, raised on all: so that no rank waits for one that has given up."""

from __future__ import annotations

from horovod_sparse import errors
from horovod_sparse.collectives import Synchronization
from horovod_sparse.frontend.lines import shared_lines

__all__ = ["raise_together"]

#: errors that are made of their message, and so can be made again elsewhere
_TEXT_ALONE = ("ProfileMismatchError", "StateMismatchError", "UnsupportedError")


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
            raise _of_rank(rank, *told)


def _of_rank(rank: int, name: str, text: str) -> errors.HorovodSparseError:
    if name in _TEXT_ALONE:
        kind: type[errors.HorovodSparseError] = getattr(errors, name)
        return kind(f"on rank {rank}: {text}")
    return errors.HorovodSparseError(f"on rank {rank}: {name}: {text}")
