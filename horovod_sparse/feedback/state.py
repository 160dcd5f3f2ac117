"""What a bucket tells: of a step, for telemetry; and its state as plain values, for checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from horovod_sparse.errors import StateMismatchError

State = TypeVar("State")

#: whole number, of what arithmetic on floats can take
_LARGEST = 2**63


@dataclass(frozen=True)
class Member:
    """A parameter's place in a bucket: elements [start, stop)."""

    name: str
    start: int
    stop: int


@dataclass
class BucketStep:
    """What a bucket did in one step, for telemetry.

    Attributes:
        bucket: name.
        num_elements: n.
        num_target: k, what was asked for.
        num_selected: elements this rank selected; with two levels, its host.
        num_received: elements that came back, duplicates of different ranks counted each.
        bytes_sent: payload bytes this rank put into collectives; with two levels, in those among hosts.
        bytes_by_round: both, round by round.
        kinds_by_round: names of the requests.
        bytes_inside: payload bytes that this rank put into collectives within its host, besides.
        residual_norm: L2 norm of what this rank holds back after this step: ||e_{i,t+1}|| in ExDyna's
            Algorithm 1. Without error feedback, of what is lost.
        global_error: ExDyna, Eq. (1), ``||e_t|| = mean over ranks of ||e_{i,t}||``: of what the ranks
            held back when this step began (0 in the first; the norms after it travel with the next
            step's messages). NaN where the messages do not carry norms.
        fold_seconds: of the fused pass.
        select_seconds: of everything else done on this rank between collectives.
        facts: the algorithm's own (threshold, imbalance, density_error, ...).
    """

    bucket: str
    num_elements: int
    num_target: int = 0
    num_selected: int = 0
    num_received: int = 0
    bytes_sent: int = 0
    bytes_by_round: list[int] = field(default_factory=list)
    kinds_by_round: list[str] = field(default_factory=list)
    bytes_inside: int = 0
    residual_norm: float = 0.0
    global_error: float = math.nan
    fold_seconds: float = 0.0
    select_seconds: float = 0.0
    facts: dict[str, float] = field(default_factory=dict)


def to_plain(state: Any, array: Callable[[np.ndarray], Any] = np.copy) -> dict[str, Any]:
    """A state dataclass as nested dicts that share nothing with it."""
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
        return [_to_plain(item, array, f"{path}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    raise StateMismatchError(f"{path} is a {type(value).__name__}, which a checkpoint cannot hold")


def shared_digest(states: Mapping[str, Any]) -> str:
    """A digest of what is equal on all ranks in the states of buckets: all but the fields marked `LOCAL`."""
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


def from_plain(fresh: State, plain: Mapping[str, Any], path: str = "") -> State:
    """A state as `to_plain` saved it."""
    state: State = _from_plain(fresh, plain, path or type(fresh).__name__)
    return state


def _from_plain(fresh: Any, plain: Any, path: str) -> Any:
    if dataclasses.is_dataclass(fresh) and not isinstance(fresh, type):
        names = {item.name for item in dataclasses.fields(fresh)}
        # what older checkpoints have not got says so itself
        added = {item.name for item in dataclasses.fields(fresh) if item.metadata.get("added")}
        former: frozenset[str] = getattr(fresh, "FORMER", frozenset())
        if not isinstance(plain, Mapping) or not names - added <= set(plain) - former <= names:
            found = sorted(map(str, plain)) if isinstance(plain, Mapping) else type(plain).__name__
            raise StateMismatchError(
                f"{path} has the fields {sorted(names)}, the saved state has {found}: it belongs to another "
                "algorithm or to another version of it"
            )
        fields = {name: getattr(fresh, name) for name in names}
        loaded = type(fresh)(
            **{
                name: _from_plain(value, plain[name], f"{path}.{name}") if name in plain else value
                for name, value in fields.items()
            }
        )
        flaw = loaded.flaw(fresh) if hasattr(loaded, "flaw") else ""
        if flaw:
            raise StateMismatchError(f"{path}.{flaw} in the saved state")
        return loaded
    if isinstance(fresh, np.ndarray):
        return _array_like(fresh, plain, path)
    if isinstance(fresh, np.generic):
        return fresh.dtype.type(_number_like(fresh.item(), plain, path))
    if isinstance(fresh, Mapping) and isinstance(plain, Mapping):
        if set(fresh) == set(plain):
            return {key: _from_plain(fresh[key], plain[key], f"{path}.{key}") for key in fresh}
        return {str(key): _number_like(0.0, item, f"{path}.{key}") for key, item in plain.items()}
    if isinstance(fresh, (list, tuple)) and isinstance(plain, (list, tuple)):
        # containers that grow while training goes on hold the numbers that were saved
        return type(fresh)(_number_like(0.0, item, f"{path}[{i}]") for i, item in enumerate(plain))
    if fresh is None:
        return plain if plain is None or isinstance(plain, str) else _number_like(0.0, plain, path)
    if isinstance(fresh, (bool, str, bytes)) and isinstance(plain, type(fresh)):
        return plain
    if isinstance(fresh, (int, float)) and not isinstance(fresh, bool):
        return _number_like(fresh, plain, path)
    raise StateMismatchError(
        f"{path} is a {type(plain).__name__} in the saved state, not a {type(fresh).__name__}"
    )


def _array_like(fresh: np.ndarray, plain: Any, path: str) -> np.ndarray:
    saved = as_array(plain)
    if isinstance(plain, (list, tuple)):  # as JSON gives it back
        with contextlib.suppress(ValueError):
            saved = np.array(plain)
    if saved is None or saved.dtype.kind not in "iuf":
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
        raise StateMismatchError(f"{path} holds numbers in the saved state that are no {fresh.dtype}")
    return converted


def _number_like(fresh: float, plain: Any, path: str) -> float:
    if not is_number(plain):
        raise StateMismatchError(
            f"{path} is a {type(plain).__name__} in the saved state, not a {type(fresh).__name__}"
        )
    if not math.isfinite(plain):
        raise StateMismatchError(f"{path} is {plain} in the saved state")
    number: float = plain
    if isinstance(fresh, int) and plain != int(plain):
        raise StateMismatchError(f"{path} is {plain} in the saved state, not a whole number")
    return number


def is_number(value: object) -> bool:
    """Whether a saved value is a number that arithmetic on floats can take."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) <= _LARGEST


def as_array(value: Any) -> np.ndarray | None:
    """A saved array, of whatever kind that NumPy can read; None for anything else."""
    if isinstance(value, np.ndarray):
        return value
    as_numpy = getattr(value, "numpy", None)  # PyTorch's and TensorFlow's tensors say it so
    if not callable(as_numpy):
        return None
    try:
        array = as_numpy()
    except (TypeError, RuntimeError):  # of a type, or in a form, that NumPy has not
        return None
    return array if isinstance(array, np.ndarray) else None
