"""Residuals and sparsifier states in checkpoints: the same entry as with Horovod, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.errors import ArgumentError, StateMismatchError
from horovod_sparse.feedback import Recipe
from horovod_sparse.frontend.state import check_entry, check_shapes, redistributed
from horovod_sparse.merging import Plan
from horovod_sparse.pytorch.layout import on_host

_ADVICE = "the model uses {}: use the same algorithm, or load None to start with no residual"


def checked_entry(
    entry: Mapping[str, Any],
    recipe: Recipe,
    parameters: Mapping[str, torch.Tensor],
    *,
    complete: bool,
    shard: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """An entry on the host, if it is one of this training.

    Args:
        entry: as `State.state_dict` or `redistribute` made it, or the "horovod_sparse" of an optimizer's.
        recipe: that it is loaded for.
        parameters: of the model, by name, as far as they are known.
        complete: whether these are all that are synchronized.
        shard: number of this rank's shard, and of how many; None where parameters are whole.

    Raises:
        StateMismatchError: if it is not.
    """
    try:
        entry = on_host(entry)
    except RecursionError as error:
        raise StateMismatchError("the saved state is nested without end") from error
    check_entry(entry, recipe, _ADVICE)
    own = None if shard is None else list(shard)
    if entry.get("shard") != own:
        saved, here = (
            "whole parameters" if one is None else f"shard {one} (which, of how many)"
            for one in (entry.get("shard"), own)
        )
        raise StateMismatchError(
            f"the saved state is of {saved}, this rank trains {here}: load what such a rank has saved"
        )
    names = set(Plan.from_dict(entry["plan"]).names())
    unknown = sorted(names - set(parameters)) if parameters else []
    # before the first step nothing is held back for any
    lacking = sorted(set(parameters) - names) if complete and entry["step"] else []
    if unknown or lacking:
        raise StateMismatchError(
            f"the saved state is of another model: it has {unknown or 'nothing'} that this one has not, and "
            f"lacks {lacking or 'nothing'}"
        )
    if parameters:
        check_shapes(entry, {name: tuple(parameter.shape) for name, parameter in parameters.items()})
    return dict(entry)


def redistribute(entries: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """The entry for one rank of another number of ranks, so that the mean residual is kept exactly.

    Args:
        entries: of all old ranks, in any order; of sharded parameters those of all that had the same shard.
        rank: new rank, from 0.
        size: new number of ranks.

    Returns:
        An entry for `State.load_state_dict`.

    Raises:
        StateMismatchError: if the entries are not those of all old ranks of one run.
        ArgumentError: if there is no such rank.
    """
    if not entries:
        raise ArgumentError("entries", entries, "the entry of every old rank")
    if len({repr(entry.get("shard")) for entry in entries}) > 1:
        raise StateMismatchError("entries of different shards were given: give those of the ranks with one")
    return redistributed([on_host(entry) for entry in entries], rank, size)
