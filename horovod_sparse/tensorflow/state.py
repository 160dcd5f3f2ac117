"""Saves residuals and sparsifier states: in an entry, in checkpoints of TensorFlow, and on disk.

Variables are known by name, or by their order where names differ but shapes agree: Keras numbers layers anew.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from horovod_sparse.errors import ArgumentError, StateMismatchError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.plans import Plan
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.collectives import carry_out_together
from horovod_sparse.tensorflow.tensors import as_variable
from horovod_sparse.training import checkpoint
from horovod_sparse.training.encoding import from_bytes, to_bytes
from horovod_sparse.training.state import check_entry, check_shapes, checked_states
from horovod_sparse.training.state import redistributed as redistribute  # noqa: F401

if TYPE_CHECKING:
    from horovod_sparse.planning.request import Decision


class StateKeeper:
    """Saves and loads a training's state at any time; keeps a loaded entry until the buckets are made."""

    def __init__(self) -> None:
        #: a `GradientSynchronizer`, or `Steps` of Keras
        self.synchronizer: Any = None
        self._loaded: Mapping[str, Any] | None = None

    def attach(self, synchronizer: Any) -> None:
        self.synchronizer, synchronizer.on_planned = synchronizer, self._load_once_planned
        self._load_once_planned()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's checkpoint entry; empty before the first step."""
        if self._loaded is not None:
            return dict(self._loaded)
        if self.synchronizer is None or not self.synchronizer.parts:
            return {}
        shapes = {name: list(shape) for name, shape in shapes_of(self.synchronizer).items()}
        entry: dict[str, Any] = self.synchronizer.save(variables=shapes)
        return entry

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Loads a checkpoint entry, or resets the state if it is empty; cancels a step in progress first."""
        self.check(entry)
        self._loaded = entry or None
        if entry:
            self._load_once_planned()
        elif self.synchronizer is not None and self.synchronizer.parts:
            self.synchronizer.load(None)

    def check(self, entry: Any) -> None:
        """Raises if an entry does not fit this training, as far as its variables are known by now."""
        if entry is None or (isinstance(entry, Mapping) and not entry):
            return
        _check_recipe(entry, getattr(self.synchronizer, "recipe", None))
        if self._has_buckets_for(entry):
            checked_states(self.synchronizer, with_local_names(self.synchronizer, entry))

    def _has_buckets_for(self, entry: Mapping[str, Any]) -> bool:
        """True once buckets were made for all variables of the entry."""
        own = self.synchronizer
        whole = bool(getattr(own, "facts", None)) and hasattr(own, "schedule")
        return whole or (own is not None and len(own.facts) >= len(entry["variables"]))

    def _load_once_planned(self) -> None:
        if self._loaded is not None and self._has_buckets_for(self._loaded):
            loaded, self._loaded = self._loaded, None
            self.synchronizer.load(with_local_names(self.synchronizer, loaded))


class WithState:
    """Mixin that gives users the state and telemetry of a compressor or optimizer."""

    _horovod_sparse_keeper: StateKeeper | None = None

    @property
    def _synchronizer_or_none(self) -> Any:
        return getattr(self._horovod_sparse_keeper, "synchronizer", None)

    @property
    def telemetry(self) -> Telemetry:
        """Reports of the last step and means; empty before the first step."""
        return Telemetry() if self._synchronizer_or_none is None else self._synchronizer_or_none.telemetry

    @property
    def plan(self) -> Plan | None:
        """The plan of buckets; None before the first step, and without a sparsifier."""
        bound = self._synchronizer_or_none
        return bound.plan if bound is not None and bound.parts else None

    @property
    def decision(self) -> Decision | None:
        """The predicted times and the profile that led to this plan; None if no profile decided."""
        return None if self._synchronizer_or_none is None else self._synchronizer_or_none.decision

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's residuals and sparsifier states; empty before the first step."""
        return {} if self._horovod_sparse_keeper is None else self._horovod_sparse_keeper.state_dict()

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Loads what `state_dict` returned, also before the first step; an empty entry resets the state."""
        if self._horovod_sparse_keeper is not None:
            self._horovod_sparse_keeper.load_state_dict(entry)


class CheckpointedState(tf.train.experimental.PythonState):
    """Lets ``tf.train.Checkpoint`` save residuals and sparsifier states, which differ between ranks."""

    def __init__(self, keeper: StateKeeper) -> None:
        super().__init__()
        self._keeper = keeper

    def serialize(self) -> bytes:
        return to_bytes(self._keeper.state_dict())

    def deserialize(self, string_value: Any) -> None:
        value = string_value.numpy() if hasattr(string_value, "numpy") else string_value
        self._keeper.load_state_dict(from_bytes(value))


def _check_recipe(entry: Any, recipe: Recipe | None) -> None:
    """Raises if an entry is damaged or of another algorithm; works before variables are known."""
    advice = (
        "now {} is used: use the same algorithm, or load without the state of horovod_sparse to start with "
        "no residual"
    )
    check_entry(entry, recipe, advice)
    variables = entry.get("variables", {})
    if set(variables) != set(Plan.from_dict(entry["plan"]).names()):
        raise StateMismatchError("the saved state is damaged: its variables do not fit its plan")
    check_shapes(entry, {name: tuple(shape) for name, shape in variables.items()})


def with_local_names(synchronizer: Any, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the entry with this model's names of variables, in order; raises if other shapes were saved."""
    _check_recipe(entry, synchronizer.recipe)
    known = shapes_of(synchronizer)
    saved = {name: tuple(shape) for name, shape in entry["variables"].items()}
    if saved == known:
        return entry
    if list(saved.values()) != list(known.values()):
        only_saved = [f"{name} {shape}" for name, shape in saved.items() if known.get(name) != shape]
        only_here = [f"{name} {shape}" for name, shape in known.items() if saved.get(name) != shape]
        raise StateMismatchError(
            f"the saved state is of another model: in it alone {only_saved or 'nothing'}, "
            f"in this model alone {only_here or 'nothing'}"
        )
    here, plan = dict(zip(saved, known, strict=True)), Plan.from_dict(entry["plan"])
    buckets = tuple(tuple(here[name] for name in bucket) for bucket in plan.buckets)
    dense = tuple(here[name] for name in plan.dense)
    renamed = [
        {here[name]: values for name, values in by_name.items()}
        for by_name in (entry["residuals"], *entry["companions"])
    ]
    return {
        **entry,
        "plan": dataclasses.replace(plan, buckets=buckets, dense=dense).to_dict(),
        "residuals": renamed[0],
        "companions": renamed[1:],
    }


def shapes_of(synchronizer: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of variables with buckets, by name, in the order of their first gradients."""
    return {name: tuple(variable.shape) for name, (_, variable) in synchronizer.facts.items()}


_NAME = "horovod_sparse.checkpoint"


def save(
    directory: str | os.PathLike[str], source: Any, keep: int = 2, *, variables: Sequence[Any] = ()
) -> int:
    """Saves a checkpoint; all ranks call it together, between the same two steps.

    With `variables` (``model.variables + optimizer.variables``) a checkpoint is all that `load` needs to go
    on bit for bit; without, save them first. Errors are those of `horovod_sparse.torch.save`.

    Args:
        directory: made if it is missing; the same for all ranks, or each host's own. One for each training.
        source: the owner of the residuals: a sparsifier that tapes use (``Compression.topk(...)``), or an
            optimizer of `DistributedOptimizer` with one; after a step.
        keep: number of checkpoints to keep, this one included.
        variables: variables of TensorFlow or Keras, saved by their order.

    Returns:
        The step: synchronizations done so far.
    """
    keeper, process_set = _keeper_of(source)

    def to_entry() -> dict[str, Any]:
        if not (own := keeper.state_dict()):
            raise UnsupportedError("nothing can be saved before the first step: there are no residuals yet")
        return {**own, "training": {"variables": [_encode_variable(variable) for variable in variables]}}

    together = checkpoint.save_together(
        directory, to_entry, rank=int(process_set.rank()), keep=keep, owner=keeper, world_rank=int(hvd.rank())
    )
    step: int = carry_out_together(together, process_set, _NAME)
    return step


def load(
    directory: str | os.PathLike[str], source: Any, step: int | None = None, *, variables: Sequence[Any] = ()
) -> int:
    """Loads the newest checkpoint that is complete on all ranks; all ranks call it together.

    Other numbers of ranks, and errors: see `horovod_sparse.torch.load`.

    Args:
        directory: as given to `save`.
        source: like the one that was saved. Where it has not seen its variables yet, the first step finds
            out whether they fit.
        step: that of the checkpoint, if not the newest.
        variables: the same ones as were saved, in their order; none are left alone.

    Returns:
        The step that `save` returned.
    """
    keeper, process_set = _keeper_of(source)

    def check_fit(entry: Mapping[str, Any]) -> None:
        training = entry.get("training")
        if not isinstance(training, dict) or not isinstance(training.get("variables"), list):
            raise StateMismatchError(f"{directory}: not saved by horovod_sparse.tensorflow.save")
        keeper.check(entry)
        if variables:
            _check_variables(variables, training["variables"])

    place = {"rank": int(process_set.rank()), "size": int(process_set.size())}
    loaded = f"the optimizer and {len(variables)} variables"
    together = checkpoint.load_together(directory, check_fit, **place, step=step, owner=keeper, loaded=loaded)
    entry = carry_out_together(together, process_set, _NAME)
    training = entry.pop("training")
    for variable, saved in zip(variables, training["variables"] if variables else (), strict=True):
        dtype = tf.as_dtype(saved["dtype"]).as_numpy_dtype
        as_variable(variable).assign(np.frombuffer(saved["bits"].tobytes(), dtype).reshape(saved["shape"]))
    keeper.load_state_dict(entry)
    return int(entry["step"])


def has_checkpoint(directory: str | os.PathLike[str], source: Any) -> bool:
    """True on all ranks if any rank sees a checkpoint; all ranks call it together."""
    _, process_set = _keeper_of(source)
    return bool(carry_out_together(checkpoint.has_checkpoint(directory), process_set, _NAME))


def _keeper_of(source: Any) -> tuple[Any, Any]:
    """Returns the `StateKeeper` of an optimizer or compressor, and its process set; raises if it has none."""
    keeper = getattr(source, "_horovod_sparse_keeper", None)
    if keeper is None:
        raise ArgumentError(
            "source",
            type(source),
            "a sparsifier such as Compression.topk(...), or an optimizer of DistributedOptimizer with one",
        )
    process_set = getattr(keeper.synchronizer or source, "process_set", None) or hvd.global_process_set
    if not process_set.included():
        raise ArgumentError("source", type(source), "one whose process set includes this rank")
    return keeper, process_set


def _encode_variable(variable: Any) -> dict[str, Any]:
    variable = as_variable(variable)
    array = np.asarray(variable.numpy())
    if array.dtype.hasobject:
        raise UnsupportedError(f"{variable.name} is {variable.dtype.name}: checkpoints hold numbers only")
    # as bytes, since NumPy does not know bfloat16 and the like
    bits = np.frombuffer(array.tobytes(), np.uint8)
    return {"dtype": variable.dtype.name, "shape": list(array.shape), "bits": bits}


def _check_variables(variables: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> None:
    if len(variables) != len(saved):
        raise StateMismatchError(f"load got {len(variables)} variables, must get the {len(saved)} saved ones")
    for variable, one in zip(map(as_variable, variables), saved, strict=True):
        here, there = (variable.dtype.name, list(variable.shape)), (one["dtype"], one["shape"])
        if here != there:
            raise StateMismatchError(
                f"the saved state is of another model: {variable.name} is {here[0]} {here[1]}, the "
                f"checkpoint has {there[0]} {there[1]} in its place"
            )
