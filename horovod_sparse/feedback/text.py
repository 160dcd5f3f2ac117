"""Recipes as text: ``name:argument=value,argument=value``, values nested as ``name(argument=value)``."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.feedback.auto_density import AutoDensity
from horovod_sparse.feedback.feedbacks import FEEDBACKS, feedback_class
from horovod_sparse.sparsifiers.schedule import SCHEDULES
from horovod_sparse.thresholds import RULES

#: what may stand as ``name(...)`` for an argument
NESTED: dict[str, Mapping[str, type]] = {
    "feedback": FEEDBACKS,
    "schedule": SCHEDULES,
    "threshold": RULES,
    "density": {AutoDensity.text_name: AutoDensity},
}
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""


def split_outside(text: str, separator: str = ",") -> Iterator[str]:
    """The parts of a text between separators that stand outside of brackets and quotes.

    Example:
        >>> list(split_outside("a=1,b=f(x=1,y=2),c='p,q'"))
        ['a=1', 'b=f(x=1,y=2)', "c='p,q'"]
    """
    depth, quote, start = 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES:
            quote = letter
        elif letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
        elif letter == separator and depth == 0:
            yield text[start:place]
            start = place + 1
        if depth < 0:
            break
    if depth or quote:
        raise ArgumentError("compression", text, "text whose brackets and quotes are closed")
    yield text[start:]


def parse_arguments(text: str) -> dict[str, Any]:
    """Arguments by name.

    Example:
        >>> parse_arguments("density=0.01,schedule=linear(steps=10)")["schedule"].length
        10
    """
    arguments: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in split_outside(text))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name:
            raise ArgumentError("compression", part, "NAME or NAME:ARGUMENT=VALUE,ARGUMENT=VALUE")
        if name in arguments:
            raise ArgumentError("compression", part, f"{name} once")
        arguments[name] = parse_value(name, value)
    return arguments


def parse_value(argument: str, text: str) -> Any:
    """One value: ``name(...)`` where the argument takes such, a Python literal, or a plain word.

    Example:
        >>> parse_value("density", "0.01"), parse_value("threshold", "paper"), parse_value("shared", "false")
        (0.01, 'paper', False)
        >>> parse_value("feedback", "momentum(nesterov=true)").nesterov
        True
    """
    name, bracket, rest = text.partition("(")
    if bracket and name.strip().isidentifier() and text.endswith(")"):
        return _nested(argument, name.strip(), rest[:-1])
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _nested(argument: str, name: str, text: str) -> Any:
    known = NESTED.get(argument, {})
    if argument == "feedback":
        feedback_class(name)
    if name not in known:
        raise UnknownNameError(argument, name, known)
    made, arguments = known[name], parse_arguments(text)
    fields = [item.name for item in dataclasses.fields(made) if item.init]
    for given in arguments:
        if given not in fields:
            raise UnknownNameError(f"argument of {name}", given, fields)
    return made(**arguments)
