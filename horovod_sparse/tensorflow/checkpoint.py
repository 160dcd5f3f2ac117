"""A training on disk: all ranks save it together, and go on together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.errors import ArgumentError, StateMismatchError, UnsupportedError
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.agreement import carry_out_together
from horovod_sparse.tensorflow.state import StateKeeper
from horovod_sparse.tensorflow.tensors import as_variable
from horovod_sparse.training import checkpoint

_NAME = "horovod_sparse.checkpoint"


def save(
    directory: str | os.PathLike[str], source: Any, keep: int = 2, *, variables: Sequence[Any] = ()
) -> int:
    """Saves what every rank needs to go on; all ranks call it together, between the same two steps.

    A checkpoint is complete or is not there, whatever happens while it is written. It holds numbers, strings
    and arrays, nothing that is run or unpickled. With `variables` (``model.variables + optimizer.variables``)
    it is all that `load` needs to go on bit for bit. Without, save them beside it, and first: a complete
    checkpoint then means that those of its step are there.

    Args:
        directory: made if it is missing; the same for all ranks, or each host's own. One for each training.
        source: whose residuals they are: a sparsifier that tapes use (``Compression.topk(...)``), or an
            optimizer that `DistributedOptimizer` made with one; after a step.
        keep: checkpoints that stay, this one among them.
        variables: of TensorFlow or Keras, saved by their order.

    Returns:
        The step: synchronizations done so far.

    Raises:
        UnsupportedError: on every rank, if a step is under way on any, or none has been taken.
        StateMismatchError: on every rank, if they are at different steps.
        CheckpointError: on every rank, if one could not write, or the directory is another optimizer's. Older
            checkpoints are untouched.
        ArgumentError: for a source without a sparsifier.
    """
    return save_more(directory, source, keep, variables, {})


def load(
    directory: str | os.PathLike[str],
    source: Any,
    step: int | None = None,
    *,
    variables: Sequence[Any] = (),
) -> int:
    """Goes on from the newest checkpoint that is complete on all ranks; all ranks call it together.

    At the number of ranks that saved it the training goes on bit for bit. At another one residuals are
    distributed so that their mean over ranks stays, and sparsifiers start anew; ranks need to see others'
    files then.

    Args:
        directory: as given to `save`.
        source: like the one that was saved. Where it has not seen its variables yet, the first step finds
            out whether they fit.
        step: that of the checkpoint, if not the newest.
        variables: the same ones as were saved, in their order; none are left alone.

    Returns:
        The step that `save` returned.

    Raises:
        CheckpointError: on every rank, if there is no complete checkpoint, or it was changed or damaged.
        StateMismatchError: on every rank, if it does not fit on any. Nothing has been loaded then.
        ArgumentError: for a source without a sparsifier.
    """
    loaded, _ = load_more(directory, source, step, variables)
    return loaded


def is_anything_there(directory: str | os.PathLike[str], source: Any) -> bool:
    """Whether any rank sees a checkpoint; all ranks of the source ask together."""
    _, process_set = _keeper_of(source)
    found: bool = carry_out_together(checkpoint.is_anything_there(directory), process_set, _NAME)
    return found


def save_more(
    directory: str | os.PathLike[str],
    source: Any,
    keep: int,
    variables: Sequence[Any],
    more: Mapping[str, Any],
) -> int:
    """As `save`, with further numbers and strings."""
    keeper, process_set = _keeper_of(source)

    def entry() -> dict[str, Any]:
        if not (own := keeper.state_dict()):
            raise UnsupportedError("nothing can be saved before the first step: there are no residuals yet")
        return {**own, "training": {"variables": [_saved(variable) for variable in variables], **more}}

    together = checkpoint.save_together(
        directory,
        entry,
        rank=int(process_set.rank()),
        keep=keep,
        owner=keeper,
        world_rank=int(hvd.rank()),
    )
    step: int = carry_out_together(together, process_set, _NAME)
    return step


def load_more(
    directory: str | os.PathLike[str], source: Any, step: int | None, variables: Sequence[Any]
) -> tuple[int, dict[str, Any]]:
    """As `load`; with what `save_more` saved besides."""
    keeper, process_set = _keeper_of(source)

    def check(entry: Mapping[str, Any]) -> None:
        training = entry.get("training")
        if not isinstance(training, dict) or not isinstance(training.get("variables"), list):
            raise StateMismatchError("the checkpoint is not one of horovod_sparse.tensorflow")
        keeper.check(entry)
        if variables:
            _check_variables(variables, training["variables"])

    place = {"rank": int(process_set.rank()), "size": int(process_set.size())}
    loaded = f"the optimizer and {len(variables)} variables"
    together = checkpoint.load_together(directory, check, **place, step=step, owner=keeper, loaded=loaded)
    entry = carry_out_together(together, process_set, _NAME)
    training = entry.pop("training")
    for variable, saved in zip(variables, training.pop("variables") if variables else (), strict=True):
        as_variable(variable).assign(_restored(saved))
    keeper.load_state_dict(entry)
    return int(entry["step"]), training


def _keeper_of(source: Any) -> tuple[StateKeeper, Any]:
    """What has the state, and the ranks."""
    keeper = getattr(source, "_horovod_sparse_keeper", None)
    if keeper is None and hasattr(source, "inner_optimizer"):  # what scales losses under tf-keras
        return _keeper_of(source.inner_optimizer)
    if not isinstance(keeper, StateKeeper):
        raise ArgumentError(
            "source",
            type(source),
            "a sparsifier such as Compression.topk(...), or an optimizer of DistributedOptimizer with one",
        )
    known = source if keeper.synchronizer is None else keeper.synchronizer
    process_set = getattr(known, "process_set", None) or hvd.global_process_set
    if not process_set.included():
        raise ArgumentError("source", type(source), "one whose process set includes this rank")
    return keeper, process_set


def _saved(variable: Any) -> dict[str, Any]:
    variable = as_variable(variable)
    array = np.asarray(variable.numpy())
    if array.dtype.hasobject:
        raise UnsupportedError(f"{variable.name} holds {variable.dtype.name}, a checkpoint holds numbers")
    # of bfloat16 and the like NumPy has bytes alone
    bits = np.frombuffer(array.tobytes(), np.uint8)
    return {"dtype": variable.dtype.name, "shape": list(array.shape), "bits": bits}


def _restored(saved: Mapping[str, Any]) -> np.ndarray:
    dtype = tf.as_dtype(saved["dtype"]).as_numpy_dtype
    array: np.ndarray = np.frombuffer(saved["bits"].tobytes(), dtype).reshape(saved["shape"])
    return array


def _check_variables(variables: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> None:
    own = [as_variable(variable) for variable in variables]
    here = [(variable.dtype.name, list(variable.shape)) for variable in own]
    theirs = [(one["dtype"], one["shape"]) for one in saved]
    if len(here) != len(theirs):
        raise StateMismatchError(f"the checkpoint has {len(theirs)} variables, {len(here)} are to be loaded")
    for variable, mine, other in zip(own, here, theirs, strict=True):
        if mine != other:
            raise StateMismatchError(
                f"the saved state is of another model: {variable.name} is {mine[0]} {mine[1]}, the "
                f"checkpoint has {other[0]} {other[1]} in its place"
            )
