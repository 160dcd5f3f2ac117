"""Hooks on parameters that keep nothing alive, and give a parameter to the optimizer that was made last."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Owner", "claim"]


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
    before = {id(one): one for one in (_owner_of(parameter) for parameter in taken) if one is not None}
    for one in before.values():
        if one is not owner:
            one.retire()
    for parameter in taken:
        _owners[parameter] = weakref.ref(owner)
    return [parameter.register_post_accumulate_grad_hook(_Hook(owner)) for parameter in taken]


def _owner_of(parameter: torch.Tensor) -> Owner | None:
    reference = _owners.get(parameter)
    return None if reference is None else reference()
