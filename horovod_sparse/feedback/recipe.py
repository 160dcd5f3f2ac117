"""A whole description of what happens to a bucket: a sparsifier, and the feedback around it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.feedback.base import ErrorFeedback, Feedback
from horovod_sparse.feedback.named import feedback_named
from horovod_sparse.sparsifiers import ALGORITHMS, Sparsifier

__all__ = ["Recipe", "parse_recipe", "recipe", "recipe_signature"]


@dataclass(frozen=True)
class Recipe:
    """A sparsifier and the feedback around it: a picklable value, made before `hvd.init()`.

    Args:
        sparsifier: which elements are sent, and how.
        feedback: what becomes of the others.
    """

    sparsifier: Sparsifier
    feedback: Feedback = field(default_factory=ErrorFeedback)

    def describe(self) -> str:
        """One line for logs, readable by `parse_recipe` where the feedback is the default."""
        return self.sparsifier.describe()


#: arguments every algorithm takes beside its own
_COMMON = (inspect.Parameter("feedback", inspect.Parameter.KEYWORD_ONLY, default="error"),)


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
        **arguments: of the algorithm, and `feedback` ("error", "none", or a `Feedback`).

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
    feedback = feedback_named(arguments.pop("feedback", "error"))
    return Recipe(_algorithm(name)(**arguments), feedback)


def parse_recipe(text: str) -> Recipe:
    """Reads a recipe from a command line: ``name`` or ``name:argument=value,argument=value``.

    Args:
        text: the description; values are Python literals or plain words.

    Raises:
        ArgumentError: if the text has another form, or a value is not allowed.
        UnknownNameError: for a misspelt algorithm or argument.

    Example:
        >>> parse_recipe("exdyna:density=0.001,rebalance=paper").sparsifier.rebalance
        'paper'
    """
    name, _, rest = text.strip().partition(":")
    arguments: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        argument, equals, value = part.partition("=")
        if not equals:
            raise ArgumentError("compression", text, "NAME or NAME:ARGUMENT=VALUE,ARGUMENT=VALUE")
        arguments[argument.strip()] = _literal(value.strip())
    return recipe(name, **arguments)


def _literal(value: str) -> Any:
    if value in ("true", "false"):
        value = value.capitalize()
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def _algorithm(name: str, known: Mapping[str, type[Sparsifier]] = ALGORITHMS) -> type[Sparsifier]:
    if name not in known:
        raise UnknownNameError("compression", name, known)
    return known[name]
