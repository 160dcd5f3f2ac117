"""Converts tensors for NumPy, buckets, checkpoints and comparisons between ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree

from horovod_sparse.errors import ArgumentError, StateMismatchError
from horovod_sparse.training.agreement import COLUMNS, Replicated, ReplicatedArray, word_sums

_NAMES = {getattr(torch, name): name for name in ("float32", "float64", "float16", "bfloat16")}


def local(tensor: Any) -> torch.Tensor:
    """Returns this rank's shard of a sharded tensor (DTensor), or the given tensor."""
    own: torch.Tensor = tensor.detach()
    return own.to_local() if hasattr(own, "to_local") else own


def dtype_name(tensor: torch.Tensor) -> str | None:
    """Returns the name of a dtype that gradients may have, or None for any other dtype."""
    return _NAMES.get(tensor.dtype)


def unscaled(gradient: torch.Tensor, loss_scale: float) -> torch.Tensor:
    """Returns a gradient divided by its loss scale; half types become float32."""
    if loss_scale == 1.0:
        return gradient.detach()
    return gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)) * (1.0 / loss_scale)


def on_host(saved: Any) -> Any:
    """Returns a nested checkpoint entry with its tensors on the CPU; called before an entry is loaded."""
    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), saved)


def memory_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns strides of a gapless array with the tensor's shape and its order of elements in memory.

    A gradient is added to a buffer fastest when both are walked in the same order (channels_last).
    """
    expected = 1
    for length, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if length == 1:
            continue
        if stride != expected:
            return tuple(torch.empty(tensor.shape, device="meta").stride())
        expected *= length
    return tuple(tensor.stride())


def flat(tensor: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
    """Returns a tensor's elements in the order of its memory (or of `strides`), as a view if possible."""
    own = local(tensor)
    strides = memory_strides(own) if strides is None else tuple(strides)
    if own.numel() > 1 and own.stride() != strides:
        own = torch.empty_strided(own.shape, strides, dtype=own.dtype, device=own.device).copy_(own)
    return own.as_strided((own.numel(),), (1,), own.storage_offset())


def view_into(buffer: torch.Tensor, start: int, parameter: torch.Tensor) -> torch.Tensor:
    """Returns the parameter's elements in a flat buffer, from `start` on, as a view in its shape."""
    return buffer.as_strided(parameter.shape, memory_strides(parameter), start)


def readable_tensor(array: np.ndarray) -> torch.Tensor:
    """Returns a tensor that shares a NumPy array's memory if possible; for reading only."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def redistribute(entries: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Returns the entry for a rank at a new number of ranks; the mean residual stays exactly.

    Of P old ranks and Q new ones, old rank o belongs to new rank o mod Q if Q < P, and to all new ranks
    r with r mod P = o otherwise. Each of its h holders takes ``e_o * Q / (P * h)``; so the mean over new
    ranks is ``1/Q * sum_o h * e_o * Q / (P * h)``, the mean over old ranks.

    Args:
        entries: of all old ranks, in any order; of sharded parameters those of all that had the same shard.
        rank: new rank, from 0.
        size: Q.

    Returns:
        An entry for ``load_state_dict``: of an optimizer as ``state["horovod_sparse"]``, of
        `horovod_sparse.ddp` as it is.

    Raises:
        StateMismatchError: if the entries are not those of all old ranks of one run.
        ArgumentError: if there is no such rank.
    """
    from horovod_sparse.training.state import redistributed

    if not entries:
        raise ArgumentError("entries", entries, "what state_dict() returned on each old rank")
    if len({repr(entry.get("shard")) for entry in entries}) > 1:
        raise StateMismatchError("the entries belong to several shards: give the entries of one shard only")
    return redistributed([on_host(entry) for entry in entries], rank, size)


_ROW_BYTES = 8 * COLUMNS
#: room for a number in decimal
_NUMBER_BYTES = 64


@dataclass(frozen=True)
class ReplicatedTensor:
    """A `Replicated` tensor; its checksums are the same on any device."""

    name: str
    tensor: torch.Tensor

    @property
    def dtype_and_shape(self) -> str:
        return f"{str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)}"

    def checksums(self) -> NDArray[np.uint64]:
        return word_sums(self.read()) if self.tensor.device.type == "cpu" else device_word_sums(self._bytes())

    def read(self) -> NDArray[np.uint8]:
        return np.asarray(self._bytes().cpu().numpy())

    def _bytes(self) -> torch.Tensor:
        return self.tensor.detach().contiguous().view(-1).view(torch.uint8)


def device_word_sums(values: torch.Tensor) -> NDArray[np.uint64]:
    """Computes `word_sums` of a tensor on its device, and copies only the sums to the host."""
    if values.storage_offset() % 8:  # words have to begin at their multiples
        values = values.clone()
    whole = values.numel() // _ROW_BYTES * _ROW_BYTES
    sums = values[:whole].view(torch.int64).view(-1, COLUMNS).sum(0).cpu().numpy().view(np.uint64)
    return np.asarray(sums + word_sums(values[whole:].cpu().numpy()), np.uint64)


def replicated_arrays(
    parameters: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    *,
    with_state: bool = True,
) -> list[Replicated]:
    """Returns entries for what has to be equal on all ranks: settings, parameters, optimizer state."""
    entries: list[Replicated] = []
    shared = set(map(id, parameters.values()))
    for number, group in enumerate([] if optimizer is None else optimizer.param_groups):
        if any(id(parameter) in shared for parameter in group["params"]):
            options = {key: value for key, value in group.items() if key != "params"}
            entries += _nested_entries(f"{{}} of group {number}", options)
    entries += [ReplicatedTensor(name, local(tensor)) for name, tensor in parameters.items()]
    for name, tensor in parameters.items():
        if with_state and optimizer is not None and tensor in optimizer.state:  # asking makes an empty one
            entries += _nested_entries(f"{{}} of {name}", optimizer.state[tensor])
    return entries


def _nested_entries(words: str, values: Mapping[str, Any]) -> Iterator[Replicated]:
    """Yields entries for the numbers and tensors in `values`; a key's entry is named `words.format(key)`."""
    for key in sorted(values, key=str):
        yield from _entries(words.format(key), values[key])


def _entries(name: str, value: Any) -> Iterator[Replicated]:
    numbers = value if isinstance(value, tuple) and value else [value]
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield ReplicatedTensor(name, local(value))
    elif all(isinstance(one, (bool, int, float)) for one in numbers):
        text = json.dumps(value).ljust(_NUMBER_BYTES)  # so that other numbers are of the same kind
        yield ReplicatedArray(name, np.frombuffer(text.encode(), np.uint8))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _entries(f"{name}[{number}]", item)
