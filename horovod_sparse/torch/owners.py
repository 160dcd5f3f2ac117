"""Who synchronizes a parameter: the optimizer that was made for it last."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Owner(Protocol):
    """Who synchronizes parameters."""

    def retire(self) -> None:
        """Another owner has taken a parameter: this one synchronizes nothing any more."""


#: by parameter; neither it nor its owner is kept alive
_owners: Any = WeakTensorKeyDictionary()


def claim(owner: Owner, parameters: Iterable[torch.Tensor]) -> None:
    """Gives parameters to an owner. Owners that had one of them before are retired."""
    taken = list(parameters)
    before = {id(one): one for one in (_owner_of(parameter) for parameter in taken) if one is not None}
    for one in before.values():
        # what Horovod's own do with one another is its own affair
        if one is not owner and not (isinstance(one, _StockOwner) and isinstance(owner, _StockOwner)):
            one.retire()
    for parameter in taken:
        _owners[parameter] = weakref.ref(owner)


class _StockOwner:
    """Horovod's own optimizer, which has hooks of its own."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    def retire(self) -> None:
        """Its hooks begin nothing any more: they wait for passes that do not come."""
        if (optimizer := self._optimizer()) is not None:
            optimizer._grad_accs.clear()
            optimizer._allreduce_delay = dict.fromkeys(optimizer._allreduce_delay, sys.maxsize)


def claim_for_stock(optimizer: Any) -> None:
    """As `claim`, for an optimizer of Horovod's own."""
    optimizer._owner_of_parameters = _StockOwner(optimizer)
    claim(optimizer._owner_of_parameters, [p for group in optimizer.param_groups for p in group["params"]])


def _owner_of(parameter: torch.Tensor) -> Owner | None:
    reference = _owners.get(parameter)
    return None if reference is None else reference()
