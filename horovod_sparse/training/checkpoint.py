"""Checkpoints of all ranks on disk: a folder for each, which is complete or is not there.

::

    directory/step-0000001200.1/
        manifest.json       step, ranks, and a name that no other save has
        rank-00000.npz      one per rank: numbers, strings and arrays, nothing that is run or unpickled

Every rank writes into a hidden folder and waits until its bytes are on the disk; when all have, the folder
is renamed in one piece, and only then are older ones removed. So a process that is killed, or a disk that
fills up, leaves the checkpoints that were complete before. Directories may be shared by all ranks or be
each host's own: each host publishes what it sees. A directory holds one training's.

A rank's file repeats the manifest and the rank, and zip has a CRC: a changed byte, a changed manifest, and a
file of another rank, step or save are errors.

The number behind a step is the attempt, from 1: it grows whenever a training saves that went back to an
earlier step, so that its checkpoints are newer than those of the later steps before.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from horovod_sparse import checks
from horovod_sparse.collectives import Synchronization, gather_values
from horovod_sparse.errors import ArgumentError, CheckpointError, HorovodSparseError, StateMismatchError
from horovod_sparse.training.agreement import compare
from horovod_sparse.training.collective_errors import raise_together
from horovod_sparse.training.encoding import read_tree, write_tree
from horovod_sparse.training.state import FORMAT, joined, old_ranks_of

Result = TypeVar("Result")

_NAME = re.compile(r"step-(\d{10})\.(\d+)")
_MANIFEST = "manifest.json"
#: prefix of folders that interrupted saves leave behind
_HIDDEN = ".saving-", ".removed-"
#: fields read of further ranks' entries, at another number of ranks; the model is read once
_ADDED_UP = ("rank", "size", "residuals", "companions", "passes")
_log = logging.getLogger("horovod_sparse")
ONE_EACH = "Give each training a directory of its own, or load what is there first, to go on with it"
#: by directory: the training that this process last saved there or loaded from there
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
    """Saves every rank's entry after the same step; all ranks call it. Returns the step."""

    def prepare() -> tuple[Path, bool, Mapping[str, Any]]:
        """Returns the directory, whether only other ranks saved there last, and this rank's entry."""
        return (root := root_of(directory)), _was_saved_by_others(root, owner, world_rank), entry()

    root, foreign, made = yield from call_on_all(prepare, f"save to {directory}")
    ranks, strangers = zip(*(yield from gather_values([world_rank, foreign])), strict=True)
    if all(strangers):
        raise CheckpointError(f"{root} holds checkpoints of other ranks than {list(ranks)}. {ONE_EACH}")
    equal = json.dumps([made["recipe"], made["plan"], sorted(made.get("training", ()))], sort_keys=True)
    digest, step = hashlib.blake2b(equal.encode(), digest_size=8).hexdigest(), int(made["step"])
    yield from write_checkpoint(root, made, step=step, digest=digest, rank=rank, keep=keep, ranks=ranks)
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
    """Reads this rank's entry and checks it by `check`; raises on all ranks if one rank's fails."""
    yield from compare({"step of the checkpoint": str(step), "what is loaded": loaded or "the optimizer"})
    entry = yield from read_checkpoint(directory, rank=rank, size=size, step=step)
    yield from call_on_all(lambda: check(entry), f"load {directory}")
    _owners[root_of(directory)] = owner
    return entry


def has_checkpoint(directory: str | os.PathLike[str]) -> Synchronization[bool]:
    """True on all ranks if any rank sees a complete checkpoint."""
    found = yield from call_on_all(lambda: complete_checkpoints(root_of(directory)), f"look into {directory}")
    return any((yield from gather_values(bool(found))))


def _was_saved_by_others(root: Path, owner: Any, world_rank: int) -> bool:
    """True if ranks without this one saved last; raises if another optimizer of this process uses `root`."""
    if _owners.get(root, owner) is not owner:
        gc.collect()  # a reference cycle may keep an unused optimizer
    if _owners.get(root, owner) is not owner:
        raise CheckpointError(
            f"{root} holds checkpoints of another optimizer or sparsifier of this process. {ONE_EACH}"
        )
    found = {} if root in _owners else read_manifests(root)
    ranks = found[max(found, key=attempt_and_step)][0].get("ranks") if found else None
    return isinstance(ranks, list) and world_rank not in ranks


def write_checkpoint(
    directory: str | os.PathLike[str],
    entry: Mapping[str, Any],
    *,
    step: int,
    digest: str,
    rank: int,
    keep: int,
    ranks: Sequence[int] = (),
) -> Synchronization[Path]:
    """Writes every rank's entry to disk; returns once the checkpoint is complete on all ranks."""

    def begin() -> tuple[Path, int]:
        root = root_of(directory)
        checks.check_count("keep", keep)
        root.mkdir(parents=True, exist_ok=True)
        for path in root.iterdir():
            if path.name.startswith(_HIDDEN):
                shutil.rmtree(path, ignore_errors=True)
        attempt, last = max(map(attempt_and_step, complete_checkpoints(root)), default=(1, -1))
        return root, attempt + (step <= last)  # the training went back

    root, attempt = yield from call_on_all(begin, "make the directory")
    everyone = yield from gather_values([step, digest, attempt, uuid.uuid4().hex])
    steps, digests, attempts, tokens = zip(*everyone, strict=True)
    if len(set(steps)) > 1 or len(set(digests)) > 1:
        raise StateMismatchError(
            f"ranks save different states: at steps {list(steps)}, with digests {list(digests)}. Save on all "
            "ranks after the same step"
        )
    name, size = f"step-{step:010d}.{max(attempts)}", len(everyone)
    hidden, folder = root / f".saving-{tokens[0]}", root / name
    manifest = {"format": FORMAT, "step": step, "size": size, "ranks": list(ranks), "save": tokens[0]}

    def write() -> None:
        hidden.mkdir(exist_ok=True)
        _write_file(hidden / _file_name(rank), {"manifest": manifest, "rank": rank, "entry": entry})
        with contextlib.suppress(FileExistsError), open(hidden / _MANIFEST, "x") as file:
            json.dump(manifest, file)  # by the first rank on this disk
        _fsync(hidden / _MANIFEST)

    def publish(by_rank_0: bool) -> None:
        if (rank == 0) == by_rank_0 and not folder.exists():
            with contextlib.suppress(FileNotFoundError):  # another rank on this disk was faster
                _fsync(hidden)
                os.rename(hidden, folder)
            _fsync(root)
        if not by_rank_0 and json.loads((folder / _MANIFEST).read_bytes()) != manifest:
            raise CheckpointError(
                f"another training has published {name} in {root} at the same time. {ONE_EACH}"
            )

    try:
        yield from call_on_all(write, f"write {_file_name(rank)}")
    except HorovodSparseError:  # on all ranks
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    # rank 0 publishes; then each host with its own disk, whose ranks do not see rank 0's folder
    yield from call_on_all(lambda: publish(True), f"publish {name}")
    yield from call_on_all(lambda: publish(False), f"publish {name}")
    for old in sorted(complete_checkpoints(root), key=attempt_and_step)[:-keep]:
        removed = root / f".removed-{old}"
        with contextlib.suppress(OSError):  # the next save removes it
            os.rename(root / old, removed)  # in one piece, too
            shutil.rmtree(removed)
    return folder


def read_checkpoint(
    directory: str | os.PathLike[str], *, rank: int, size: int, step: int | None = None
) -> Synchronization[dict[str, Any]]:
    """Reads this rank's entry of a checkpoint (the newest); joins entries saved by more or fewer ranks."""
    found = yield from call_on_all(lambda: read_manifests(root_of(directory)), f"look into {directory}")
    root = root_of(directory)
    everyone = yield from gather_values(
        {name: [manifest.get("save"), fault] for name, (manifest, fault) in found.items()}
    )
    name = _choose_newest(everyone, step, root)
    manifest = found[name][0]

    def read() -> dict[str, Any]:
        parts: list[dict[str, Any]] = []
        for old in old_ranks_of(rank, manifest["size"], size):
            part = _read_entry(root / name / _file_name(old), manifest, old)
            parts.append({key: part[key] for key in _ADDED_UP if key in part} if parts else part)
        return joined(parts, rank, size)

    return (yield from call_on_all(read, f"read {name}"))


def _choose_newest(everyone: list[dict[str, list[str]]], step: int | None, root: Path) -> str:
    """Returns the newest checkpoint that all ranks see alike; raises the same error on all ranks."""
    names = sorted(set().union(*everyone), key=attempt_and_step, reverse=True)
    for name in [one for one in names if step in (None, attempt_and_step(one)[1])]:
        for rank, mine in enumerate(everyone):
            if fault := mine.get(name, ("", ""))[1]:
                raise CheckpointError(
                    f"{root / name} on rank {rank}: {fault}. It was complete once, so it was changed or "
                    f"damaged since. Restore it, or load an earlier one by step= (of {', '.join(names)})"
                )
        if all(name in mine for mine in everyone):
            if len({mine[name][0] for mine in everyone}) > 1:
                raise CheckpointError(f"{root / name} is of different saves on ranks: give all one directory")
            return name
        _log.warning("%s is not complete on all ranks: trying an older checkpoint", root / name)
    lacking = [rank for rank, mine in enumerate(everyone) if not mine]
    raise CheckpointError(
        f"{root} holds no complete checkpoint{'' if step is None else f' of step {step}'} that all ranks "
        f"see: give all the directory of save(). Ranks that see none at all: {lacking or 'none'}"
    )


def root_of(directory: str | os.PathLike[str]) -> Path:
    """Returns a directory's absolute path; raises `ArgumentError` if it is no path."""
    try:
        return Path(directory).resolve()
    except (TypeError, ValueError) as error:
        raise ArgumentError("directory", directory, "a path, on every rank") from error


def read_manifests(root: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Reads the manifests of all checkpoints; returns each with its fault, or an empty text."""
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for name in complete_checkpoints(root):
        try:
            manifest = json.loads((root / name / _MANIFEST).read_bytes())
            known, at, size, token = (manifest[key] for key in ("format", "step", "size", "save"))
            if (known, at) != (FORMAT, attempt_and_step(name)[1]) or type(size) is not int or size < 1:
                raise ValueError(f"format {known}, step {at}, {size} ranks, not format {FORMAT}"[:200])
            found[name] = {**manifest, "save": str(token)}, ""
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            found[name] = {}, f"{_MANIFEST} cannot be read ({type(error).__name__}: {error})"
    return found


def complete_checkpoints(root: Path) -> list[str]:
    """Returns the names of complete checkpoints, unsorted; an incomplete one has a hidden name."""
    try:
        return [path.name for path in root.iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []


def attempt_and_step(name: str) -> tuple[int, int]:
    """Returns (attempt, step) of a checkpoint's name; a training that went back begins a new attempt."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"another rank names a checkpoint {name!r}: install one version on all ranks")
    return int(match[2]), int(match[1])


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.npz"


def call_on_all(work: Callable[[], Result], what: str) -> Synchronization[Result]:
    """Calls `work` on this rank, and returns its result; raises on all ranks if it fails on any."""
    done: list[Result] = []
    failure: Exception | None = None
    try:
        done.append(work())
    except OSError as error:
        failure = CheckpointError(f"could not {what}: {error}")
    except Exception as error:  # of whatever type: others would wait for this rank
        failure = error
    yield from raise_together(failure)
    return done[0]


def _write_file(path: Path, tree: Mapping[str, Any]) -> None:
    with open(path, "wb") as file:
        write_tree(file, tree)
    _fsync(path)


def _fsync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_entry(path: Path, manifest: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Reads the entry that a rank saved; raises if the file is of another rank or save."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, or this rank does not see it: restore or share it")
    try:
        with open(path, "rb") as file:
            saved = read_tree(file)
    except StateMismatchError as error:
        raise CheckpointError(f"{path} was changed since it was written: {error}") from error
    if not isinstance(saved, dict) or (saved.get("manifest"), saved.get("rank")) != (manifest, rank):
        raise CheckpointError(f"{path} is of another rank or another save than {_MANIFEST} beside it")
    entry: dict[str, Any] = saved["entry"]
    return entry
