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
    entry: Mapping[str, Any], recipe: Recipe, parameters: Mapping[str, torch.Tensor], *, complete: bool
) -> dict[str, Any]:
    """An entry on the host, if it is one of this training.

    Args:
        entry: as `State.state_dict` or `redistribute` made it, or the "horovod_sparse" of an optimizer's.
        recipe: that it is loaded for.
        parameters: of the model, by name, as far as they are known.
        complete: whether these are all that are synchronized.

    Raises:
        StateMismatchError: if it is not.
    """
    try:
        entry = on_host(entry)
    except RecursionError as error:
        raise StateMismatchError("the saved state is nested without end") from error
    check_entry(entry, recipe, _ADVICE)
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
        entries: of all old ranks, in any order.
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
    return redistributed([on_host(entry) for entry in entries], rank, size)
