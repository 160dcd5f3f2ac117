"""A whole description of what happens to a bucket: a sparsifier, and the feedback around it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from horovod_sparse.errors import UnknownNameError
from horovod_sparse.feedback.base import ErrorFeedback, Feedback
from horovod_sparse.feedback.lowpass import LowPass
from horovod_sparse.feedback.momentum import MomentumCorrection
from horovod_sparse.feedback.named import feedback_named
from horovod_sparse.feedback.rules import ParameterRules
from horovod_sparse.feedback.text import NESTED, parse_arguments, parse_value
from horovod_sparse.sparsifiers import ALGORITHMS, Sparsifier
from horovod_sparse.sparsifiers.base import value_text
from horovod_sparse.sparsifiers.dense import Dense

__all__ = ["Recipe", "parse_recipe", "recipe", "recipe_signature"]


@dataclass(frozen=True)
class Recipe:
    """A sparsifier and the feedback around it: a picklable value, made before `hvd.init()`.

    Args:
        sparsifier: which elements are sent, and how.
        feedback: what becomes of the others.
        rules: parameters that are treated otherwise.
    """

    sparsifier: Sparsifier
    feedback: Feedback = field(default_factory=ErrorFeedback)
    rules: ParameterRules = field(default_factory=ParameterRules)

    def for_parameter(self, name: str, num_elements: int) -> Recipe:
        """The recipe for one parameter, or a bucket of parameters of one density: its rule applied.

        Args:
            name: of the parameter.
            num_elements: of the parameter, not of the bucket.
        """
        density = self.rules.density_of(name, num_elements)
        if density is None:
            return Recipe(self.sparsifier, self.feedback)
        if density == 1.0:
            return self.for_dense()
        changed = dataclasses.replace(self.sparsifier, density=density, schedule=None)
        return Recipe(changed, self.feedback)

    def for_dense(self) -> Recipe:
        """The recipe for a parameter that is sent whole: the same feedback around an allreduce.

        Momentum is not masked there: a velocity that is cleared in every step would be none. Nothing is left
        to be filtered; what was held back before, in a sparse bucket, joins the next gradient whole.
        """
        feedback = self.feedback
        if isinstance(feedback, MomentumCorrection):
            feedback = dataclasses.replace(feedback, masking=False)
        elif isinstance(feedback, LowPass):
            feedback = dataclasses.replace(feedback, beta=1.0)
        return Recipe(Dense(), feedback)

    def describe(self) -> str:
        """One line for logs and checkpoints; `parse_recipe` makes an equal recipe of it.

        Example:
            >>> recipe("dgc", feedback="momentum", dense_below=1024).describe()
            'dgc:density=0.001,feedback=momentum,dense_below=1024'
        """
        parts = [self.sparsifier.describe()]
        if self.feedback != ErrorFeedback():
            parts.append(f"feedback={value_text(self.feedback).removesuffix('()')}")
        parts += [f"{name}={value_text(value)}" for name, value in self.rules.arguments().items()]
        return ",".join(parts)


#: arguments every algorithm takes beside its own
_RULES = tuple(item.name for item in dataclasses.fields(ParameterRules))
_COMMON = (
    inspect.Parameter("feedback", inspect.Parameter.KEYWORD_ONLY, default="error"),
    *(
        inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default)
        for item in dataclasses.fields(ParameterRules)
    ),
)


def recipe_signature(name: str) -> inspect.Signature:
    """The arguments that `recipe(name, ...)` takes, with their defaults."""
    own = [
        inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default)
        for item in dataclasses.fields(_algorithm(name))
        if item.init
    ]
    return inspect.Signature([*own, *_COMMON])


def recipe(name: str, **arguments: Any) -> Recipe:
    """Makes a recipe from an algorithm's name and its arguments.

    Args:
        name: of the algorithm, as in `Compression`.
        **arguments: of the algorithm; `feedback` ("error", "lowpass", "momentum", "none", or a `Feedback`);
            and those of `ParameterRules`. What has arguments itself may be given as text:
            ``schedule="exponential(steps=400)"``.

    Raises:
        UnknownNameError: for a misspelt algorithm or argument, with the valid ones.
        ArgumentError: for a value that is not allowed.

    Example:
        >>> recipe("topk", density=0.01).sparsifier.density
        0.01
        >>> recipe("topk", densty=0.01)
        Traceback (most recent call last):
        horovod_sparse.errors.UnknownNameError: unknown argument of topk 'densty': the known ones are ...
    """
    signature = recipe_signature(name)
    for argument in arguments:
        if argument not in signature.parameters:
            raise UnknownNameError(f"argument of {name}", argument, signature.parameters)
    for argument in NESTED:
        if isinstance(value := arguments.get(argument), str):
            arguments[argument] = parse_value(argument, value)
    feedback = feedback_named(arguments.pop("feedback", "error"))
    rules = ParameterRules(**{rule: arguments.pop(rule) for rule in _RULES if rule in arguments})
    return Recipe(_algorithm(name)(**arguments), feedback, rules)


def parse_recipe(text: str) -> Recipe:
    """Reads a recipe from a command line: ``name`` or ``name:argument=value,argument=value``.

    Args:
        text: the description; values are Python literals, plain words, or nested descriptions as
            ``momentum(momentum=0.9,clip_norm=1.0)``.

    Raises:
        ArgumentError: if the text has another form, or a value is not allowed.
        UnknownNameError: for a misspelt algorithm or argument.

    Example:
        >>> parse_recipe("exdyna:density=0.001,rebalance=paper").sparsifier.rebalance
        'paper'
        >>> parse_recipe("topk:schedule=exponential(steps=400),dense=('*.bias',)").rules.dense
        ('*.bias',)
    """
    name, _, rest = text.strip().partition(":")
    _algorithm(name)
    return recipe(name, **parse_arguments(rest))


def _algorithm(name: str, known: Mapping[str, type[Sparsifier]] = ALGORITHMS) -> type[Sparsifier]:
    if name not in known:
        raise UnknownNameError("compression", name, known)
    return known[name]
