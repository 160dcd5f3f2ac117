"""Entries of checkpoints whose arrays are tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from horovod_sparse.errors import ArgumentError, StateMismatchError
from horovod_sparse.tensors.layout import on_host
from horovod_sparse.training.state import redistributed


def host_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with all of its tensors on the host.

    Raises:
        StateMismatchError: if it is nested without end.
    """
    try:
        return dict(on_host(entry)) if isinstance(entry, Mapping) else on_host(entry)
    except RecursionError as error:
        raise StateMismatchError("the saved state is nested without end") from error


def redistribute(entries: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """The entry for one rank of another number of ranks, so that the mean residual is kept exactly.

    Of P old ranks and Q new ones, old rank o belongs to new rank o mod Q if Q < P, and to all new ranks
    r with r mod P = o otherwise. Each of its h holders takes ``e_o * Q / (P * h)``; so the mean over new
    ranks is ``1/Q * sum_o h * e_o * Q / (P * h)``, the mean over old ranks.

    Args:
        entries: of all old ranks, in any order; of sharded parameters those of all that had the same shard.
        rank: new rank, from 0.
        size: Q.

    Returns:
        An entry for ``load_state_dict``: of an optimizer as ``state["horovod_sparse"]``, of
        `horovod_sparse.ddp` as it is.

    Raises:
        StateMismatchError: if the entries are not those of all old ranks of one run.
        ArgumentError: if there is no such rank.
    """
    if not entries:
        raise ArgumentError("entries", entries, "the entry of every old rank")
    if len({repr(entry.get("shard")) for entry in entries}) > 1:
        raise StateMismatchError("entries of different shards were given: give those of the ranks with one")
    return redistributed([on_host(entry) for entry in entries], rank, size)
