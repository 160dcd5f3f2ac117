"""Finds a feedback by its name, and the rule for a PyTorch optimizer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.feedback import feedbacks
from horovod_sparse.feedback.adam import AdamFeedback, RMSpropFeedback
from horovod_sparse.feedback.muon import MuonFeedback
from horovod_sparse.feedback.sgd import VelocityFeedback

_log = logging.getLogger("horovod_sparse")

RULES: tuple[type[feedbacks.Rule], ...] = (AdamFeedback, MuonFeedback, RMSpropFeedback, VelocityFeedback)
_OTHERS: tuple[type[feedbacks.Feedback], ...] = (
    feedbacks.BestFeedback,
    feedbacks.ErrorFeedback,
    feedbacks.MomentumCorrection,
    feedbacks.NoFeedback,
)
FEEDBACKS: dict[str, type[feedbacks.Feedback]] = {
    one.text_name: one for one in sorted([*RULES, *_OTHERS], key=lambda one: one.text_name)
}

_BY_NAME = {name: rule for rule in RULES for name in rule.optimizers}
#: modules in which a `step` is that of PyTorch's own optimizer, or of Horovod's wrapper around it
_KNOWN_STEPS = "torch.optim.", "horovod.torch", "horovod_sparse.torch"
#: methods of an optimizer that make its step
_STEP = "step", "_init_group"
#: by patterns of names: why these optimizers are refused; the first match counts
_REASONS: Mapping[str, str] = {
    "*ScheduleFree*": "it moves other parameters than those at which gradients are taken",
    "*8bit* Paged* FusedAdam* *CPUAdam": "kernels of its own do the step: give torch.optim.AdamW",
    "*LAMB* *Lamb* *LARS*": "it scales a layer's step by the norm of all of it, of which a rank sends a part",
    "*Lion* Sign* Rprop": "its steps have one length everywhere, so the largest are no better than others",
    "*SAM Lookahead*": "it moves parameters for a while: give the optimizer within it",
    "Adafactor CAME": "its second moment is a product over rows and columns of the mean gradient",
    "*Shampoo* SOAP GaLore*": "what it multiplies by is made of whole matrices of the mean gradient",
    "Sophia*": "its curvature is that of the whole batch",
    "LBFGS": "it searches along a line, with many losses in a step",
    "SparseAdam": "its gradients are sparse already",
    "Adagrad": "its second moment never forgets, and that of one rank's gradients is too large",
    "Adadelta": "its rate is a moment of steps that were applied, and these are other ranks', too",
    "Adamax": "it divides by the largest gradient so far, which is that of the noisiest rank",
    "ASGD": "it averages parameters over steps: give SGD, and torch.optim.swa_utils.AveragedModel",
    "NAdam": "its first moment looks ahead, and error feedback takes the place of that moment",
    "RAdam": "it corrects the variance of a first moment, whose place error feedback takes",
    "AdaBelief Adan": "it needs a first moment, whose place error feedback takes",
    "Prodigy DAdapt*": "it finds its rate from sums over the mean gradients of the whole training",
}


def feedback_named(name: str | feedbacks.Feedback) -> feedbacks.Feedback:
    """Returns the feedback with a name, or the given feedback.

    Example:
        >>> feedback_named("momentum").momentum
        0.9
    """
    if isinstance(name, str):
        if name not in FEEDBACKS:
            raise UnknownNameError("feedback", name, FEEDBACKS)
        return FEEDBACKS[name]()
    if not isinstance(name, feedbacks.Feedback) or isinstance(name, type):
        raise ArgumentError("feedback", name, f"one of {', '.join(sorted(FEEDBACKS))}, or a Feedback")
    return name


def kind_of(optimizer: Any) -> str:
    """Returns the name of the class of torch.optim ("AdamW") whose `step` this optimizer has or inherits.

    Raises:
        ArgumentError: for another optimizer, with the reason.
    """
    name = type(optimizer).__name__
    for kind in type(optimizer).__mro__:
        # PyTorch puts the step that a class inherits into the class, where it calls hooks
        known = [vars(kind)[one].__module__.startswith(_KNOWN_STEPS) for one in _STEP if one in vars(kind)]
        if not all(known):
            break
        if f"{kind.__module__}.".startswith("torch.optim."):
            if kind.__name__ in _BY_NAME:
                return kind.__name__
            name = kind.__name__
            break
    reasons = [why for names, why in _REASONS.items() if any(fnmatchcase(name, one) for one in names.split())]
    allowed = f"{', '.join(_BY_NAME)}, or a subclass with the same step; {name}: "
    allowed += [*reasons, "it is not known what its step is"][0]
    raise ArgumentError("optimizer", name, f"{allowed}. feedback='error' leaves the step to the optimizer")


def recipe_for(optimizer: Any, recipe: Any) -> Any:
    """Returns the recipe with the optimizer's rule where the feedback is "best".

    Raises:
        ArgumentError: for a rule of another optimizer, or settings that it does not follow.
    """
    kind = kind_of(optimizer)
    own = _BY_NAME[kind]
    recipe = with_rule(recipe, own, kind, optimizer.param_groups)
    for group in optimizer.param_groups:
        if own.takes_whole and any(hasattr(one, "device_mesh") for one in group["params"]):
            allowed = f"one without shards: {kind} makes its step of whole matrices"
            raise ArgumentError("model", "one that fully_shard has sharded", allowed)
    return recipe


def with_rule(recipe: Any, own: Any, kind: str, groups: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the recipe with this kind of optimizer's rule; raises on settings that the rule ignores."""
    given, sparsifier = recipe.feedback, recipe.sparsifier
    if isinstance(given, feedbacks.BestFeedback):
        kept = {} if given.clip_norm is None else {"clip_norm": given.clip_norm}
        if kept and own.takes_whole:
            raise ArgumentError("clip_norm", given.clip_norm, f"None with {kind}: its steps have one length")
        given = own(**kept)
    if not isinstance(given, own):
        name = getattr(given, "text_name", type(given).__name__)
        raise ArgumentError("feedback", name, f"'best' or {own.text_name!r} with {kind}")
    refused = {"differentiable": "autograd does not see the step", **own.refused}
    for group, (setting, why) in itertools.product(groups, refused.items()):
        if group.get(setting):
            raise ArgumentError(setting, group[setting], f"{kind} without it: {why}")
    least, most = own.densities
    if not recipe.density_given and sparsifier.density < least:
        sparsifier = replace(sparsifier, density=least)
        told = "density %g with %s, if none is given: its steps are flat, and fewer elements cost accuracy"
        _log.info(told, least, kind)
    elif sparsifier.has_density and most < sparsifier.density < 1.0:
        told = "density %g with %s: GPTs and an LSTM trained better at %g, with fewer bytes"
        _log.info(told, sparsifier.density, kind, most)
    return replace(recipe, sparsifier=sparsifier, feedback=given.with_group_settings(groups))
