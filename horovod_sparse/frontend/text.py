"""A recipe as the user would write it."""

from __future__ import annotations

import dataclasses

from horovod_sparse.feedback import FEEDBACKS, Recipe

__all__ = ["describe_recipe"]


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
