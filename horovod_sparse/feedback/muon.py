"""Muon: each rank makes the steps of its matrices orthogonal, by a momentum of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback.feedbacks import OwnStep, Rates, Rule, decay_weights

#: by the optimizer's `adjust_lr_fn`: factor of the rate of a matrix of so many rows and columns
_ADJUSTED: Mapping[str | None, Callable[[int, int], float]] = {
    None: lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


@dataclass(frozen=True)
class MuonFeedback(Rule):
    """Muon's step per rank: ``b = m b + (1 - m) g``, ``acc = e + eta s NS(b)``, b being the rank's momentum.

    NS is Newton and Schulz' iteration, which makes a matrix nearly orthogonal (singular values about 1). With
    Nesterov's momentum it gets ``(1 - m) g + m b``; s depends on the matrix's shape. Parameters move by the
    mean of the ranks' steps, which is not the step of their mean gradient. The elements of Muon's steps are
    about equally large, so the largest few hold a small share of a step, and a higher density is needed.

    Matrices have to be whole on a rank. Parameters of other shapes are a second optimizer's, as in PyTorch.

    Example:
        >>> MuonFeedback().num_companions
        1
    """

    text_name: ClassVar[str] = "muon"
    num_companions: ClassVar[int] = 1  # the momentum
    optimizers: ClassVar[tuple[str, ...]] = ("Muon",)
    moment: ClassVar[str] = "momentum_buffer"
    takes_whole: ClassVar[bool] = True
    densities: ClassVar[tuple[float, float]] = (0.05, 1.0)

    def _rule_arguments(self, rates: Rates) -> dict[str, Any]:
        return {"masking": False}  # what is folded is the step

    def own_step(self, kind: str, group: Mapping[str, Any], age: int) -> OwnStep:
        rate, (sign, decay) = float(group["lr"]), decay_weights(group)
        if group["adjust_lr_fn"] not in _ADJUSTED:
            allowed = "None, 'original' or 'match_rms_adamw'"
            raise ArgumentError("adjust_lr_fn", group["adjust_lr_fn"], allowed)
        return OwnStep(self, (sign, 0.0), 1.0 - rate * decay, rate, Matrices(group))


class Matrices:
    """Computes Muon's momentum and step of single matrices; a gradient's NaN or Inf enter its step alone.

    Args:
        group: the optimizer's parameter group.
    """

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._group, self._last = group, float(group["momentum"])

    def update_momentum(self, momentum: Any, gradient: Any) -> None:
        momentum.lerp_(gradient.where(gradient.isfinite().all(), momentum), 1.0 - self._last)

    def undo_momentum(self, momentum: Any, gradient: Any) -> None:
        """Reverts `update_momentum` up to rounding, when a step is cancelled."""
        if self._last:  # without momentum the next `update_momentum` overwrites it
            finite = gradient.isfinite().all()
            momentum.copy_(momentum.lerp(gradient, 1.0 - 1.0 / self._last).where(finite, momentum))

    def step(self, momentum: Any, gradient: Any) -> Any:
        """Returns a matrix's step, after `update_momentum`; NaN or Inf if the gradient has one."""
        update = gradient.lerp(momentum, self._last) if self._group["nesterov"] else momentum
        update = update.where(gradient.isfinite().all(), gradient)
        made = orthogonal(update, self._group["ns_coefficients"], self._group["ns_steps"], self._group["eps"])
        rate = float(self._group["lr"]) * _ADJUSTED[self._group["adjust_lr_fn"]](*update.shape)
        return made.to(momentum.dtype).mul_(rate)


def orthogonal(matrix: Any, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Any:
    """Returns nearly the nearest orthogonal matrix, in bfloat16, by Newton-Schulz iterations.

    Each step applies ``a s + b s^3 + c s^5`` to the singular values, which are at most 1 before.
    """
    a, b, c = coefficients
    is_high = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_high else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        square = x @ x.T
        x = x.addmm(square.addmm(square, square, beta=b, alpha=c), x, beta=a)
    return x.T if is_high else x
