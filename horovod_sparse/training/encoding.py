"""Converts states to numbers, strings, containers and arrays, and these to zip files without pickle."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import math
import reprlib
import zipfile
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np

from horovod_sparse.errors import StateMismatchError

_TREE = "tree"
#: whole number that arithmetic on floats can take
_LARGEST = 2**63


def to_bytes(value: Any) -> bytes:
    stream = io.BytesIO()
    write_tree(stream, value)
    return stream.getvalue()


def from_bytes(data: bytes) -> Any:
    """Decodes what `to_bytes` wrote, without running code that the data might contain."""
    return read_tree(io.BytesIO(data))


def write_tree(file: IO[bytes], value: Any) -> None:
    """Writes nested dicts, lists and arrays to a file: arrays one by one, the rest as JSON."""
    arrays: dict[str, Any] = {}
    tree = json.dumps(_flatten(value, arrays)).encode()
    arrays[_TREE] = np.frombuffer(tree, np.uint8)
    np.savez(file, **arrays)


def read_tree(file: IO[bytes]) -> Any:
    """Reads what `write_tree` wrote, after checking every checksum in the file."""
    try:
        with zipfile.ZipFile(file) as members:
            if damaged := members.testzip():
                raise ValueError(f"{damaged} is damaged: its checksum differs")
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return _unflatten(json.loads(arrays[_TREE].tobytes()), arrays)
    except Exception as error:  # whatever damaged bytes make of zipfile, NumPy and JSON
        raise StateMismatchError(f"the saved state cannot be read ({str(error)[:500]})") from error


def _flatten(value: Any, arrays: dict[str, Any]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:  # objects would be pickled
        name = f"a{len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"tuple": [_flatten(item, arrays) for item in value]}
    if isinstance(value, list):
        return [_flatten(item, arrays) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_flatten(key, arrays), _flatten(item, arrays)] for key, item in value.items()]}
    raise StateMismatchError(f"an entry to save has a {type(value).__name__}; allowed: arrays, numbers, text")


def _unflatten(tree: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(tree, list):
        return [_unflatten(item, arrays) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "array":
        return arrays[content]
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "tuple":
        return tuple(_unflatten(item, arrays) for item in content)
    return {_unflatten(key, arrays): _unflatten(item, arrays) for key, item in content}


def to_plain(state: Any, array: Callable[[np.ndarray], Any] = np.copy, *, shared: bool = False) -> Any:
    """Returns a state dataclass as nested dicts; `shared` leaves out the fields marked `LOCAL`."""
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        return {
            item.name: to_plain(getattr(state, item.name), array, shared=shared)
            for item in dataclasses.fields(state)
            if not (shared and item.metadata.get("local"))
        }
    if isinstance(state, np.ndarray):
        return array(state)
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, (list, tuple)):
        return [to_plain(item, array, shared=shared) for item in state]
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    raise StateMismatchError(f"a sparsifier's state has a {type(state).__name__}: use arrays, numbers, text")


def shared_digest(states: Mapping[str, Any]) -> str:
    """Returns a hash of those fields of all states that are equal on all ranks (not marked `LOCAL`)."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(states):
        plain = to_plain(states[name], lambda own: (str(own.dtype), own.shape, own.tobytes()), shared=True)
        digest.update(repr((name, plain)).encode())
    return digest.hexdigest()


def from_plain(fresh: Any, plain: Any, path: str = "") -> Any:
    """Makes a state from `to_plain`'s dicts; raises if fields, types or shapes are not `fresh`'s."""
    path = path or type(fresh).__name__
    if dataclasses.is_dataclass(fresh) and not isinstance(fresh, type):
        names = {item.name for item in dataclasses.fields(fresh)}
        if not isinstance(plain, Mapping) or set(plain) != names:
            found = sorted(map(str, plain)) if isinstance(plain, Mapping) else type(plain).__name__
            raise StateMismatchError(
                f"{path} has the fields {sorted(names)}, the saved state has {found}: it belongs to another "
                "algorithm or to another version of it"
            )
        return type(fresh)(
            **{name: from_plain(getattr(fresh, name), plain[name], f"{path}.{name}") for name in names}
        )
    if isinstance(fresh, np.ndarray):
        return _checked_array(fresh, plain, path)
    if isinstance(fresh, tuple) and isinstance(plain, (list, tuple)):  # of numbers; an empty one grows
        if fresh and len(plain) != len(fresh):
            raise StateMismatchError(f"{path} has {len(plain)} numbers in the saved state, not {len(fresh)}")
        return tuple(from_plain(0.0, item, f"{path}[{i}]") for i, item in enumerate(plain))
    if fresh is None:
        return None if plain is None else from_plain(0.0, plain, path)
    if isinstance(fresh, (bool, str)):
        sound = isinstance(plain, type(fresh))
    else:
        whole = type(plain) is int and abs(plain) <= _LARGEST
        sound = whole or (type(plain) is float and math.isfinite(plain))
        sound = sound and (isinstance(fresh, float) or plain == int(plain))
    if not sound:
        kind = "a finite number" if isinstance(fresh, float) else f"of type {type(fresh).__name__}"
        raise StateMismatchError(f"{path} is {reprlib.repr(plain)} in the saved state, allowed: {kind}")
    return plain


def _checked_array(fresh: np.ndarray, plain: Any, path: str) -> np.ndarray:
    try:
        saved = np.asarray(plain)
    except (TypeError, ValueError, RuntimeError):  # of types, or in forms, that NumPy has not
        saved = np.empty(0, object)
    if saved.dtype.kind not in "iuf":
        raise StateMismatchError(f"{path} is a {type(plain).__name__} in the saved state, not an array")
    if saved.shape != fresh.shape:
        raise StateMismatchError(
            f"{path} has shape {fresh.shape}, the saved state has {saved.shape}: it belongs to another "
            "bucket or to another number of ranks"
        )
    if not np.isfinite(saved).all():
        raise StateMismatchError(f"{path} holds NaN or Inf in the saved state")
    converted = saved.astype(fresh.dtype)
    if fresh.dtype.kind in "iu" and not np.array_equal(converted, saved):
        raise StateMismatchError(f"{path} in the saved state holds numbers that do not fit {fresh.dtype}")
    return converted
