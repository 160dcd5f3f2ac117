"""Saved state as bytes without pickle: numbers, strings, containers of them, and NumPy arrays."""

from __future__ import annotations

import base64
import io
import json
import math
import zipfile
from typing import Any, BinaryIO

import numpy as np

from horovod_sparse.errors import StateMismatchError

_TREE = "tree"


def to_bytes(value: Any) -> bytes:
    stream = io.BytesIO()
    write_tree(stream, value)
    return stream.getvalue()


def from_bytes(data: bytes) -> Any:
    """The inverse of `to_bytes`. Runs no code that the data might hold."""
    return read_tree(io.BytesIO(data))


def write_tree(file: BinaryIO, value: Any) -> None:
    """Writes what `to_bytes` gives to a file that is open."""
    arrays: dict[str, Any] = {}
    tree = json.dumps(_flatten(value, arrays)).encode()
    arrays[_TREE] = np.frombuffer(tree, np.uint8)
    np.savez(file, **arrays)


def read_tree(file: BinaryIO) -> Any:
    """The inverse of `write_tree`; see `from_bytes`."""
    try:
        _check_lengths(file)
        with np.load(file, allow_pickle=False) as arrays:
            unread = set(arrays.files)
            return _unflatten(json.loads(arrays[_TREE].tobytes()), arrays, unread)
    except Exception as error:  # whatever damaged bytes make of zipfile, NumPy and JSON
        raise StateMismatchError(f"the saved state cannot be read ({str(error)[:500]})") from error


def _check_lengths(file: BinaryIO) -> None:
    """Refuses members and arrays that say they are longer than the file, before memory is taken for them."""
    length = file.seek(0, io.SEEK_END)
    file.seek(0)
    with zipfile.ZipFile(file) as members:
        # several may stand for the same bytes
        if sum(info.file_size for info in members.infolist()) > length:
            raise ValueError("its members together are longer than it is")
        for info in members.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > length:
                raise ValueError(f"{info.filename} is not as it is written")
            with members.open(info) as member:
                version = np.lib.format.read_magic(member)
                if version != (1, 0):  # of headers beyond 64 KiB, which no array of ours has
                    raise ValueError(f"{info.filename} has version {version}")
                shape, _, dtype = np.lib.format.read_array_header_1_0(member)
                if math.prod(shape) * dtype.itemsize > length or not dtype.itemsize:
                    raise ValueError(f"{info.filename} says it has shape {shape}")
    file.seek(0)


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
        return {"dict": [[str(key), _flatten(item, arrays)] for key, item in value.items()]}
    raise StateMismatchError(f"a checkpoint cannot hold a {type(value).__name__}")


def _unflatten(tree: Any, arrays: Any, unread: set[str]) -> Any:
    if isinstance(tree, list):
        return [_unflatten(item, arrays, unread) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "array":
        unread.remove(content)  # named twice it would take memory twice
        return arrays[content]
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "tuple":
        return tuple(_unflatten(item, arrays, unread) for item in content)
    return {key: _unflatten(item, arrays, unread) for key, item in content}
