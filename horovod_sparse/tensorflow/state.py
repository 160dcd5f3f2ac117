"""Residuals and sparsifier states of a synchronizer, to be saved and loaded.

`horovod_sparse.frontend.state` says what is in an entry and what other plans and ranks mean.

Variables are known by name, or by their order where names differ but shapes agree: Keras numbers the
layers of a second model in the same process anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.errors import StateMismatchError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.frontend.agreement import kept_share
from horovod_sparse.frontend.encoding import from_bytes, to_bytes
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
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer


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
    shapes = _shapes_by_name(synchronizer)
    return saved_entry(synchronizer, variables={name: list(shape) for name, shape in shapes.items()})


def load(synchronizer: GradientSynchronizer, entry: Mapping[str, Any]) -> None:
    """Continues from an entry. Needs no collective.

    Args:
        synchronizer: whose variables have their buckets already, with no step under way.
        entry: as `save` or `redistribute` made it.

    Raises:
        StateMismatchError: if variables, shapes or the algorithm differ. Nothing has been loaded then.
    """
    renamed = _checked(synchronizer, entry)
    synchronizer.take_place()
    old_size, size = entry["size"], synchronizer.place[1]
    # in elastic training, what this worker saved when there were more or fewer: no other has a share in it
    own = old_size in synchronizer.sizes
    factor = kept_share(old_size, size) if own else share_factor(entry["rank"], old_size, size)
    load_entry(synchronizer, entry, factor, renamed)
    synchronizer.moved()


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

    @property
    def process_set(self) -> Any:
        """The ranks that take part; None before it is known."""
        return None if self._synchronizer is None else self._synchronizer.process_set

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
        self.check(entry)
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

    def check(self, entry: Any) -> None:
        """Refuses an entry that does not fit, as far as that is known by now; nothing is changed.

        Raises:
            StateMismatchError: with the path of the field, or the variables.
        """
        if entry is None or (isinstance(entry, Mapping) and not entry):
            return
        synchronizer = self._synchronizer
        _check(entry, None if synchronizer is None else synchronizer.recipe)
        if synchronizer is not None and len(synchronizer.names) >= len(entry["variables"]):
            checked_states(synchronizer, entry, _checked(synchronizer, entry))

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


class CheckpointedState(tf.train.experimental.PythonState):
    """Residuals and sparsifier states in a checkpoint; differs from rank to rank.

    Args:
        keeper: of the synchronizer.
    """

    def __init__(self, keeper: StateKeeper) -> None:
        super().__init__()
        self._keeper = keeper

    def serialize(self) -> bytes:
        """Called when a checkpoint is saved."""
        return to_bytes(self._keeper.state_dict())

    def deserialize(self, string_value: Any) -> None:
        """Called when a checkpoint is restored."""
        value = string_value.numpy() if hasattr(string_value, "numpy") else string_value
        self._keeper.load_state_dict(from_bytes(value))


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


def _check(entry: Any, recipe: Recipe | None) -> None:
    """What can be said of an entry without variables."""
    advice = (
        "now {} is used: use the same algorithm, or load without the state of horovod_sparse to start with "
        "no residual"
    )
    check_entry(entry, recipe, advice)
    variables = entry.get("variables")
    sound = isinstance(variables, Mapping) and all(
        isinstance(shape, (list, tuple)) and all(type(length) is int and length >= 0 for length in shape)
        for shape in variables.values()
    )
    if not sound or set(variables) != set(Plan.from_dict(entry["plan"]).names()):
        raise StateMismatchError("variables in the saved state are not those of its plan, with their shapes")
    check_shapes(entry, {name: tuple(shape) for name, shape in variables.items()})


def _checked(synchronizer: GradientSynchronizer, entry: Mapping[str, Any]) -> dict[str, str]:
    """What the saved names are called here."""
    _check(entry, synchronizer.recipe)
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
