"""Residuals and sparsifier states of a synchronizer, to be saved and loaded.

Residuals belong to variables, states of sparsifiers to buckets. Both differ from rank to rank, so every
rank saves a file of its own to resume exactly. What happens otherwise:

* same ranks, same plan: training continues bit for bit;
* another plan: residuals are kept, sparsifier states start anew (one line in the log);
* another number of ranks: residuals are kept and scaled, see `redistribute`; states start anew;
* all ranks load one rank's file: each gets that rank's residual, an estimate of the mean;
* a checkpoint without the entry (a dense run's): residuals start at zero.

Variables are known by name, or by their order where names differ but shapes agree: Keras numbers the
layers of a second model in the same process anew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse.errors import StateMismatchError, UnsupportedError
from horovod_sparse.feedback import Progress
from horovod_sparse.feedback.state import from_plain, to_plain
from horovod_sparse.frontend.parts import assign_residuals, held_residuals
from horovod_sparse.frontend.state import companions_fit, feedback_name, redistributed, share_factor
from horovod_sparse.merging import Plan
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer

__all__ = ["StateKeeper", "load", "redistribute", "save"]

_FORMAT = 1
_log = logging.getLogger("horovod_sparse")


def _shapes_by_name(synchronizer: GradientSynchronizer) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the variables that have a bucket, in the order in which they were seen."""
    shapes = {
        name: shape
        for part in synchronizer.parts
        for name, shape in zip(part.names, part.shapes, strict=True)
    }
    return {name: shapes[name] for name in synchronizer.names}


def save(synchronizer: GradientSynchronizer) -> dict[str, Any]:
    """The entry of this rank: numbers, strings, and NumPy arrays in the variables' shapes.

    Raises:
        UnsupportedError: while a step is under way: what it has sent is in no residual any more, and in
            no gradient yet.
    """
    if any(part.task.under_way for part in synchronizer.parts):
        raise UnsupportedError("residuals are saved between steps: a step is under way, or was interrupted")
    rank, size = synchronizer.place
    held = held_residuals(synchronizer.parts, synchronizer.recipe.feedback.num_companions)
    return {
        "format": _FORMAT,
        "algorithm": synchronizer.recipe.sparsifier.name,
        "recipe": synchronizer.recipe.describe(),
        "rank": rank,
        "size": size,
        "step": synchronizer.step,
        "variables": {name: list(shape) for name, shape in _shapes_by_name(synchronizer).items()},
        "plan": synchronizer.plan.to_dict(),
        "residuals": held[0],
        "companions": held[1:],
        "feedback": feedback_name(synchronizer.recipe.feedback),
        "buckets": [
            {**part.bucket.progress.to_plain(), "state": to_plain(part.bucket.state)}
            for part in synchronizer.sparse
        ],
    }


def load(synchronizer: GradientSynchronizer, entry: Mapping[str, Any]) -> None:
    """Continues from an entry. Needs no collective.

    Args:
        synchronizer: whose variables have their buckets already, with no step under way.
        entry: as `save` or `redistribute` made it.

    Raises:
        StateMismatchError: if variables, shapes or the algorithm differ. Nothing has been loaded then.
    """
    renamed = _checked(synchronizer, entry)
    saved_plan = Plan.from_dict(entry["plan"])
    plan = Plan(
        tuple(tuple(renamed[name] for name in bucket) for bucket in saved_plan.buckets),
        tuple(renamed[name] for name in saved_plan.dense),
    )
    _, size = synchronizer.place
    kept = plan == synchronizer.plan and entry["size"] == size and not entry.get("resized")
    states = [
        from_plain(part.bucket.recipe.sparsifier.init(part.bucket.info), saved["state"])
        for part, saved in zip(synchronizer.sparse, entry["buckets"] if kept else (), strict=kept)
    ]
    progress = {
        name: Progress.from_plain(saved, saved["state"]["step"])
        for names, saved in zip(plan.buckets, entry["buckets"], strict=True)
        for name in names
    }
    factor = share_factor(entry["rank"], entry["size"], size)
    held = [
        {renamed[name]: np.asarray(values).reshape(-1) * factor for name, values in by_name.items()}
        for by_name in (entry["residuals"], *entry["companions"])
    ]
    assign_residuals(synchronizer.parts, held, progress)
    synchronizer.step = int(entry["step"])
    for part, state in zip(synchronizer.sparse, states, strict=kept):
        part.bucket.state = state
    if not kept:
        what = f"another plan ({plan})" if entry["size"] == size else f"{entry['size']} ranks"
        _log.warning(
            "the checkpoint is of %s, now %d ranks, %s: residuals are kept, sparsifier states start anew",
            what,
            size,
            synchronizer.plan,
        )


class StateKeeper:
    """Saves and loads at any time: buckets exist only from the first gradient on, files may be earlier.

    What is loaded waits until the variables have their buckets; where nothing is synchronized (on a rank that
    the process set leaves out) it waits for ever, and is saved again.

    Example:
        >>> StateKeeper().state_dict()
        {}
    """

    def __init__(self) -> None:
        self._synchronizer: GradientSynchronizer | None = None
        self._waiting: Mapping[str, Any] | None = None

    def attach(self, synchronizer: GradientSynchronizer) -> None:
        """Says whose state it is."""
        self._synchronizer = synchronizer
        synchronizer.on_planned = self._put

    def state_dict(self) -> dict[str, Any]:
        """This rank's entry, see `save`; empty before the first step."""
        if self._waiting is not None:
            return dict(self._waiting)
        synchronizer = self._synchronizer
        return save(synchronizer) if synchronizer is not None and synchronizer.parts else {}

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Continues from an entry; from no residual, if it is empty or None.

        A step that has not come to its end, since Horovod has failed, is given up before.

        Raises:
            StateMismatchError: if it does not fit, now or with the first gradients.
        """
        self._waiting = entry or None
        if self._synchronizer is None:
            return
        for part in self._synchronizer.parts:
            part.close()
        if self._synchronizer.parts and entry:
            self._put()
        elif not entry:
            self._synchronizer.step = 0
            assign_residuals(self._synchronizer.parts, (), {})

    def _put(self) -> None:
        waiting, synchronizer = self._waiting, self._synchronizer
        # variables may be seen one after the other
        if (
            waiting is None
            or synchronizer is None
            or len(synchronizer.names) < len(waiting.get("variables", ()))
        ):
            return
        self._waiting = None
        load(synchronizer, waiting)


def redistribute(entries: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """The entry for one rank of another number of ranks, so that the mean residual is kept exactly.

    Args:
        entries: of all old ranks, in any order.
        rank: new rank, from 0.
        size: new number of ranks.

    Raises:
        StateMismatchError: if the entries are not those of all old ranks of one run.
        ArgumentError: if there is no such rank.
    """
    return redistributed(entries, rank, size)


def _checked(synchronizer: GradientSynchronizer, entry: Mapping[str, Any]) -> dict[str, str]:
    """What the saved names are called here."""
    if entry.get("format") != _FORMAT:
        raise StateMismatchError(
            f"the saved state has format {entry.get('format')}, this version reads format {_FORMAT}"
        )
    if entry["algorithm"] != synchronizer.recipe.sparsifier.name:
        raise StateMismatchError(
            f"the saved state is of {entry['recipe']}, now {synchronizer.recipe.describe()} is used: use the "
            "same algorithm, or load without the state of horovod_sparse to start with no residual"
        )
    if not companions_fit(entry, synchronizer.recipe.feedback):
        raise StateMismatchError(
            f"the saved state is of another feedback than {synchronizer.recipe.feedback}"
        )
    known = _shapes_by_name(synchronizer)
    saved = {name: tuple(shape) for name, shape in entry["variables"].items()}
    if saved == known:
        return {name: name for name in saved}
    if list(saved.values()) == list(known.values()):
        return dict(zip(saved, known, strict=True))
    only_saved = [f"{name} {shape}" for name, shape in saved.items() if known.get(name) != shape]
    only_here = [f"{name} {shape}" for name, shape in known.items() if saved.get(name) != shape]
    raise StateMismatchError(
        f"the saved state is of another model: it has {only_saved or 'nothing'} that this one has not, and "
        f"lacks {only_here or 'nothing'}"
    )
