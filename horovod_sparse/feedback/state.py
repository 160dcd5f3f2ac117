"""States of sparsifiers as plain values, for checkpoints: dicts, numbers, strings and arrays alone."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from horovod_sparse.errors import StateMismatchError

State = TypeVar("State")


def to_plain(state: Any, array: Callable[[np.ndarray], Any] = np.copy) -> dict[str, Any]:
    """A state dataclass as nested dicts that share nothing with it.

    Args:
        state: a dataclass of numbers, strings, arrays, lists or tuples of them, dicts of them, and
            further such dataclasses.
        array: makes the checkpoint's kind of array from a NumPy array (which it must copy).

    Returns:
        One entry per field.

    Raises:
        StateMismatchError: for a field of another type, by name.

    Example:
        >>> from horovod_sparse.sparsifiers import BucketInfo, MiCRO
        >>> to_plain(MiCRO().init(BucketInfo("w", 8)))
        {'step': 0, 'threshold': {'threshold': 0.0, 'correction': 1.0, 'share': -1.0, ...}}
    """
    plain: dict[str, Any] = _to_plain(state, array, type(state).__name__)
    return plain


def _to_plain(value: Any, array: Callable[[np.ndarray], Any], path: str) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            item.name: _to_plain(getattr(value, item.name), array, f"{path}.{item.name}")
            for item in dataclasses.fields(value)
        }
    if isinstance(value, np.ndarray):
        return array(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item, array, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_plain(item, array, f"{path}[{i}]") for i, item in enumerate(value))
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    raise StateMismatchError(f"{path} is a {type(value).__name__}, which a checkpoint cannot hold")


def shared_digest(states: Mapping[str, Any]) -> str:
    """A digest of what is equal on all ranks in the states of buckets: all but the fields marked `LOCAL`.

    Args:
        states: by bucket.

    Returns:
        16 hexadecimal digits.

    Example:
        >>> from horovod_sparse.sparsifiers import SparsifierState
        >>> shared_digest({"w": SparsifierState()}) == shared_digest({"w": SparsifierState(step=1)})
        False
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(states):
        digest.update(repr((name, _shared(states[name]))).encode())
    return digest.hexdigest()


def _shared(value: Any) -> Any:
    """Plain values that print alike where they are equal, bit for bit."""
    if dataclasses.is_dataclass(value):
        return [
            (item.name, _shared(getattr(value, item.name)))
            for item in dataclasses.fields(value)
            if not item.metadata.get("local")
        ]
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return [(str(key), _shared(item)) for key, item in sorted(value.items())]
    if isinstance(value, (list, tuple)):
        return [_shared(item) for item in value]
    return value


def from_plain(fresh: State, plain: Mapping[str, Any]) -> State:
    """A state as `to_plain` saved it.

    Args:
        fresh: a state as `Sparsifier.init` makes it for this bucket: says which fields there are, and
            of which type, dtype and shape. Not changed.
        plain: the saved one; arrays may be of any kind that NumPy can read.

    Returns:
        A new state of the type of `fresh`.

    Raises:
        StateMismatchError: if fields or shapes differ: another algorithm, another bucket, or another
            number of ranks. Fields marked `ADDED` may be missing: they came later.

    Example:
        >>> from horovod_sparse.sparsifiers import SparsifierState
        >>> from_plain(SparsifierState(), {"step": 7})
        SparsifierState(step=7)
    """
    state: State = _from_plain(fresh, plain, type(fresh).__name__)
    return state


def _from_plain(fresh: Any, plain: Any, path: str) -> Any:
    if dataclasses.is_dataclass(fresh) and not isinstance(fresh, type):
        names = {item.name for item in dataclasses.fields(fresh)}
        # what older checkpoints have not got says so itself
        added = {item.name for item in dataclasses.fields(fresh) if item.metadata.get("added")}
        if not isinstance(plain, Mapping) or not names - added <= set(plain) <= names:
            found = sorted(plain) if isinstance(plain, Mapping) else type(plain).__name__
            raise StateMismatchError(
                f"{path} has the fields {sorted(names)}, the saved state has {found}: it belongs to another "
                "algorithm or to another version of it"
            )
        given = {name: getattr(fresh, name) for name in added} | dict(plain)
        return type(fresh)(
            **{name: _from_plain(getattr(fresh, name), given[name], f"{path}.{name}") for name in names}
        )
    if isinstance(fresh, np.ndarray):
        as_numpy = getattr(plain, "numpy", None)  # PyTorch's and TensorFlow's tensors say it so
        saved = np.array(as_numpy() if callable(as_numpy) else plain, dtype=fresh.dtype)
        if saved.shape != fresh.shape:
            raise StateMismatchError(
                f"{path} has shape {fresh.shape}, the saved state has {saved.shape}: it belongs to another "
                "bucket or to another number of ranks"
            )
        return saved
    if isinstance(fresh, np.generic) and not isinstance(plain, (Mapping, list, tuple, str)):
        return fresh.dtype.type(plain)
    if isinstance(fresh, (list, tuple)) and len(fresh) == len(plain):
        return type(fresh)(
            _from_plain(*pair, f"{path}[{i}]") for i, pair in enumerate(zip(fresh, plain, strict=True))
        )
    if isinstance(fresh, Mapping) and set(fresh) == set(plain):
        return {key: _from_plain(fresh[key], plain[key], f"{path}.{key}") for key in fresh}
    # containers that grow while training goes on hold what was saved
    if isinstance(fresh, (bool, Mapping, list, tuple)) or fresh is None:
        return plain
    if isinstance(fresh, (int, float, str, bytes)):
        if not isinstance(plain, (int, float) if isinstance(fresh, (int, float)) else type(fresh)):
            raise StateMismatchError(f"{path} is {plain!r} in the saved state, not a {type(fresh).__name__}")
        return plain
    raise StateMismatchError(f"{path} is a {type(fresh).__name__}, which a checkpoint cannot hold")
