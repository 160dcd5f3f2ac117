"""What `Compression` offers in either front end: one factory per algorithm, and reading from text."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from horovod_sparse.errors import UnknownNameError
from horovod_sparse.feedback import FEEDBACKS, Recipe, parse_recipe, recipe, recipe_signature
from horovod_sparse.sparsifiers import ALGORITHMS

#: Horovod's own
_STOCK = ("none", "fp16")


class Choices:
    """The factories of a front end's `Compression`; a new algorithm needs no change here.

    Args:
        make: makes a compressor from a recipe and the binding arguments.
        binding: names of keyword arguments beside those of the algorithm, None by default.
        help_text: says what they are; follows the algorithm's own help.
        returns: type of the compressor.
    """

    def __init__(
        self, make: Callable[..., Any], binding: Sequence[str], help_text: str, returns: type
    ) -> None:
        self._make, self._binding, self._help, self._returns = make, tuple(binding), help_text, returns
        #: by the algorithm's name
        self.factories = {name: self._factory(name) for name in ALGORITHMS}

    def _factory(self, name: str) -> Callable[..., Any]:
        def make(**arguments: Any) -> Any:
            bound = {item: arguments.pop(item, None) for item in self._binding}
            return self._make(recipe(name, **arguments), **bound)

        make.__name__ = name
        make.__qualname__ = f"Compression.{name}"
        make.__doc__ = f"{inspect.getdoc(ALGORITHMS[name])}\n{self._help}"
        own = recipe_signature(name).parameters.values()
        binding = [
            inspect.Parameter(item, inspect.Parameter.KEYWORD_ONLY, default=None) for item in self._binding
        ]
        make.__signature__ = inspect.Signature([*own, *binding], return_annotation=self._returns)  # type: ignore[attr-defined]
        return make

    def named(self, name: str) -> Callable[..., Any]:
        """The factory of an algorithm.

        Raises:
            AttributeError: if there is none, with the known names.
        """
        if name in self.factories:
            return self.factories[name]
        raise AttributeError(str(UnknownNameError("compression", name, [*_STOCK, "parse", *ALGORITHMS])))

    def parsed(self, text: str) -> Recipe | None:
        """The recipe that a text describes; None for one of Horovod's own, by name.

        Raises:
            UnknownNameError: for a misspelt algorithm or argument, with the valid ones.
            ArgumentError: for a value that is not allowed.
        """
        if text in _STOCK:
            return None
        if text.partition(":")[0].strip() not in ALGORITHMS:
            raise UnknownNameError("compression", text, [*_STOCK, *ALGORITHMS])
        return parse_recipe(text)


def describe_recipe(recipe: Recipe) -> str:
    """The call of `Compression` that makes it; arguments at their default are left out.

    Example:
        >>> from horovod_sparse.feedback import parse_recipe
        >>> describe_recipe(parse_recipe("topk:density=0.01,feedback=none"))
        "Compression.topk(density=0.01, feedback='none')"
    """
    sparsifier, feedback = recipe.sparsifier, recipe.feedback
    own = {item.name: item.default for item in dataclasses.fields(sparsifier)}
    arguments = {name: getattr(sparsifier, name) for name in own}
    shown = [
        f"{name}={value!r}" for name, value in arguments.items() if name == "density" or value != own[name]
    ]
    names = [name for name, make in FEEDBACKS.items() if make() == feedback]
    if names != ["error"]:
        shown.append(f"feedback={(names[0] if names else feedback)!r}")
    shown += [f"{name}={value!r}" for name, value in recipe.rules.arguments().items()]
    return f"Compression.{sparsifier.name}({', '.join(shown)})"
