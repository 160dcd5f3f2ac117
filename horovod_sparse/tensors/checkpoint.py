"""A checkpoint folder of a PyTorch training: all ranks save together, and load together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from horovod_sparse.errors import ArgumentError, StateMismatchError, UnsupportedError
from horovod_sparse.tensors.binding import Binding
from horovod_sparse.tensors.models import ENTRY, check_groups, checked_entry, inner_module
from horovod_sparse.training.training import Training

#: marks a tensor with a dtype that NumPy lacks
_BITS = "horovod_sparse.bits"


def save(
    directory: str | os.PathLike[str], training: Any, keep: int = 2, *, model: torch.nn.Module | None = None
) -> int:
    """Saves a checkpoint of all ranks, which call it together between two steps; returns its step.

    A checkpoint is complete or is not there, whatever happens while it is written. It holds numbers, strings
    and arrays, nothing that is run or unpickled. With `model` it is all that `load` needs to go on bit for
    bit, buffers of every rank included. Without, save the model beside it, and first: a complete checkpoint
    then means that the model of its step is there.

    Args:
        directory: made if it is missing; the same for all ranks, or each host's own. One for each training.
        training: what `horovod_sparse.torch.DistributedOptimizer` (with a sparsifier), `ddp.attach` or
            `LocalSteps` returned. Its optimizer is saved, too.
        keep: checkpoints that stay, this one among them.
        model: whose parameters and buffers are saved, too.

    Returns:
        The step: synchronizations done so far.

    Raises:
        UnsupportedError: on every rank, if a step is under way on any; and for shards of FSDP2.
        StateMismatchError: on every rank, if they are at different steps.
        CheckpointError: on every rank, if one could not write, or the directory is another training's. Older
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

    given, training = training, _training_of(training)
    made, failure = dict[str, Any](), None
    try:  # called here, since local steps wait for exchanges in the thread that runs `save_together`
        made = _make_entry(given, training, model)
    except Exception as error:
        failure = error

    def entry() -> dict[str, Any]:
        if failure is not None:
            raise failure
        return made

    place = {"rank": training.rank, "world_rank": training.engine.placement().world_rank}
    together = save_together(directory, entry, keep=keep, owner=training, **place)
    return int(training.engine.carry_out(together, training.topology, "checkpoint"))


def _make_entry(given: Any, training: Any, model: torch.nn.Module | None) -> dict[str, Any]:
    if training is given:
        entry = training.state_dict()
        with getattr(training, "common", contextlib.nullcontext)():  # without: a warning that ranks differ
            own = {} if training.optimizer is None else training.optimizer.state_dict()
    else:
        own = given.state_dict()
        entry = own[ENTRY]
    states = own.get("state", {})
    if isinstance(training, Binding):  # its entry has residuals and moments
        states = {number: {"step": one["step"]} for number, one in states.items() if "step" in one}
    kept: dict[str, Any] = {"optimizer": {"state": states, "param_groups": own.get("param_groups", [])}}
    if model is not None:
        kept["model"] = inner_module(model).state_dict()
    return dict(_to_arrays({**entry, "training": kept}))


def load(
    directory: str | os.PathLike[str],
    training: Any,
    step: int | None = None,
    *,
    model: torch.nn.Module | None = None,
) -> int:
    """Loads the newest checkpoint that is complete on all ranks, which call it together; returns its step.

    At the number of ranks that saved it the training goes on bit for bit. At another one residuals are
    distributed so that their mean over ranks stays, and sparsifiers start anew; ranks need to see others'
    files then.

    Args:
        directory: as given to `save`.
        training: like the one that was saved; a step that is under way is cancelled.
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

    given, training = training, _training_of(training)
    optimizer = training.optimizer

    def check(entry: Mapping[str, Any]) -> None:
        if not training.facts:
            training.ensure_parts()
        checked_entry(training, _to_tensors(entry))
        kept = _saved_states(entry)
        if optimizer is not None:
            check_groups(optimizer, kept.get("optimizer"))
        if model is not None:
            _check_model(inner_module(model), kept.get("model"))

    place = {"rank": training.rank, "size": training.size}
    loaded = "" if model is None else "the optimizer and a model"
    together = load_together(directory, check, **place, step=step, owner=training, loaded=loaded)
    entry = training.engine.carry_out(together, training.topology, "checkpoint")
    kept = _saved_states(entry)
    if model is not None:
        inner_module(model).load_state_dict(kept["model"])
    entry = _to_tensors({key: value for key, value in entry.items() if key != "training"})
    if optimizer is not None:
        optimizer.load_state_dict({**kept["optimizer"], ENTRY: entry})
    if training is given:  # one of Horovod's optimizers has included the entry
        training.load_state_dict(entry)
    return int(entry["step"])


def _training_of(given: Any) -> Any:
    training = getattr(given, "_synchronizer", given)
    if not isinstance(training, Training):
        raise ArgumentError(
            "training",
            type(given).__name__,
            "what attach, LocalSteps or DistributedOptimizer returned, with a sparsifier, on a rank that its "
            "process set includes; save others with torch.save",
        )
    if getattr(training.engine, "shard", None) is not None:
        raise UnsupportedError(
            "a model of FSDP2 is saved by torch.distributed.checkpoint within `with sync.common():`, and "
            "sync.state_dict() of each rank beside it"
        )
    return training


def _saved_states(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the optimizer's and the model's states in a checkpoint entry."""
    kept = _to_tensors(entry.get("training"))
    if not isinstance(kept, dict):
        raise StateMismatchError("the checkpoint has no optimizer, so PyTorch did not save it")
    return kept


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


def _to_arrays(state: Any) -> Any:
    """Returns a nested state with NumPy arrays in place of tensors."""

    def plain(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensor = value.detach().cpu().contiguous()
        try:
            return tensor.numpy()
        except TypeError:  # bfloat16 and the like
            bits = tensor.reshape(-1).view(torch.uint8).numpy()
            return {_BITS: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), bits]}

    return _pytree.tree_map(plain, state)


def _to_tensors(state: Any) -> Any:
    """Returns a nested state with tensors in place of NumPy arrays."""

    def tensor(value: Any) -> Any:
        if isinstance(value, dict):
            dtype, shape, bits = value[_BITS]
            return torch.from_numpy(bits).view(getattr(torch, dtype)).reshape(shape)
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    return _pytree.tree_map(tensor, state, is_leaf=lambda one: isinstance(one, dict) and set(one) == {_BITS})
