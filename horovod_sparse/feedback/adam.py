"""Adam, AdamW and RMSprop: each rank divides its gradient by the root of a second moment of its own.

How long the whole batch's steps are (`whole_batch`) follows from how alike the ranks' gradients are. In every
step all ranks draw the same random signs, and each sends, beside its selection, its gradient's projection on
them (`leans` in checkpoints). The projections' squared mean estimates the mean gradient's square, and their
mean square that of one rank's: both up to the same factor, averaged over steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from horovod_sparse.arrays import Accumulator, FoldRule
from horovod_sparse.checks import check_number
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback.feedbacks import OwnStep, Rates, Rule, decay_weights
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.sparsifiers.base import step_generator

#: most elements of a projection; weight of a step's square in the running mean; and the most, as a multiple
#: of the mean, that a step's square counts
_SAMPLE, _NEWS, _MOST = 4096, 0.03, 10.0


@dataclass(frozen=True)
class Normalizing(Rule):
    """Base of rules that divide gradients by the root of their second moment v; the residual holds steps."""

    num_companions: ClassVar[int] = 1  # the second moment
    densities: ClassVar[tuple[float, float]] = (0.0, 0.01)
    adds_up: ClassVar[bool] = False
    default_beta2: ClassVar[float]
    #: whether v is divided by ``1 - beta2^t``
    corrected: ClassVar[bool]

    beta2: float | None = None
    eps: float | None = None
    clip_norm: float | None = None
    whole_batch: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.whole_batch, bool):
            raise ArgumentError("whole_batch", self.whole_batch, "True or False")
        if self.beta2 is not None:
            check_number("beta2", self.beta2, "a number between 0 and 1, or None", "(0, 1)")
        if self.eps is not None:
            check_number("eps", self.eps, "a number above 0, or None", "(0, inf)")
        super().__post_init__()

    @property
    def _beta2(self) -> float:
        return self.default_beta2 if self.beta2 is None else self.beta2

    def _rule_arguments(self, rates: Rates) -> dict[str, Any]:
        return {
            "masking": False,
            "moment": self._beta2,
            "eps": 1e-8 if self.eps is None else self.eps,
            "rate": rates.longer * rates.rate,
            "count": rates.age + 1 if self.corrected else math.inf,
        }

    def with_settings(self, **settings: float) -> Any:
        """Returns a copy of the rule; its arguments that are None get these settings of the optimizer."""
        found: dict[str, Any] = {
            name: value for name, value in settings.items() if getattr(self, name) is None
        }
        return dataclasses.replace(self, **found) if found else self

    def moment_factor(self, age: int, new_age: int) -> float:
        """Returns the factor for v that keeps its bias-corrected estimate when its age becomes `new_age`."""
        if not age:
            return 0.0
        return (1.0 - self._beta2**new_age) / (1.0 - self._beta2**age) if self.corrected else 1.0


@dataclass(frozen=True)
class AdamFeedback(Normalizing):
    """Adam's step per rank: ``acc = e + s eta z``, ``z = g / (sqrt(v / (1 - beta2^t)) + eps)``.

    Each rank normalizes its own gradient, adds the step to the residual, and sends the largest elements;
    after AdamW's decay the mean is subtracted: ``theta = theta (1 - eta weight_decay) - mean``. Moments
    behind plain error feedback meet every element as a spike that is 1 / density steps old: v becomes too
    large, and the first moment pushes on in an old direction. So v is of dense gradients,
    ``beta2 v + (1 - beta2) g^2``, and error feedback (a memory of 1 / density steps) is the first moment.

    v is of this rank's gradient, in float32 or float64, after clipping and without the loss's scale; of the
    host's sum with two levels; of the sum of accumulated passes. A gradient that is not finite, or whose
    square is not, leaves v as it is; a dropped step is taken out of v, to rounding. Sent elements keep their
    v. Checkpoints hold v and its number of steps. At another number of ranks a rank averages v of the ranks
    whose residuals it takes over; if other ranks share hosts, v starts anew.

    Args:
        beta2: in (0, 1); None: the optimizer's, or 0.999 where none is known.
        eps: above 0; None: the optimizer's, or 1e-8.
        clip_norm: see `MomentumCorrection`.
        whole_batch: steps as long as those of the mean gradient, whose v is up to P times smaller than that
            of one rank's part of the batch: ``s = (mean |g_i|^2 / |mean g_i|^2)^(1/2)``, at most sqrt(P),
            of means over about 30 steps. Ranks estimate s from projections of their gradients on random signs
            (`RankSimilarity`). False: s = 1.

    Example:
        >>> AdamFeedback(beta2=0.99).with_settings(beta2=0.95, eps=1e-6)
        AdamFeedback(beta2=0.99, eps=1e-06, clip_norm=None, whole_batch=True)
    """

    text_name: ClassVar[str] = "adam"
    default_beta2: ClassVar[float] = 0.999
    corrected: ClassVar[bool] = True
    optimizers: ClassVar[tuple[str, ...]] = ("AdamW", "Adam")
    keras: ClassVar[tuple[str, ...]] = ("AdamW", "Adam")
    moment: ClassVar[str] = "exp_avg_sq"
    keras_moment: ClassVar[str] = "_velocities"
    refused: ClassVar[Mapping[str, str]] = {
        "amsgrad": "the largest second moment so far is that of the noisiest of one rank's gradients"
    }

    def own_step(self, kind: str, group: Mapping[str, Any], age: int) -> OwnStep:
        rate, (sign, decay) = float(group["lr"]), decay_weights(group)
        own = self.with_settings(beta2=float(group["betas"][1]), eps=float(group["eps"]))
        if kind == "AdamW" or group.get("decoupled_weight_decay"):
            return OwnStep(own, (sign, 0.0), 1.0 - rate * decay, rate)
        return OwnStep(own, (sign, decay), 1.0, rate)

    def keras_own_step(self, optimizer: Any, rate: float, age: int) -> OwnStep:
        # Keras adds epsilon to the root of a moment that is not corrected
        corrected = 1.0 - float(optimizer.beta_2) ** (age + 1)
        eps = float(optimizer.epsilon) / math.sqrt(corrected)
        return OwnStep(self.with_settings(beta2=float(optimizer.beta_2), eps=eps), (1.0, 0.0), 1.0, rate)


@dataclass(frozen=True)
class RMSpropFeedback(Normalizing):
    """RMSprop's step per rank: ``z = g / (sqrt(v) + eps)``, without bias correction of v.

    Args:
        beta2: of v, called alpha or rho elsewhere; None: the optimizer's, or 0.99 where none is known.
        eps: see `AdamFeedback`.
        clip_norm: see `MomentumCorrection`.
        whole_batch: see `AdamFeedback`.

    Example:
        >>> RMSpropFeedback(beta2=0.9).moment_factor(3, 10)
        1.0
    """

    text_name: ClassVar[str] = "rmsprop"
    default_beta2: ClassVar[float] = 0.99
    corrected: ClassVar[bool] = False
    optimizers: ClassVar[tuple[str, ...]] = ("RMSprop",)
    keras: ClassVar[tuple[str, ...]] = ("RMSprop",)
    moment: ClassVar[str] = "square_avg"
    keras_moment: ClassVar[str] = "_velocities"
    refused: ClassVar[Mapping[str, str]] = {
        "centered": "what differs from one rank's mean gradient is nearly all of its gradient",
        "momentum": "error feedback is a momentum",
    }

    def own_step(self, kind: str, group: Mapping[str, Any], age: int) -> OwnStep:
        own = self.with_settings(beta2=float(group["alpha"]), eps=float(group["eps"]))
        return OwnStep(own, decay_weights(group), 1.0, float(group["lr"]))

    def keras_own_step(self, optimizer: Any, rate: float, age: int) -> OwnStep:
        own = self.with_settings(beta2=float(optimizer.rho), eps=float(optimizer.epsilon))
        return OwnStep(_KerasRMSprop(**vars(own)), (1.0, 0.0), 1.0, rate)


class _KerasRMSprop(RMSpropFeedback):
    """Keras' RMSprop, which has eps within the root: ``z = g / sqrt(v + eps)``."""

    def _rule_arguments(self, rates: Rates) -> dict[str, Any]:
        own = super()._rule_arguments(rates)
        return {**own, "eps": 0.0, "floor": own["eps"]}


class RankSimilarity:
    """Estimates how similar ranks' gradients of a bucket are, from projections on random signs."""

    def __init__(self, info: BucketInfo) -> None:
        self._info = info

    def step_ratio(self, leans: tuple[float, float]) -> float:
        """Returns how many times longer the whole batch's step is than one rank's: 1 to sqrt(P).

        Example:
            >>> [RankSimilarity(BucketInfo("b", 9, size=4)).step_ratio(leans) for leans in ((0, 0), (0.1, 1))]
            [1.0, 2.0]
        """
        mean, own = leans
        return max(mean / own, 1.0 / self._info.size) ** -0.5 if own else 1.0

    def fold(self, accumulator: Accumulator, gradient: Any, rule: FoldRule, step: int) -> None:
        """Folds a gradient, and computes its projection on random signs that are equal on all ranks."""
        n = self._info.num_elements
        drawn = step_generator(0, self._info, step).integers(0, 2 * n, min(n, _SAMPLE))
        indices, signs = (drawn >> 1).astype(np.int32), np.where(drawn & 1, 1.0, -1.0)
        accumulator.fold_with_projection(gradient, rule, indices, signs)

    def next_leans(self, leans: tuple[float, float], projections: np.ndarray) -> tuple[float, float]:
        """Returns the next `Progress.leans` (two running means) from a step's projections, one per rank."""
        squares = float(projections.mean()) ** 2, float(np.square(projections).mean())
        # before the first estimate, steps are as long as one rank's
        known = leans if any(leans) else (squares[1], squares[1])
        # else one bad batch would dominate hundreds of steps
        part = _NEWS * min(1.0, _MOST * known[1] / squares[1])
        mean, own = ((1 - _NEWS) * old + part * now for old, now in zip(known, squares, strict=True))
        return mean, own
