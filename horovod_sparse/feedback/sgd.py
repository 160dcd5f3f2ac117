"""SGD: each rank has a velocity of its own, whose steps it selects from and sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback.feedbacks import OwnStep, Rates, Rule, decay_weights


@dataclass(frozen=True)
class VelocityFeedback(Rule):
    """SGD's step per rank: ``u = m u + g,  acc = e + eta u``; sending clears no velocity.

    With Nesterov's momentum ``acc = e + eta (g + m u)``. At density 1 that is SGD with momentum of the mean
    gradient: momentum is linear. Weight decay comes with the gradient. With every > 1 or
    delay > 0 ranks step ahead (see `training.moves`).

    Args:
        momentum: m, in [0, 1); 0 keeps no velocity. None: the optimizer's, which it may not contradict.
        nesterov: whether the optimizer has it; None: the optimizer's.
        clip_norm: see `MomentumCorrection`.
    """

    text_name: ClassVar[str] = "sgd"
    optimizers: ClassVar[tuple[str, ...]] = ("SGD",)
    keras: ClassVar[tuple[str, ...]] = ("SGD",)
    moment: ClassVar[str] = "momentum_buffer"
    keras_moment: ClassVar[str] = "momentums"
    keras_sign: ClassVar[float] = -1.0
    steps_ahead: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, str]] = {
        "dampening": "a parameter's first step is not damped, and those of a bucket begin at different steps"
    }

    momentum: float | None = None
    nesterov: bool | None = None
    clip_norm: float | None = None

    @property
    def num_companions(self) -> int:  # type: ignore[override]
        """1 for the velocity if there is momentum, else 0."""
        return int(bool(self.momentum))

    def _rule_arguments(self, rates: Rates) -> dict[str, Any]:
        if not self.momentum:
            return {}  # the rate comes with the gradient
        nesterov = bool(self.nesterov)
        return {"momentum": self.momentum, "nesterov": nesterov, "masking": False, "rate": rates.rate}

    def with_group_settings(self, groups: Sequence[Mapping[str, Any]]) -> VelocityFeedback:
        own = {name: max(group[name] for group in groups) for name in ("momentum", "nesterov")}
        for name, value in own.items():
            if getattr(self, name) not in (None, value):
                raise ArgumentError(name, getattr(self, name), f"{value} as the optimizer has it, or none")
        return replace(self, **own)

    def own_step(self, kind: str, group: Mapping[str, Any], age: int) -> OwnStep:
        """Returns a group's `OwnStep` for one pass; raises if it got momentum since `attach`.

        Example:
            >>> group = {"lr": 0.5, "momentum": 0.0, "weight_decay": 0.25, "nesterov": False}
            >>> VelocityFeedback(momentum=0.0).own_step("SGD", group, 0).weights
            (0.5, 0.125)
        """
        rate, momentum, (sign, decay) = float(group["lr"]), float(group["momentum"]), decay_weights(group)
        if not self.momentum:  # nothing but the weights can have the rate
            if momentum:
                allowed = "0, as when the optimizer was attached; for momentum attach again"
                raise ArgumentError("momentum", momentum, allowed)
            return OwnStep(self, (sign * rate, decay * rate), 1.0, rate)
        # where a schedule has taken momentum away, a velocity of one step
        own = replace(self, momentum=momentum or 5e-324, nesterov=bool(group["nesterov"]))
        return OwnStep(own, (sign, decay), 1.0, rate)

    def keras_own_step(self, optimizer: Any, rate: float, age: int) -> OwnStep:
        # Keras' velocity holds the rates at which it was made
        own = replace(self, nesterov=bool(optimizer.nesterov)) if self.momentum else self
        return OwnStep(own, (rate, 0.0), 1.0, 1.0)
