"""PyTorch's Adam and AdamW as optimizers of steps: a feedback has normalized, ranks have averaged them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import AdamFeedback, Recipe

if TYPE_CHECKING:
    from torch.optim import Optimizer as _Base
else:
    _Base = object

#: settings that change what the second moment is, or which way a step goes
_REFUSED = ("amsgrad", "maximize", "differentiable")


class OfSteps(_Base):
    """``theta = theta (1 - lr weight_decay) - gradient``: what a gradient holds is the step already.

    Groups, schedules, hooks and `state_dict` are the class's own. It keeps no moments: the second one is the
    feedback's, and there is no first. A state with moments that is loaded goes on without them.
    """

    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies what gradients hold; returns what a closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            decay = 1.0 - float(group["lr"]) * group["weight_decay"]
            if decay != 1.0:
                torch._foreach_mul_(parameters, decay)
            torch._foreach_sub_(parameters, [parameter.grad for parameter in parameters])
        self._opt_called = True  # what a schedule looks for
        return loss

    # hooks of steps run once, and a schedule need not wrap it
    step.hooked = step._wrapped_by_lr_sched = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.state.clear()


class AdamOfSteps(OfSteps, torch.optim.Adam):
    """See `OfSteps`."""


class AdamWOfSteps(OfSteps, torch.optim.AdamW):
    """See `OfSteps`."""


_ADOPTED: Mapping[type, type] = {torch.optim.Adam: AdamOfSteps, torch.optim.AdamW: AdamWOfSteps}


def class_of_steps(optimizer: torch.optim.Optimizer, recipe: Recipe) -> type:
    """The class that an optimizer is to have behind a recipe: its own, or one that applies steps.

    Raises:
        ArgumentError: the feedback makes the steps of another optimizer than this.
    """
    feedback = recipe.feedback
    if not getattr(feedback, "applies_rate", False):
        return type(optimizer)
    adopted = _ADOPTED.get(type(optimizer))
    if adopted is None or not isinstance(feedback, AdamFeedback):
        allowed = (
            "torch.optim.AdamW(model.parameters(), lr=..., weight_decay=...), whose steps this feedback "
            "makes; or feedback='error' to the compression"
        )
        raise ArgumentError("optimizer", type(optimizer).__name__, allowed)
    for group in optimizer.param_groups:
        for name in _REFUSED:
            if group.get(name):
                raise ArgumentError(name, group[name], f"{name}=False: {feedback.text_name} has no such form")
        decoupled = adopted is AdamWOfSteps or group.get("decoupled_weight_decay")
        if group["weight_decay"] and not decoupled:
            allowed = "0 with Adam, or torch.optim.AdamW(..., weight_decay=...): it decays apart"
            raise ArgumentError("weight_decay", group["weight_decay"], allowed)
        feedback.for_group(group)  # refuses what it cannot take from there
    return adopted


def adopt(optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Lets the very optimizer of the user apply steps from now on, where the recipe makes them.

    Raises:
        ArgumentError: see `class_of_steps`.
        UnsupportedError: somebody has replaced its `step`.
    """
    adopted = class_of_steps(optimizer, recipe)
    if adopted is type(optimizer):
        return
    own = vars(optimizer)
    if "step" in own and not hasattr(own["step"], "_wrapped_by_lr_sched"):
        raise UnsupportedError("the optimizer's step() was replaced: attach the model before that is done")
    own.pop("step", None)  # of a schedule, which would go on calling the class's
    optimizer.state.clear()
    optimizer.__class__ = adopted
    # a fused one unscales gradients itself, and is never called any more
    optimizer._step_supports_amp_scaling = False
