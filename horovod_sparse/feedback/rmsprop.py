"""RMSprop: as Adam, but the second moment is not corrected for its beginning at 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from horovod_sparse.feedback.adam import Normalizing
from horovod_sparse.feedback.feedbacks import OwnStep, Rates, weights_of


@dataclass(frozen=True)
class RMSpropFeedback(Normalizing):
    """As `AdamFeedback`, but ``z = g / (sqrt(v) + eps)``: the first steps are large, as RMSprop's.

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
        return OwnStep(own, weights_of(group), 1.0, float(group["lr"]))

    def keras_own_step(self, optimizer: Any, rate: float, age: int) -> OwnStep:
        own = self.with_settings(beta2=float(optimizer.rho), eps=float(optimizer.epsilon))
        return OwnStep(_WithinRoot(**vars(own)), (1.0, 0.0), 1.0, rate)


class _WithinRoot(RMSpropFeedback):
    """Keras' RMSprop, ``z = g / sqrt(v + eps)``."""

    def _rule_arguments(self, rates: Rates) -> dict[str, Any]:
        own = super()._rule_arguments(rates)
        return {**own, "eps": 0.0, "floor": own["eps"]}
