"""A training on disk: all ranks save it together, and go on together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from horovod_sparse.errors import ArgumentError, StateMismatchError
from horovod_sparse.tensors.parts import ENTRY, checked_entry
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.driver import carry_out_together
from horovod_sparse.torch.methods import check_groups

_NAME = "horovod_sparse.checkpoint"
#: marks a tensor of a type that NumPy has not
_BITS = "horovod_sparse.bits"


def save(
    directory: str | os.PathLike[str], optimizer: Any, keep: int = 2, *, model: torch.nn.Module | None = None
) -> int:
    """Saves what every rank needs to go on; all ranks call it together, between the same two steps.

    A checkpoint is complete or is not there, whatever happens while it is written. It holds numbers, strings
    and arrays, nothing that is run or unpickled. With `model` it is all that `load` needs to go on bit for
    bit, buffers of every rank included. Without, save the model beside it, and first: a complete checkpoint
    then means that the model of its step is there.

    Args:
        directory: made if it is missing; the same for all ranks, or each host's own. One for each training.
        optimizer: of `horovod_sparse.torch.DistributedOptimizer`, with a sparsifier.
        keep: checkpoints that stay, this one among them.
        model: whose parameters and buffers are saved, too.

    Returns:
        The step: synchronizations done so far.

    Raises:
        UnsupportedError: on every rank, if a step is under way on any.
        StateMismatchError: on every rank, if they are at different steps.
        CheckpointError: on every rank, if one could not write, or the directory is another optimizer's. Older
            checkpoints are untouched.
        ArgumentError: for an optimizer without a sparsifier.

    Example:
        >>> import tempfile, horovod_sparse.torch as hvd; hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = hvd.DistributedOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     named_parameters=model.named_parameters(),
        ...     compression=hvd.Compression.topk(density=0.5),
        ... )
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     saved = hvd.save(directory, optimizer, model=model)
        ...     saved == hvd.load(directory, optimizer, model=model)
        True
    """
    from horovod_sparse.training.checkpoint import save_together

    synchronizer = _synchronizer_of(optimizer)

    def entry() -> dict[str, Any]:
        own = optimizer.state_dict()
        training = {"optimizer": {key: value for key, value in own.items() if key != ENTRY}}
        if model is not None:
            training["model"] = model.state_dict()
        return _plain({**own[ENTRY], "training": training})

    together = save_together(
        directory, entry, rank=synchronizer.rank, keep=keep, owner=synchronizer, world_rank=int(hvd.rank())
    )
    step: int = carry_out_together(together, synchronizer.process_set, _NAME)
    return step


def load(
    directory: str | os.PathLike[str],
    optimizer: Any,
    step: int | None = None,
    *,
    model: torch.nn.Module | None = None,
) -> int:
    """Goes on from the newest checkpoint that is complete on all ranks; all ranks call it together.

    At the number of ranks that saved it the training goes on bit for bit. At another one residuals are
    distributed so that their mean over ranks stays, and sparsifiers start anew; ranks need to see others'
    files then.

    Args:
        directory: as given to `save`.
        optimizer: like the one that was saved; a step that is under way is given up.
        step: that of the checkpoint, if not the newest.
        model: gets the parameters and buffers that were saved; left alone if left out.

    Returns:
        The step that `save` returned.

    Raises:
        CheckpointError: on every rank, if there is no complete checkpoint, or it was changed or damaged.
        StateMismatchError: on every rank, if it does not fit on any. Nothing has been loaded then.
        ArgumentError: for an optimizer without a sparsifier.
    """
    from horovod_sparse.training.checkpoint import load_together

    synchronizer = _synchronizer_of(optimizer)

    def check(entry: Mapping[str, Any]) -> None:
        checked_entry(synchronizer, _live(entry))
        training = _training_of(entry)
        check_groups(optimizer, training.get("optimizer"))
        if model is not None:
            _check_model(model, training.get("model"))

    place = {"rank": synchronizer.rank, "size": synchronizer.size}
    loaded = "" if model is None else "the optimizer and a model"
    together = load_together(directory, check, **place, step=step, owner=synchronizer, loaded=loaded)
    entry = carry_out_together(together, synchronizer.process_set, _NAME)
    training = _training_of(entry)
    if model is not None:
        model.load_state_dict(training["model"])
    kept = {key: value for key, value in entry.items() if key != "training"}
    optimizer.load_state_dict({**training["optimizer"], ENTRY: _live(kept)})
    return int(entry["step"])


def _synchronizer_of(optimizer: Any) -> Any:
    synchronizer = getattr(optimizer, "_synchronizer", None)
    if synchronizer is None:
        raise ArgumentError(
            "optimizer",
            type(optimizer),
            "one that horovod_sparse.torch.DistributedOptimizer made with a sparsifier, on a rank that its "
            "process set includes; save others with torch.save",
        )
    return synchronizer


def _training_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    training = _live(entry.get("training"))
    if not isinstance(training, dict):
        raise StateMismatchError("the checkpoint is not one of horovod_sparse.torch: it has no optimizer")
    return training


def _check_model(model: torch.nn.Module, saved: Any) -> None:
    if not isinstance(saved, Mapping):
        raise StateMismatchError("the checkpoint has no model: save it with model=, or load without")
    own = model.state_dict()
    shapes = {name: tuple(getattr(value, "shape", ())) for name, value in own.items()}
    theirs = {name: tuple(getattr(value, "shape", ())) for name, value in saved.items()}
    if shapes != theirs:
        name = next(iter(sorted(n for n in shapes.keys() | theirs.keys() if shapes.get(n) != theirs.get(n))))
        raise StateMismatchError(
            f"the saved state is of another model: {name} is {theirs.get(name, 'missing')} in the checkpoint "
            f"and {shapes.get(name, 'missing')} here"
        )


def _plain(value: Any) -> Any:
    """Puts arrays in place of a state_dict's tensors."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        try:
            return tensor.numpy()
        except TypeError:  # bfloat16 and the like
            bits = tensor.reshape(-1).view(torch.uint8).numpy()
            return {_BITS: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), bits]}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = map(_plain, value)
        return tuple(items) if isinstance(value, tuple) else list(items)
    return value


def _live(value: Any) -> Any:
    """Inverts `_plain`."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, Mapping):
        if set(value) == {_BITS}:
            dtype, shape, bits = value[_BITS]
            return torch.from_numpy(bits).view(getattr(torch, dtype)).reshape(shape)
        return {key: _live(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_live, value))
    return value
