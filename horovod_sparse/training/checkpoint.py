"""Saves and loads a training on all ranks together; two trainings never share a directory."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from horovod_sparse.collectives import Synchronization, shared_lines
from horovod_sparse.errors import CheckpointError
from horovod_sparse.training import checkpoint_folder as folder
from horovod_sparse.training.agreement import compared

#: by directory: the training that this process has saved there, or loaded from there, last
_owners: weakref.WeakValueDictionary[Path, Any] = weakref.WeakValueDictionary()


def save_together(
    directory: str | os.PathLike[str],
    entry: Callable[[], Mapping[str, Any]],
    *,
    rank: int,
    keep: int,
    owner: Any,
    world_rank: int,
) -> Synchronization[int]:
    """Saves every rank's entry, after the same step of all ranks; returns the step."""

    def make() -> tuple[Path, bool, Mapping[str, Any]]:
        root = folder.root_of(directory)
        return root, _is_of_others(root, owner, world_rank), entry()

    root, foreign, made = yield from folder.done_by_all(make, f"save to {directory}")
    ranks, strangers = zip(*(yield from shared_lines([world_rank, foreign])), strict=True)
    if all(strangers):
        raise CheckpointError(
            f"{root} holds checkpoints of other ranks than {list(ranks)}. {folder.ONE_EACH}"
        )
    equal = json.dumps([made["recipe"], made["plan"], sorted(made.get("training", ()))], sort_keys=True)
    digest, step = hashlib.blake2b(equal.encode(), digest_size=8).hexdigest(), int(made["step"])
    yield from folder.write_checkpoint(
        root, made, step=step, digest=digest, rank=rank, keep=keep, ranks=ranks
    )
    _owners[root] = owner
    return step


def load_together(
    directory: str | os.PathLike[str],
    check: Callable[[Mapping[str, Any]], None],
    *,
    rank: int,
    size: int,
    step: int | None,
    owner: Any,
    loaded: str = "",
) -> Synchronization[dict[str, Any]]:
    """Reads an entry and has `check` refuse it; an error is raised on all ranks. Assigns nothing.

    Args:
        loaded: what is loaded beside the optimizer, in words; the same on all ranks.
    """
    yield from compared({"step of the checkpoint": str(step), "what is loaded": loaded or "the optimizer"})
    entry = yield from folder.read_checkpoint(directory, rank=rank, size=size, step=step)
    yield from folder.done_by_all(lambda: check(entry), f"load {directory}")
    _owners[folder.root_of(directory)] = owner
    return entry


def is_anything_there(directory: str | os.PathLike[str]) -> Synchronization[bool]:
    """True if any rank sees a complete checkpoint."""

    def look() -> bool:
        return bool(folder.published(folder.root_of(directory)))

    return any((yield from shared_lines((yield from folder.done_by_all(look, f"look into {directory}")))))


def _is_of_others(root: Path, owner: Any, world_rank: int) -> bool:
    """True if ranks without this one saved the newest checkpoint, and this process did not load it."""
    if _owners.get(root, owner) is not owner:
        gc.collect()  # an optimizer that nobody has any more may lie in a circle
    if _owners.get(root, owner) is not owner:
        raise CheckpointError(
            f"{root} holds checkpoints of another optimizer or sparsifier of this process. {folder.ONE_EACH}"
        )
    found = {} if root in _owners else folder.survey(root)
    ranks = found[max(found, key=folder.age)][0].get("ranks") if found else None
    return isinstance(ranks, list) and world_rank not in ranks
