"""Residuals and sparsifier states in an optimizer's `state_dict`.

`horovod_sparse.frontend.state` says what is in it and what other plans and ranks mean. Beside that:

* ranks load files of different steps, or some load and others do not: residuals are kept, states start anew
  on all ranks, at the furthest step (`horovod_sparse.frontend.agreement`);
* elastic training takes back what this worker saved at another number of ranks: residuals times Q / P;
* of parameters that have joined the training (`add_param_group`, thawed layers): join them before what was
  saved with them is loaded; what was saved before they had joined loads at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.errors import StateMismatchError, UnsupportedError
from horovod_sparse.frontend.agreement import kept_share
from horovod_sparse.frontend.parts import assign_residuals
from horovod_sparse.frontend.state import (
    check_entry,
    check_shapes,
    checked_states,
    load_entry,
    redistributed,
    saved_entry,
    share_factor,
)
from horovod_sparse.merging import Plan
from horovod_sparse.pytorch.layout import on_host
from horovod_sparse.torch.synchronizer import GradientSynchronizer

#: where an optimizer's state_dict has it; optimizers of PyTorch pass over what they do not know
ENTRY = "horovod_sparse"


def save(synchronizer: GradientSynchronizer) -> dict[str, Any]:
    """The entry of this rank, of tensors, numbers and strings alone (``torch.load(weights_only=True)``).

    Raises:
        UnsupportedError: while a bucket is under way: what it has sent is in no residual any more, and
            in no gradient yet.
    """
    if any(part.task is not None for part in synchronizer.parts):
        raise UnsupportedError(
            "an optimizer is saved between steps: call optimizer.step() or optimizer.synchronize() first"
        )
    return saved_entry(synchronizer, lambda array: torch.from_numpy(array.copy()))


def load(synchronizer: GradientSynchronizer, entry: Mapping[str, Any] | None) -> None:
    """Continues from an entry; from nothing, if there is none. Needs no collective.

    Args:
        synchronizer: with no step under way.
        entry: as `save` or `redistribute` made it.

    Raises:
        StateMismatchError: if parameters, shapes or the algorithm differ. Nothing has been loaded then.
    """
    if entry is None:
        synchronizer.take_place()
        assign_residuals(synchronizer.parts, (), {})
        synchronizer.step = 0
        return
    entry = check(synchronizer, entry)
    synchronizer.take_place()
    if not set(Plan.from_dict(entry["plan"]).names()) <= set(synchronizer.facts):
        synchronizer.take_in()
    old_size, size = entry["size"], synchronizer.size
    # in elastic training, what this worker saved when there were more or fewer: no other has a share in it
    own = old_size in synchronizer.sizes
    factor = kept_share(old_size, size) if own else share_factor(entry["rank"], old_size, size)
    load_entry(synchronizer, entry, factor)


def redistribute(entries: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """The entry for one rank of another number of ranks, so that the mean residual is kept exactly.

    Of P old ranks and Q new ones, old rank o belongs to new rank o mod Q if Q < P, and to all new ranks
    r with r mod P = o otherwise. Each of its h holders takes ``e_o * Q / (P * h)``; so the mean over new
    ranks is ``1/Q * sum_o h * e_o * Q / (P * h)``, the mean over old ranks.

    Args:
        entries: of all old ranks, in any order.
        rank: new rank, from 0.
        size: Q.

    Returns:
        An entry for `load`: ``state["horovod_sparse"] = redistribute(...)``.

    Raises:
        StateMismatchError: if the entries are not those of all old ranks of one run.
        ArgumentError: if there is no such rank.
    """
    return redistributed([on_host(entry) for entry in entries], rank, size)


def check(synchronizer: GradientSynchronizer, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Refuses an entry that does not fit; nothing is changed.

    Returns:
        The entry, with all tensors on the host.

    Raises:
        StateMismatchError: with the path of the field, or the parameter.
    """
    advice = (
        "the optimizer uses {}: use the same algorithm, or delete state_dict['horovod_sparse'] to start with "
        "no residual"
    )
    try:
        entry = on_host(entry)
    except RecursionError as error:
        raise StateMismatchError("the saved state is nested without end") from error
    check_entry(entry, synchronizer.recipe, advice)
    known = synchronizer.facts | synchronizer.joining()
    saved = set(Plan.from_dict(entry["plan"]).names())
    # of parameters that have joined, residuals are saved or zeros
    unknown, lacking = saved - set(known), set(synchronizer.facts) - saved - synchronizer.joined
    if unknown or lacking:
        raise StateMismatchError(
            f"the saved state is of another model: it has {sorted(unknown) or 'nothing'} that this one "
            f"has not, and lacks {sorted(lacking) or 'nothing'}"
        )
    check_shapes(entry, {name: tuple(parameter.shape) for name, (_, parameter) in known.items()})
    checked_states(synchronizer, entry)
    return dict(entry)


def check_groups(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Refuses an optimizer's own state, of other parameter groups, before anything is loaded.

    Raises:
        StateMismatchError: saying how many there are.
    """
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    numbers: list[Any] = []
    if isinstance(groups, (list, tuple)) and isinstance(saved.get("state"), Mapping):
        numbers = [len(group.get("params", ())) for group in groups if isinstance(group, Mapping)]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if numbers != own:
        raise StateMismatchError(
            f"param_groups in the saved state have {numbers or 'no'} parameters, those of the optimizer {own}"
        )
