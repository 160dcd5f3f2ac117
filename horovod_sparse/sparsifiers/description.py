"""Descriptions as text, for logs, checkpoints and command lines."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["arguments_text", "value_text"]


def arguments_text(described: Any, always: tuple[str, ...] = ()) -> str:
    """``argument=value,argument=value`` of a dataclass; arguments at their default are left out.

    Args:
        described: the dataclass.
        always: arguments that are never left out.
    """
    return ",".join(
        f"{item.name}={value_text(getattr(described, item.name))}"
        for item in dataclasses.fields(described)
        if item.name in always or getattr(described, item.name) != item.default
    )


def value_text(value: Any) -> str:
    """A value as `feedback.text.parse_value` reads it.

    Args:
        value: a number, a word, a tuple or dict of such, or a dataclass with a `text_name`.

    Example:
        >>> from horovod_sparse.sparsifiers.schedule import Exponential
        >>> value_text(Exponential(steps=5)), value_text("paper"), value_text(0.5), value_text(("*.bias",))
        ('exponential(steps=5)', 'paper', '0.5', "('*.bias',)")
    """
    name = getattr(type(value), "text_name", None)
    if name is not None:
        return f"{name}({arguments_text(value)})"
    return value if isinstance(value, str) else repr(value)
