"""What of a PyTorch training has to be equal on all ranks: parameters, optimizer state and settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_sparse.training.drift import COLUMNS, Entry, word_sums

_ROW_BYTES = 8 * COLUMNS


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as an entry of a check; see `Entry`. Its digest is the same on any device."""

    name: str
    tensor: torch.Tensor

    @property
    def kind(self) -> str:
        return f"{str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)}"

    def sums(self) -> NDArray[np.uint64]:
        return word_sums(self.read()) if self.tensor.device.type == "cpu" else device_sums(self._bytes())

    def read(self) -> NDArray[np.uint8]:
        return np.asarray(self._bytes().cpu().numpy())

    def write(self, values: NDArray[np.uint8]) -> None:
        new = torch.from_numpy(np.array(values)).view(self.tensor.dtype).view(self.tensor.shape)
        with torch.no_grad():
            self.tensor.copy_(new)

    def _bytes(self) -> torch.Tensor:
        return self.tensor.detach().contiguous().view(-1).view(torch.uint8)


def device_sums(values: torch.Tensor) -> NDArray[np.uint64]:
    """As `word_sums`; rows are added up on the device, and one row comes to the host."""
    if values.storage_offset() % 8:  # words have to begin at their multiples
        values = values.clone()
    whole = values.numel() // _ROW_BYTES * _ROW_BYTES
    sums = values[:whole].view(torch.int64).view(-1, COLUMNS).sum(0).cpu().numpy().view(np.uint64)
    return np.asarray(sums + word_sums(values[whole:].cpu().numpy()), np.uint64)


@dataclass(frozen=True)
class ValueEntry:
    """A number, or several, in Python's own types."""

    name: str
    value: Any
    assign: Callable[[Any], Any]

    @property
    def kind(self) -> str:
        return f"number[{self.read().size}]"

    def sums(self) -> NDArray[np.uint64]:
        return word_sums(self.read())

    def read(self) -> NDArray[np.uint8]:
        return np.frombuffer(json.dumps(self.value).ljust(_NUMBER_BYTES).encode(), np.uint8)

    def write(self, values: NDArray[np.uint8]) -> None:
        new = json.loads(values.tobytes())
        self.assign(tuple(new) if isinstance(self.value, tuple) else new)


#: room for a number in decimal, so that other numbers are of the same kind
_NUMBER_BYTES = 64


def shared_entries(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None
) -> list[Entry]:
    """What has to be equal on all ranks, parameters first."""
    entries: list[Entry] = [TensorEntry(name, tensor) for name, tensor in parameters.items()]
    if optimizer is None:
        return entries
    for name, tensor in parameters.items():
        if tensor in optimizer.state:  # asking for it otherwise would make an empty one
            entries += _inside(f"{{}} of {name}", optimizer.state[tensor])
    shared = set(map(id, parameters.values()))
    for number, group in enumerate(optimizer.param_groups):
        if any(id(parameter) in shared for parameter in group["params"]):
            options = {key: value for key, value in group.items() if key != "params"}
            entries += _inside(f"{{}} of group {number}", options, group)
    return entries


def _inside(words: str, held: Mapping[str, Any], into: Any = None) -> Iterator[Entry]:
    """The numbers and tensors of a state, or of a group's options."""
    into = held if into is None else into
    for key in sorted(held, key=str):
        yield from _entries(words.format(key), held[key], partial(into.__setitem__, key))


def _entries(name: str, value: Any, assign: Callable[[Any], Any]) -> Iterator[Entry]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield TensorEntry(name, value)
    elif _is_number(value) or (isinstance(value, tuple) and value and all(map(_is_number, value))):
        yield ValueEntry(name, value, assign)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            assign_item = value.__setitem__ if isinstance(value, list) else _refused
            yield from _entries(f"{name}[{number}]", item, partial(assign_item, number))


def _refused(*_arguments: Any) -> None:
    raise TypeError("an item of a tuple is not replaced: this is a bug, please report it")


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))
