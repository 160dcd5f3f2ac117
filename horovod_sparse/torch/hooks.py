"""Hooks on parameters that keep nothing alive, and give a parameter to the optimizer that was made last."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Owner(Protocol):
    """Who is told of gradients."""

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """After every accumulation into the parameter's gradient."""

    def retire(self) -> None:
        """Another owner has taken a parameter: nothing is told any more."""


#: by parameter; neither it nor its owner is kept alive
_owners: Any = WeakTensorKeyDictionary()


class _Hook:
    """Tells an owner as long as it lives.

    PyTorch's garbage collection does not see what a hook on a parameter refers to. A hook that referred
    to the owner, which refers to the parameter, would keep both for ever.
    """

    def __init__(self, owner: Owner) -> None:
        self._tell: Callable[[], Callable[[torch.Tensor], None] | None] = weakref.WeakMethod(
            owner.on_gradient
        )

    def __call__(self, parameter: torch.Tensor) -> None:
        if (tell := self._tell()) is not None:
            tell(parameter)


def claim(owner: Owner, parameters: Iterable[torch.Tensor]) -> list[Any]:
    """Registers the owner's hooks. Owners that had one of the parameters before are retired.

    Args:
        owner: of the parameters from now on.
        parameters: leaves that require a gradient.

    Returns:
        Handles, to remove the hooks.
    """
    taken = list(parameters)
    _own(owner, taken)
    return [parameter.register_post_accumulate_grad_hook(_Hook(owner)) for parameter in taken]


class _StockOwner:
    """Horovod's own optimizer, which has hooks of its own."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Nobody calls this."""

    def retire(self) -> None:
        """Its hooks begin nothing any more: they wait for passes that do not come."""
        if (optimizer := self._optimizer()) is not None:
            optimizer._grad_accs.clear()
            optimizer._allreduce_delay = dict.fromkeys(optimizer._allreduce_delay, sys.maxsize)


def claim_for_stock(optimizer: Any) -> None:
    """As `claim`, for an optimizer of Horovod's own."""
    optimizer._owner_of_parameters = _StockOwner(optimizer)
    _own(optimizer._owner_of_parameters, [p for group in optimizer.param_groups for p in group["params"]])


def _own(owner: Owner, taken: list[torch.Tensor]) -> None:
    """Notes the owner, and retires those before it."""
    before = {id(one): one for one in (_owner_of(parameter) for parameter in taken) if one is not None}
    for one in before.values():
        # what Horovod's own do with one another is its own affair
        if one is not owner and not (isinstance(one, _StockOwner) and isinstance(owner, _StockOwner)):
            one.retire()
    for parameter in taken:
        _owners[parameter] = weakref.ref(owner)


def _owner_of(parameter: torch.Tensor) -> Owner | None:
    reference = _owners.get(parameter)
    return None if reference is None else reference()
