"""All ranks' states on disk: a folder per checkpoint, which is complete or is not there.

::

    directory/step-0000001200.1/
        manifest.json       step, number of ranks, digest, and length and checksum of every file
        rank-00000.npz      one per rank: numbers, strings and arrays, nothing that is run or unpickled

Every rank writes into a hidden folder and waits until its bytes are on the disk; when all have, the folder
is renamed in one piece, and only then are older ones removed. So a process that is killed, or a disk that
fills up, leaves the checkpoints that were complete before. Directories may be shared by all ranks or be
each host's own: each host publishes what it sees. A directory holds one training's.

The number behind a step is 1, and grows by 1 whenever a training saves that was taken back: so what it saves
then is newer than the later steps that it has left.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from horovod_sparse import checks
from horovod_sparse.collectives import Synchronization, shared_lines
from horovod_sparse.errors import ArgumentError, CheckpointError, StateMismatchError
from horovod_sparse.training.collective_errors import raise_together
from horovod_sparse.training.encoding import read_tree, write_tree
from horovod_sparse.training.state import check_entry, joined, old_ranks_of

Result = TypeVar("Result")

_FORMAT = 1
_NAME = re.compile(r"step-(\d{10})\.(\d+)")
_MANIFEST = "manifest.json"
#: of further ranks' entries, at another number of ranks
_ADDED_UP = ("rank", "size", "residuals", "companions")
_log = logging.getLogger("horovod_sparse")
ONE_EACH = "Give each training a directory of its own, or load what is there first, to go on with it"


@dataclass(frozen=True)
class _Found:
    """A complete checkpoint, or what is wrong with it."""

    folder: Path
    manifest: Mapping[str, Any]
    fault: str = ""


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
    """Saves every rank's entry; returns when the checkpoint is complete on all of them."""

    def begin() -> tuple[Path, int]:
        root = root_of(directory)
        checks.check_count("keep", keep)
        root.mkdir(parents=True, exist_ok=True)
        attempt, last = max(map(age, published(root)), default=(1, -1))
        return root, attempt + (step <= last)  # taken back

    root, attempt = yield from done_by_all(begin, "make the directory")
    everyone = yield from shared_lines([step, digest, attempt, uuid.uuid4().hex[:8]])
    steps, digests, attempts, tokens = zip(*everyone, strict=True)
    if len(set(steps)) > 1 or len(set(digests)) > 1:
        raise StateMismatchError(
            f"ranks save different states: at steps {list(steps)}, with digests {list(digests)}. Save on all "
            "ranks after the same step"
        )
    name = f"step-{step:010d}.{max(attempts)}"
    hidden, folder = root / f".saving-{name}-{tokens[0]}", root / name

    own = hidden / _file_of(rank)

    def write() -> list[Any]:
        hidden.mkdir(exist_ok=True)
        _write(own, entry)
        return [own.stat().st_size, _checksum(own)]

    def publish(manifest: Mapping[str, Any], turn: bool) -> None:
        if (rank == 0) == turn and not folder.exists():
            _publish(hidden, folder, manifest, rank)
        if not turn and json.loads((folder / _MANIFEST).read_bytes()) != manifest:
            raise CheckpointError(
                f"another training has published {name} in {root} at the same time. {ONE_EACH}"
            )

    try:
        facts = yield from done_by_all(write, f"write {own.name}")
        everyone = yield from shared_lines(facts)
        manifest = _sealed(
            {
                "format": _FORMAT,
                "step": step,
                "size": len(everyone),
                "digest": digest,
                "ranks": list(ranks),
                "files": {_file_of(other): list(fact) for other, fact in enumerate(everyone)},
            }
        )
        # the first rank publishes; then whoever does not see it, which is each host with a disk of its own
        for turn in (True, False):
            yield from done_by_all(functools.partial(publish, manifest, turn), f"publish {name}")
    except BaseException:
        # what is half written is of no use to anybody
        with contextlib.suppress(OSError):
            own.unlink()
            hidden.rmdir()
        raise
    with contextlib.suppress(OSError):  # what cannot be removed now is removed next time
        _prune(root, keep, name)
    return folder


def read_checkpoint(
    directory: str | os.PathLike[str], *, rank: int, size: int, step: int | None = None
) -> Synchronization[dict[str, Any]]:
    """The entry of this rank, of the newest checkpoint that is complete on all ranks."""
    found = yield from done_by_all(lambda: survey(root_of(directory)), f"look into {directory}")
    everyone = yield from shared_lines(
        {name: [item.manifest.get("seal", ""), item.fault] for name, item in found.items()}
    )
    name = _chosen(everyone, step, root_of(directory))
    manifest = found[name].manifest
    if rank == 0 and name != max(set().union(*everyone), key=age):
        _log.warning("%s is the newest checkpoint that is complete on all ranks; newer ones are not", name)

    def read() -> dict[str, Any]:
        parts: list[dict[str, Any]] = []
        for old in old_ranks_of(rank, manifest["size"], size):
            part = _checked(found[name], old)
            check_entry(part, None, "")
            if size != manifest["size"] and (part["rank"], part["size"]) != (old, manifest["size"]):
                raise CheckpointError(
                    f"{_file_of(old)} of {name} has what rank {part['rank']} of {part['size']} saved"
                )
            # a model once, not once for each of its ranks
            parts.append({key: part[key] for key in _ADDED_UP} if parts else part)
        return joined(parts, rank, size) if size != manifest["size"] else parts[0]

    return (yield from done_by_all(read, f"read {name}"))


def _chosen(everyone: list[dict[str, list[str]]], step: int | None, root: Path) -> str:
    """The newest name that all ranks have alike; raises on all ranks alike."""
    names = sorted(set().union(*everyone), key=age, reverse=True)
    if step is not None:
        names = [name for name in names if _key(name)[0] == step]
    for name in names:
        for rank, mine in enumerate(everyone):
            if name in mine and mine[name][1]:
                others = sorted({_key(other)[0] for other in set().union(*everyone)} - {_key(name)[0]})
                raise CheckpointError(
                    f"{root / name} on rank {rank}: {mine[name][1]}. It was complete once, so it was "
                    f"changed or damaged since. Restore it, or load an earlier one: step= one of "
                    f"{others or 'none'}"
                )
        if all(name in mine for mine in everyone):
            if len({mine[name][0] for mine in everyone}) > 1:
                raise CheckpointError(f"{root / name} is another checkpoint on some ranks than on others")
            return name
    lacking = [rank for rank, mine in enumerate(everyone) if not mine]
    raise CheckpointError(
        f"{root} holds no complete checkpoint{'' if step is None else f' of step {step}'} that all ranks "
        f"see; ranks that see none at all: {lacking or 'none'}"
    )


def root_of(directory: str | os.PathLike[str]) -> Path:
    """A directory's one name; an `ArgumentError` for what is no path."""
    try:
        return Path(directory).resolve()
    except (TypeError, ValueError) as error:
        raise ArgumentError("directory", directory, "a path, on every rank") from error


def survey(root: Path) -> dict[str, _Found]:
    """What this rank sees, by name."""
    found = {}
    for name in published(root):
        folder, step = root / name, _key(name)[0]
        try:
            manifest, fault = json.loads((folder / _MANIFEST).read_bytes()), ""
            if not isinstance(manifest, dict) or _sealed(manifest) != manifest:
                manifest, fault = {}, f"{_MANIFEST} does not have the checksum that it says"
            else:
                fault = _fault_of(manifest, step)
        except (OSError, ValueError, RecursionError) as error:
            manifest, fault = {}, f"{_MANIFEST} cannot be read ({type(error).__name__}: {error})"
        found[name] = _Found(folder, manifest, fault)
    return found


def _fault_of(manifest: Mapping[str, Any], step: int) -> str:
    """What is wrong with a manifest, which anybody may have written, before anything is made of it."""
    if manifest.get("format") != _FORMAT:
        return f"format {str(manifest.get('format'))[:40]}, where this version reads {_FORMAT}"
    if manifest.get("step") != step:
        return f"its manifest is of step {str(manifest.get('step'))[:40]}"
    files, size = manifest.get("files"), manifest.get("size")
    if not isinstance(files, dict) or type(size) is not int or size != len(files) or not size:
        return f"{_MANIFEST} does not list one file for each rank"
    for rank in range(size):
        fact = files.get(_file_of(rank))
        if not (isinstance(fact, list) and list(map(type, fact)) == [int, str]):
            return f"{_MANIFEST} does not say length and checksum of {_file_of(rank)}"
    return ""


def published(root: Path) -> list[str]:
    """Of every folder that was published."""
    try:
        return [path.name for path in root.iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []


def _key(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"another rank names a checkpoint {name!r}")
    return int(match[1]), int(match[2])


def age(name: str) -> tuple[int, int]:
    """By which later ones are larger: a training that was taken back goes on under a number of its own."""
    step, attempt = _key(name)
    return attempt, step


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}.npz"


def _sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """With the checksum of all the rest."""
    rest = {key: value for key, value in manifest.items() if key != "seal"}
    return rest | {
        "seal": hashlib.blake2b(json.dumps(rest, sort_keys=True).encode(), digest_size=16).hexdigest()
    }


def _publish(hidden: Path, folder: Path, manifest: Mapping[str, Any], rank: int) -> None:
    """Makes the folder appear in one piece; of several ranks of a host that try, one succeeds."""
    try:
        draft = hidden / f".manifest-{rank}"
        with open(draft, "w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, hidden / _MANIFEST)
        _sync_folder(hidden)
        os.rename(hidden, folder)
    except FileNotFoundError:
        if not folder.exists():
            raise
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prune(root: Path, keep: int, name: str) -> None:
    """Removes all but the newest, and what interrupted saves have left behind."""
    names = sorted(published(root), key=age)
    for old in [other for other in names if other != name][: max(len(names) - keep, 0)]:
        # gone in one piece, too: half a checkpoint under its name would look damaged
        with contextlib.suppress(OSError):
            os.rename(root / old, root / f".removed-{old}")
    for path in root.iterdir():
        if path.name.startswith(".removed-") or (path.name.startswith(".saving-") and name not in path.name):
            shutil.rmtree(path, ignore_errors=True)


def done_by_all(work: Callable[[], Result], what: str) -> Synchronization[Result]:
    """What this rank's work gives, once it has gone well on all ranks."""
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


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.blake2b(digest_size=16)
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def _checked(found: _Found, rank: int) -> dict[str, Any]:
    """The entry in a file, if it is the one that was written."""
    name = _file_of(rank)
    path, (length, checksum) = found.folder / name, found.manifest["files"][name]
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, or this rank does not see it")
    if path.stat().st_size != length:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, {length} were written: it is torn")
    if _checksum(path) != checksum:
        raise CheckpointError(f"{path} was changed since it was written: its checksum differs")
    return _read(path)


def _write(path: Path, entry: Mapping[str, Any]) -> None:
    with open(path, "wb") as file:
        try:
            write_tree(file, dict(entry))
        except StateMismatchError as error:
            raise CheckpointError(str(error)) from error
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            entry: dict[str, Any] = read_tree(file)
            return entry
    except StateMismatchError as error:
        raise CheckpointError(f"{path} is no checkpoint: {error}") from error
