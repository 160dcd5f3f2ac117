"""PyTorch's optimizers where a feedback does a part of their work: they do the rest."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import AdamFeedback, ErrorFeedback, Feedback, Recipe, RMSpropFeedback
from horovod_sparse.training.compression import feedback_for

if TYPE_CHECKING:
    from torch.optim import Optimizer as _Base
else:
    _Base = object

_log = logging.getLogger("horovod_sparse")
#: parameter -> where one element of its step lies, and what it was: see `note_step`
_noted: Any = WeakTensorKeyDictionary()
#: by how much, of itself, an element may differ: a loss scaler divides, and half types round
_TOLERANCE = 0.02

#: settings that change what the second moment is, or which way a step goes
_REFUSED = ("amsgrad", "centered", "maximize", "differentiable")


class _Adopted(_Base):
    """``theta = theta (1 - rate weight_decay) - factor gradient``.

    Groups, schedules, hooks and `state_dict` are the class's own. It keeps no moments; a state with moments
    that is loaded goes on without them.
    """

    def _rate_and_factor(self, group: Mapping[str, Any]) -> tuple[float, float]:
        """Of a group, now."""
        return float(group["lr"]), _pace(group)

    def _look_at(self, parameters: Sequence[torch.Tensor]) -> None:
        """Before the gradients of these are applied."""

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
            self._look_at(parameters)
            rate, factor = self._rate_and_factor(group)
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1.0 - rate * group["weight_decay"])
            torch._foreach_sub_(parameters, [parameter.grad for parameter in parameters], alpha=factor)
        self._opt_called = True  # what a schedule looks for
        return loss

    # hooks of steps run once, and a schedule need not wrap it
    step.hooked = step._wrapped_by_lr_sched = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.state.clear()


class _OfSteps(_Adopted):
    """What a gradient holds is the step already: the feedback has normalized it, the rate is in it."""

    _told = False

    def _look_at(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in () if self._told else parameters:
            offset, value = _noted.pop(parameter, (0, 0.0))
            gradient = parameter.grad
            if not value or type(gradient) is not torch.Tensor or gradient.stride() != parameter.stride():
                continue
            found = float(element(gradient, offset))
            if abs(found - value) > _TOLERANCE * abs(value):
                _log.warning(
                    "steps were changed before the optimizer applied them: with feedback='adam' or 'rmsprop' "
                    "gradients hold steps, which clip_grad_norm_() or a trainer's max_grad_norm makes "
                    "too small. Clip nothing, or write feedback='adam(clip_norm=1.0)'"
                )
                self._told = True


def element(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """An element by where it lies in memory, counted from the tensor's first."""
    return tensor.as_strided((), (), tensor.storage_offset() + offset)


def note_step(parameter: torch.Tensor, offset: int, value: float) -> None:
    """Remembers an element of the step in a parameter's gradient, for the optimizer to look at; 0 forgets."""
    _noted[parameter] = offset, value


class AdamOfSteps(_OfSteps, torch.optim.Adam):
    """Without moments: the second one is the feedback's, and there is no first."""


class AdamWOfSteps(_OfSteps, torch.optim.AdamW):
    """Without moments: the second one is the feedback's, and there is no first."""


class RMSpropOfSteps(_OfSteps, torch.optim.RMSprop):
    """Without a moment, which is the feedback's, and without momentum."""


class SGDWithoutMomentum(_Adopted, torch.optim.SGD):
    """At ``lr (1 - dampening) / (1 - momentum)``, which goes as far: error feedback is a momentum.

    It keeps its own while plans leave all gradients dense, which no residual waits for (`keeps_momentum`).
    """

    keeps_momentum = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As SGD's own, or without momentum."""
        if not self.keeps_momentum:
            self.state.clear()  # a momentum of dense gradients that were long ago
            return super().step(closure)
        self._opt_called = True
        return torch.optim.SGD.step(self, closure)

    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _rate_and_factor(self, group: Mapping[str, Any]) -> tuple[float, float]:
        rate, pace = super()._rate_and_factor(group)
        return rate * pace, rate * pace


def _pace(group: Mapping[str, Any]) -> float:
    """How far a momentum that is left out would have gone with every step."""
    momentum = group.get("momentum", 0.0)
    return (1.0 - group.get("dampening", 0.0)) / (1.0 - momentum) if momentum else 1.0


#: the feedback that does the work of an optimizer, which becomes this
_OWN: Mapping[type, tuple[type, type]] = {
    torch.optim.Adam: (AdamFeedback, AdamOfSteps),
    torch.optim.AdamW: (AdamFeedback, AdamWOfSteps),
    torch.optim.RMSprop: (RMSpropFeedback, RMSpropOfSteps),
    torch.optim.SGD: (ErrorFeedback, SGDWithoutMomentum),
}


def feedback_of(feedback: Feedback, group: Mapping[str, Any]) -> Any:
    """The feedback of parameters whose optimizer has these settings.

    Example:
        >>> feedback_of(AdamFeedback(), {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-6})
        AdamFeedback(beta2=0.95, eps=1e-06, clip_norm=None, whole_batch=True)
    """
    given = {"beta2": group["betas"][1] if "betas" in group else group.get("alpha"), "eps": group.get("eps")}
    found = {name: float(value) for name, value in given.items() if value is not None}
    return feedback.with_settings(found)


#: parameter groups of an optimizer
Groups: TypeAlias = Sequence[Mapping[str, Any]]


def adopted_class(kind: type, groups: Groups, recipe: Recipe) -> tuple[type, Recipe]:
    """The class that an optimizer is to have behind a recipe, and the recipe for it.

    Its own, where the recipe leaves no work to it. An error, where it leaves that of another optimizer.
    """
    feedback = recipe.feedback
    if not feedback.applies_rate:
        return kind, recipe
    own, adopted = _OWN.get(kind, (None, kind))
    momentum = max(group.get("momentum", 0.0) for group in groups)
    chosen = feedback_for(feedback, own, kind, momentum, "torch.optim")
    decays = kind in (torch.optim.AdamW, torch.optim.SGD)
    for group in groups:
        for name in _REFUSED:
            if group.get(name):
                raise ArgumentError(name, group[name], f"{name}=False: {chosen.text_name} has no such form")
        if group["weight_decay"] and not (decays or group.get("decoupled_weight_decay")):
            allowed = f"0 with {kind.__name__}, or torch.optim.AdamW(..., weight_decay=...): it decays apart"
            raise ArgumentError("weight_decay", group["weight_decay"], allowed)
        feedback_of(chosen, group)  # refuses what it cannot take from there
    if adopted is SGDWithoutMomentum and not momentum:
        adopted = kind
    return adopted, dataclasses.replace(recipe, feedback=chosen)


def adopt(optimizer: torch.optim.Optimizer, recipe: Recipe) -> Recipe:
    """Lets the very optimizer of the user do what a recipe leaves to it; gives the recipe for it."""
    adopted, recipe = adopted_class(type(optimizer), optimizer.param_groups, recipe)
    if adopted is type(optimizer):
        return recipe
    own = vars(optimizer)
    if "step" in own and not hasattr(own["step"], "_wrapped_by_lr_sched"):
        raise UnsupportedError("the optimizer's step() was replaced: attach the model before that is done")
    own.pop("step", None)  # of a schedule, which would go on calling the class's
    optimizer.state.clear()
    optimizer.__class__ = adopted
    # a fused one unscales gradients itself, and is never called any more
    optimizer._step_supports_amp_scaling = False
    return recipe
