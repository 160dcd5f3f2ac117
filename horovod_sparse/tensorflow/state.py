"""Residuals and sparsifier states of a synchronizer, to be saved and loaded.

`horovod_sparse.training.state` says what is in an entry and what other plans and ranks mean.

Variables are known by name, or by their order where names differ but shapes agree: Keras numbers the
layers of a second model in the same process anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from horovod_sparse.errors import StateMismatchError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.plans.plan import Plan
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer
from horovod_sparse.training.encoding import from_bytes, to_bytes
from horovod_sparse.training.state import (
    check_entry,
    check_shapes,
    checked_states,
    redistributed,
)

if TYPE_CHECKING:
    from horovod_sparse.planning.request import Decision


def _shapes_by_name(synchronizer: GradientSynchronizer) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the variables that have a bucket, in the order in which they were seen."""
    shapes = {
        name: shape
        for part in synchronizer.parts
        for name, shape in zip(part.names, part.shapes, strict=True)
    }
    return {name: shapes[name] for name in synchronizer.names}


def save(synchronizer: GradientSynchronizer) -> dict[str, Any]:
    """The entry of this rank: numbers, strings, and NumPy arrays in the variables' shapes."""
    if synchronizer.under_way:
        raise UnsupportedError("residuals are saved between steps: a step is under way, or was interrupted")
    shapes = _shapes_by_name(synchronizer)
    return synchronizer.save(variables={name: list(shape) for name, shape in shapes.items()})


def load(synchronizer: GradientSynchronizer, entry: Mapping[str, Any]) -> None:
    """Continues from an entry. Needs no collective."""
    synchronizer.load(entry, _checked(synchronizer, entry))


class StateKeeper:
    """Saves and loads at any time: buckets exist only from the first gradient on, files may be earlier.

    What is loaded waits until the variables have their buckets; where nothing is synchronized (on a rank that
    the process set leaves out) it waits for ever, and is saved again.
    """

    def __init__(self) -> None:
        self.synchronizer: GradientSynchronizer | None = None
        self._waiting: Mapping[str, Any] | None = None

    def attach(self, synchronizer: GradientSynchronizer) -> None:
        """Says whose state it is."""
        self.synchronizer = synchronizer
        synchronizer.on_planned = self._put

    def state_dict(self) -> dict[str, Any]:
        """This rank's entry, see `save`; empty before the first step."""
        if self._waiting is not None:
            return dict(self._waiting)
        synchronizer = self.synchronizer
        return save(synchronizer) if synchronizer is not None and synchronizer.parts else {}

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Continues from an entry; from no residual, if it is empty or None.

        A step that has not come to its end, since Horovod has failed, is given up before.
        """
        self.check(entry)
        self._waiting = entry or None
        if self.synchronizer is None:
            return
        for part in self.synchronizer.parts:
            part.close()
        if self.synchronizer.parts and entry:
            self._put()
        elif not entry:
            self.synchronizer.load(None)

    def check(self, entry: Any) -> None:
        """Refuses an entry that does not fit, as far as that is known by now; nothing is changed."""
        if entry is None or (isinstance(entry, Mapping) and not entry):
            return
        synchronizer = self.synchronizer
        _check(entry, None if synchronizer is None else synchronizer.recipe)
        if synchronizer is not None and len(synchronizer.names) >= len(entry["variables"]):
            checked_states(synchronizer, entry, _checked(synchronizer, entry))

    def _put(self) -> None:
        waiting, synchronizer = self._waiting, self.synchronizer
        # variables may be seen one after the other
        if (
            waiting is None
            or synchronizer is None
            or len(synchronizer.names) < len(waiting.get("variables", ()))
        ):
            return
        self._waiting = None
        load(synchronizer, waiting)


class WithState:
    """What a user may ask of a compressor, and of an optimizer, which has a compressor."""

    _horovod_sparse_keeper: StateKeeper | None = None

    @property
    def telemetry(self) -> Telemetry:
        """What happened in the last step, and on average; empty before the first."""
        synchronizer = _synchronizer(self)
        return Telemetry() if synchronizer is None else synchronizer.telemetry

    @property
    def plan(self) -> Plan | None:
        """Which variables form which bucket; None before the first step, and without a sparsifier."""
        synchronizer = _synchronizer(self)
        return synchronizer.plan if synchronizer is not None and synchronizer.parts else None

    @property
    def decision(self) -> Decision | None:
        """Why the plan was taken, where times decided about it: predictions, and the profile behind them."""
        synchronizer = _synchronizer(self)
        return None if synchronizer is None else synchronizer.decision

    @property
    def is_measured(self) -> bool:
        """Whether backward times wait for `replan`: from the same step on, on all ranks."""
        synchronizer = _synchronizer(self)
        return synchronizer is not None and synchronizer.is_measured

    def replan(self, plan: Plan | None = None, *, measure_steps: int | None = None) -> None:
        """Changes the buckets between two steps; every rank does so alike. Residuals are kept.

        Functions that were traced before have to be traced again; they raise an error otherwise.

        Args:
            plan: the new one. If left out, it is made as `merging` and `tensor_selection` ask for: costs
                are measured again, unless a profile was given, and all ranks take rank 0's plan.
            measure_steps: without a plan: so many steps are measured first, in functions that are traced
                from now on, after one that has no beginning; call again when `is_measured` says so.

        Raises:
            ArgumentError: if no plan is given and `merging` was not either, or the plan does not fit.
            ProfileMismatchError: on every rank alike, if no step has been measured.
            UnsupportedError: while a step is under way.
        """
        synchronizer = _synchronizer(self)
        if synchronizer is not None:
            synchronizer.plan_anew(plan, measure_steps)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and sparsifier states; empty before the first step."""
        return {} if self._horovod_sparse_keeper is None else self._horovod_sparse_keeper.state_dict()

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Continues from what `state_dict` gave, also before the first step; from nothing, if it is empty."""
        if self._horovod_sparse_keeper is not None:
            self._horovod_sparse_keeper.load_state_dict(entry)


def _synchronizer(trained: WithState) -> GradientSynchronizer | None:
    keeper = trained._horovod_sparse_keeper
    return None if keeper is None else keeper.synchronizer


class CheckpointedState(tf.train.experimental.PythonState):
    """Residuals and sparsifier states in a checkpoint; differs from rank to rank."""

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
    """The entry for one rank of another number of ranks, so that the mean residual is kept exactly."""
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
