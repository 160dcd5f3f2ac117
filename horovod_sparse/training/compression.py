"""What `Compression` is in every front end: one factory per algorithm, read from text and told as text."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.feedback import FEEDBACKS, AutoDensity, Recipe, parse_recipe, recipe, recipe_signature
from horovod_sparse.feedback.recipe import BEST, BEST_ALGORITHM
from horovod_sparse.sparsifiers import ALGORITHMS

#: Horovod's own
_STOCK = ("none", "fp16")


class Algorithms(type):
    """Metaclass of a front end's `Compression`: one factory per algorithm; a new algorithm needs no change.

    Args:
        make: the compressor's class, called with a recipe and the binding arguments.
        binding: names of keyword arguments beside those of the algorithm, None by default.
        help_text: says what they are; follows the algorithm's own help.
        telling: has the other ranks hear of a factory's errors.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_arguments: Any) -> Any:
        """A class as any other; `__init__` has a use for the arguments."""
        return super().__new__(cls, name, bases, body)

    def __init__(
        cls,
        name: str,
        bases: tuple[type, ...],
        body: dict[str, Any],
        *,
        make: type,
        binding: Sequence[str],
        help_text: str,
        telling: Callable[..., Any],
    ) -> None:
        super().__init__(name, bases, body)
        cls._factories: dict[str, Callable[..., Any]] = {}

        def factory(item: str) -> Callable[..., Any]:
            made: Callable[..., Any] = telling(_factory(item, make, binding, help_text), is_last=False)
            return made

        cls._make = factory

    def __getattr__(cls, name: str) -> Callable[..., Any]:
        if name in ALGORITHMS or name == BEST:
            if name not in cls._factories:  # the file of an algorithm is loaded when somebody asks for it
                cls._factories[name] = cls._make(name)
            return cls._factories[name]
        raise AttributeError(
            str(UnknownNameError("compression", name, [*_STOCK, "parse", BEST, *ALGORITHMS]))
        )

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), BEST, *ALGORITHMS})


def _factory(name: str, make_compressor: type, binding: Sequence[str], help_text: str) -> Callable[..., Any]:
    def make(**arguments: Any) -> Any:
        bound = {item: arguments.pop(item, None) for item in binding}
        return make_compressor(recipe(name, **arguments), **bound)

    make.__name__, algorithm = name, BEST_ALGORITHM if name == BEST else name
    make.__qualname__ = f"Compression.{name}"
    make.__doc__ = f"{inspect.getdoc(ALGORITHMS[algorithm])}\n{help_text}"
    parameters = [
        *recipe_signature(algorithm).parameters.values(),
        *(inspect.Parameter(item, inspect.Parameter.KEYWORD_ONLY, default=None) for item in binding),
    ]
    make.__signature__ = inspect.Signature(parameters, return_annotation=make_compressor)  # type: ignore[attr-defined]
    return make


def recipe_of(text: str) -> Recipe | None:
    """The recipe that `Compression.parse` is given as text; None for one of Horovod's own, by name.

    Raises:
        UnknownNameError: for a misspelt algorithm or argument, with the valid ones.
        ArgumentError: for a value that is not allowed.
    """
    if text in _STOCK:
        return None
    if text.partition(":")[0].strip() not in (BEST, *ALGORITHMS):
        raise UnknownNameError("compression", text, [*_STOCK, BEST, *ALGORITHMS])
    return parse_recipe(text)


def check_compression(given: object) -> None:
    """Refuses what neither sparsifies nor is a compressor of Horovod's.

    Example:
        >>> check_compression(0.1)
        Traceback (most recent call last):
        horovod_sparse.errors.ArgumentError: compression=0.1 is not allowed: give a sparsifier as \
Compression.topk(density=0.1), its text, or a compressor of Horovod's as Compression.none
    """
    if all(callable(getattr(given, name, None)) for name in ("compress", "decompress")):
        return
    name, words = getattr(given, "__name__", ""), ""
    if inspect.isroutine(given) and name in ALGORITHMS:
        given, words = f"Compression.{name}", ", with a call"
    example = f"{name if words else 'topk'}(density=0.1){words}"
    allowed = f"a sparsifier as Compression.{example}, its text, or a compressor of Horovod's as "
    raise ArgumentError("compression", given, allowed + "Compression.none")


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
    if recipe.auto is not None:
        arguments["density"] = "auto" if recipe.auto == AutoDensity() else recipe.auto
    shown = [
        f"{name}={value!r}" for name, value in arguments.items() if name == "density" or value != own[name]
    ]
    names = [name for name, make in FEEDBACKS.items() if make() == feedback]
    if names != ["error"]:
        shown.append(f"feedback={(names[0] if names else feedback)!r}")
    shown += [f"{name}={value!r}" for name, value in recipe.rules.arguments().items()]
    return f"Compression.{sparsifier.name}({', '.join(shown)})"
