"""Rules of PyTorch's optimizers: how a rank makes its own step of its own gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import AdamFeedback, BestFeedback, Feedback, RMSpropFeedback, VelocityFeedback

#: the optimizers whose steps a rank makes on its own
_OWN: Mapping[type, Any] = {
    torch.optim.AdamW: AdamFeedback,
    torch.optim.Adam: AdamFeedback,
    torch.optim.RMSprop: RMSpropFeedback,
    torch.optim.SGD: VelocityFeedback,
}
#: steps that a class may have and be taken for one of these: their own, and that of Horovod's wrapper
_KNOWN_STEPS = ("_DistributedOptimizer.step", *(f"{kind.__name__}.step" for kind in _OWN))
#: why others are refused, by name
_REASONS = {
    "Lion": "its steps have one length everywhere, so the largest are no better than others",
    "Adafactor": "its second moment is a product over rows and columns of the mean gradient",
    "LBFGS": "it searches along a line, with many losses in a step",
    "SparseAdam": "its gradients are sparse already",
    "Adagrad": "its second moment never forgets, and that of one rank's gradients is too large",
    "NAdam": "its first moment looks ahead, and error feedback takes the place of that moment",
    "RAdam": "it corrects the variance of a first moment, whose place error feedback takes",
}
#: settings that change what a moment is
_REFUSED = ("amsgrad", "centered", "differentiable")
#: where an optimizer keeps what a rank's own step keeps, too
MOMENTS: Mapping[str, str] = {"adam": "exp_avg_sq", "rmsprop": "square_avg", "sgd": "momentum_buffer"}


@dataclass(frozen=True)
class OwnStep:
    """One group's rule in one pass.

    Attributes:
        feedback: what normalizes them, or gathers momentum.
        weights: factors of gradient and parameter, whose sum is folded.
        shrink: factor of weight decay apart from the gradient, of the parameters.
        rate: learning rate.
    """

    feedback: Any
    weights: tuple[float, float]
    shrink: float
    rate: float


def kind_of(optimizer: Any) -> type:
    """The optimizer of PyTorch whose `step` one has: a subclass that does not replace it counts as it.

    Raises:
        ArgumentError: for another optimizer, with the reason.
    """
    for kind in type(optimizer).__mro__:
        if kind in _OWN:
            return kind
        # PyTorch puts the step that a class inherits into the class, where it calls hooks
        if "step" in vars(kind) and not vars(kind)["step"].__qualname__.startswith(_KNOWN_STEPS):
            break
    name = type(optimizer).__name__
    reason = _REASONS.get(name, "it is not known what its step is")
    allowed = f"{', '.join(one.__name__ for one in _OWN)}, or a subclass with their step; {name}: {reason}"
    raise ArgumentError("optimizer", name, f"{allowed}. feedback='error' leaves the step to any optimizer")


def feedback_for(optimizer: Any, given: Feedback) -> Any:
    """The feedback that makes an optimizer's steps, in place of "best"; refuses one for another optimizer."""
    kind = kind_of(optimizer)
    own = _OWN[kind]
    if isinstance(given, BestFeedback):
        given = own(clip_norm=given.clip_norm)
    if not isinstance(given, own):
        name = getattr(given, "text_name", type(given).__name__)
        raise ArgumentError("feedback", name, f"'best' or {own.text_name!r} with {kind.__name__}")
    for group in optimizer.param_groups:
        for name in _REFUSED:
            if group.get(name):
                raise ArgumentError(name, group[name], f"{name}=False: a rank's own step has no such form")
        if kind is torch.optim.RMSprop and group["momentum"]:
            raise ArgumentError("momentum", group["momentum"], "0 with RMSprop: error feedback is a momentum")
    momentum = max(group.get("momentum", 0.0) for group in optimizer.param_groups)
    if isinstance(given, VelocityFeedback) and given.momentum is None:
        nesterov = any(group["nesterov"] for group in optimizer.param_groups)
        given = replace(given, momentum=momentum, nesterov=nesterov)
    return given


def own_step(
    kind: type, feedback: Any, group: Mapping[str, Any], age: int, loss_scale: float = 1.0
) -> OwnStep:
    """Returns a group's rule, by its settings now.

    Args:
        kind: as `kind_of` gives it.
        feedback: as `feedback_for` gives it.
        group: parameter group of the optimizer.
        age: passes before this one.
        loss_scale: of the gradients.

    Example:
        >>> group = torch.optim.SGD([torch.zeros(1)], lr=0.5, weight_decay=0.25).param_groups[0]
        >>> own_step(torch.optim.SGD, VelocityFeedback(momentum=0.0), group, 0).weights
        (0.5, 0.125)
    """
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    own = (-1.0 if group.get("maximize") else 1.0) / loss_scale
    decoupled = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
    weights = own, 0.0 if decoupled else decay
    if isinstance(feedback, VelocityFeedback):
        momentum = float(group["momentum"])
        if feedback.momentum:
            feedback = replace(feedback, momentum=momentum, nesterov=bool(group["nesterov"]))
            damped = 1.0 - float(group["dampening"]) if age else 1.0
            weights = weights[0] * damped, weights[1] * damped
            if not momentum:  # a schedule has taken it away: a velocity of one step
                feedback = replace(feedback, momentum=5e-324)
        elif momentum:
            raise ArgumentError(
                "momentum", momentum, "0, as when the model was attached: no velocity is kept"
            )
        else:
            weights = weights[0] * rate, weights[1] * rate
    else:
        beta2 = group["betas"][1] if "betas" in group else group["alpha"]
        feedback = feedback.with_settings({"beta2": float(beta2), "eps": float(group["eps"])})
    return OwnStep(feedback, weights, 1.0 - rate * decay if decoupled else 1.0, rate)


def leaves_work_to_optimizer(feedback: Any) -> bool:
    """Whether gradients, and no steps, are exchanged.

    Example:
        >>> leaves_work_to_optimizer(AdamFeedback()), leaves_work_to_optimizer(VelocityFeedback())
        (False, False)
    """
    return not feedback.applies_rate
