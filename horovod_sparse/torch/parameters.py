"""Which parameter a gradient belongs to: `compression=` is told neither name nor parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from horovod_sparse.errors import ArgumentError, UnsupportedError

__all__ = ["NamedParameters"]


class NamedParameters:
    """Parameters by name, and by the gradient they hold.

    Args:
        named_parameters: (name, parameter), names unique, as from ``model.named_parameters()``.

    Raises:
        ArgumentError: if these are not such pairs.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> parameters = NamedParameters(layer.named_parameters())
        >>> layer.bias.grad = torch.zeros(1)
        >>> parameters.owner(layer.bias.grad)[0]
        'bias'
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._pairs: list[tuple[str, torch.Tensor]] = [_checked(pair) for pair in named_parameters]
        names = [name for name, _ in self._pairs]
        twice = (
            sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        )
        if twice:
            raise ArgumentError("named_parameters", twice, "every name once")
        # backward visits parameters in nearly the same order every time: look first at the one that
        # followed last time, so that a step costs O(L) look-ups and not O(L^2)
        self._last = 0
        self._follower = {i: i - 1 for i in range(len(self._pairs))}

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def names(self) -> list[str]:
        """All names, in the order given."""
        return [name for name, _ in self._pairs]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All parameters, in the order given."""
        return [parameter for _, parameter in self._pairs]

    def owner(self, gradient: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Name and parameter whose `.grad` is this very tensor; None if there is none."""
        guess = self._follower.get(self._last, 0)
        for i in (guess, *range(len(self._pairs))):
            if 0 <= i < len(self._pairs) and self._pairs[i][1].grad is gradient:
                self._follower[self._last] = i
                self._last = i
                return self._pairs[i]
        return None

    def owner_or_copy(self, gradient: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """As `owner`; None only for what must be the dense copy of a sparse gradient (sparse_as_dense).

        Raises:
            UnsupportedError: if it is neither.
        """
        owner = self.owner(gradient)
        if owner is None and not any(
            parameter.grad is not None and parameter.grad.is_sparse for _, parameter in self._pairs
        ):
            raise UnsupportedError(
                f"a tensor of shape {tuple(gradient.shape)} is no gradient of a parameter that this "
                f"compressor knows ({', '.join(self.names[:4])}, ...): a sparsifier keeps a residual for "
                "every parameter, so it compresses nothing else. If you pass named_parameters to the "
                "compressor, name them all"
            )
        return owner


def _checked(pair: Any) -> tuple[str, torch.Tensor]:
    if (
        not isinstance(pair, tuple)
        or len(pair) != 2
        or not isinstance(pair[0], str)
        or not isinstance(pair[1], torch.Tensor)
    ):
        raise ArgumentError(
            "named_parameters", pair, "pairs (name, parameter), as from model.named_parameters()"
        )
    return pair
