"""Recipes: a sparsifier, the feedback around it, and rules for single parameters.

As text: ``name:argument=value,argument=value``, values nested as ``name(argument=value)``.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from horovod_sparse.checks import check_count, check_density
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.feedback.feedbacks import BestFeedback, ErrorFeedback, Feedback
from horovod_sparse.feedback.rules import FEEDBACKS, feedback_named
from horovod_sparse.sparsifiers import ALGORITHMS, Sparsifier
from horovod_sparse.sparsifiers.base import value_text
from horovod_sparse.sparsifiers.schedule import SCHEDULES

#: arguments whose values may be written as ``name(...)``
NESTED: dict[str, Mapping[str, type]] = {
    "feedback": FEEDBACKS,
    "schedule": SCHEDULES,
}
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""


def split_outside(text: str, separator: str = ",") -> Iterator[str]:
    """Splits a text at separators that are not within brackets or quotes."""
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
    arguments: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in split_outside(text))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name:
            raise ArgumentError("compression", part, "NAME or NAME:ARGUMENT=VALUE,ARGUMENT=VALUE")
        if name in arguments:
            raise ArgumentError("compression", part, f"{name} only once")
        arguments[name] = parse_value(name, value)
    return arguments


def parse_value(argument: str, text: str) -> Any:
    """Returns an argument's value that a text means: ``name(...)``, a Python literal, or a plain word.

    Example:
        >>> parse_value("density", "0.01"), parse_value("threshold", "paper"), parse_value("shared", "false")
        (0.01, 'paper', False)
        >>> parse_value("feedback", "momentum(nesterov=true)").nesterov
        True
    """
    name, bracket, rest = text.partition("(")
    if bracket and name.strip().isidentifier() and text.endswith(")"):
        return _parse_nested(argument, name.strip(), rest[:-1])
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _parse_nested(argument: str, name: str, text: str) -> Any:
    known = NESTED.get(argument)
    if known is None:
        return f"{name}({text})"  # refused by name where the argument is taken
    if name not in known:
        raise UnknownNameError(argument, name, known)
    made, arguments = known[name], parse_arguments(text)
    fields = [item.name for item in dataclasses.fields(made) if item.init]
    for given in arguments:
        if given not in fields:
            raise UnknownNameError(f"argument of {name}", given, fields)
    return made(**arguments)


_log = logging.getLogger("horovod_sparse")


@dataclass(frozen=True)
class ParameterRules:
    """Gives single parameters densities of their own, by their size and name.

    Patterns are those of shells: ``*`` is any text, ``?`` any letter, ``[ab]`` one of these, and they
    are compared with the whole name, as ``model.named_parameters()`` gives it. The first of these that
    holds decides: a pattern of `densities` (in their order), a pattern of `dense`, then `dense_below`.

    Args:
        dense_below: parameters of fewer elements are sent whole, by a plain allreduce.
        dense: patterns of names whose parameters are sent whole.
        densities: density by pattern, instead of the sparsifier's own (and without its schedule).

    Raises:
        ArgumentError: something is of another form.

    Example:
        >>> rules = ParameterRules(dense_below=100, dense=("*.bias",), densities={"embedding.*": 0.01})
        >>> [rules.density_of(name, 4096) for name in ("fc.bias", "embedding.weight", "fc.weight")]
        [1.0, 0.01, None]
    """

    dense_below: int = 0
    dense: tuple[str, ...] = ()
    densities: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        check_count("dense_below", self.dense_below, "a number of elements, 0 or more", low=0)
        dense: Any = self.dense
        dense = (dense,) if isinstance(dense, str) else dense
        dense = tuple(dense) if isinstance(dense, Iterable) else (None,)
        if not all(isinstance(pattern, str) for pattern in dense):
            raise ArgumentError("dense", self.dense, 'patterns of names, as ("*.bias", "*.norm.*")')
        object.__setattr__(self, "dense", dense)
        densities: Any = self.densities
        try:
            densities = dict(densities)
        except (TypeError, ValueError):
            densities = {None: None}
        if not all(isinstance(pattern, str) for pattern in densities):
            raise ArgumentError("densities", self.densities, 'densities by pattern, as {"embedding.*": 0.01}')
        for pattern, density in densities.items():
            check_density(f"densities[{pattern!r}]", density, "a kept fraction in (0, 1]")
        object.__setattr__(self, "densities", tuple(densities.items()))

    def density_of(self, name: str, num_elements: int) -> float | None:
        """Returns a parameter's density: 1 to send it whole, None for the sparsifier's own."""
        for pattern, density in self.densities:
            if fnmatchcase(name, pattern):
                return density
        if num_elements < self.dense_below or any(fnmatchcase(name, pattern) for pattern in self.dense):
            return 1.0
        return None

    def warn_of_unmatched(self, names: Iterable[str]) -> None:
        """Logs a warning for each pattern that matches no parameter's name."""
        known, patterns = sorted(names), [*self.dense, *(pattern for pattern, _ in self.densities)]
        missed = [one for one in patterns if not any(fnmatchcase(name, one) for name in known)]
        if missed:
            _log.warning(
                "patterns in dense= or densities= match no parameter: %s; names are %s",
                ", ".join(map(repr, missed)),
                ", ".join(known[:8]) + (", ..." if len(known) > 8 else ""),
            )

    def arguments(self) -> dict[str, Any]:
        """Returns the rules that are not at their default, as keyword arguments of `recipe`."""
        given = {name: now for name, default in _RULES.items() if (now := getattr(self, name)) != default}
        return {name: dict(value) if name == "densities" else value for name, value in given.items()}


@dataclass(frozen=True)
class Recipe:
    """A sparsifier and its feedback, as a picklable value that may be made before `hvd.init()`.

    Args:
        sparsifier: selects elements, and exchanges them.
        feedback: keeps unsent elements, and may apply momentum or an optimizer's rule.
        rules: densities of single parameters.
    """

    sparsifier: Sparsifier
    feedback: Feedback = field(default_factory=ErrorFeedback)
    rules: ParameterRules = field(default_factory=ParameterRules)
    #: False if the user gave no density, so that an optimizer's rule may raise the default
    density_given: bool = field(default=True, compare=False, repr=False)

    def for_parameter(self, name: str, num_elements: int) -> Recipe:
        """Returns the recipe for a parameter (or a bucket of them), with its density by the rules."""
        density = self.rules.density_of(name, num_elements)
        if density is None:
            return Recipe(self.sparsifier, self.feedback)
        if density == 1.0:
            return self.for_dense()
        changed = dataclasses.replace(self.sparsifier, density=density, schedule=None)
        return Recipe(changed, self.feedback)

    def for_dense(self) -> Recipe:
        """Returns the recipe for a parameter that is sent whole: an allreduce with the same feedback."""
        from horovod_sparse.sparsifiers.dense import Dense

        return Recipe(Dense(), self.feedback.for_dense())

    def describe(self) -> str:
        """Returns one line for logs and checkpoints, from which `parse_recipe` makes an equal recipe.

        Example:
            >>> recipe("dgc", feedback="momentum", dense_below=1024).describe()
            'dgc:density=0.001,feedback=momentum,dense_below=1024'
        """
        parts = [self.sparsifier.describe()]
        if self.feedback != ErrorFeedback():
            parts.append(f"feedback={value_text(self.feedback).removesuffix('()')}")
        parts += [f"{name}={value_text(value)}" for name, value in self.rules.arguments().items()]
        return ",".join(parts)


#: in place of an algorithm's name: the algorithm that it is, and its arguments. "sparseloco" is made for
#: local steps (Sarfi et al. 2025): 64 of 4096 elements, at 10.5 bits each
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "best": ("topk", {"feedback": BestFeedback.text_name}),
    "sparseloco": (
        "chunk_topk",
        {"density": 64 / 4096, "values": "2bit", "indices": "gaps", "feedback": "error(decay=0.95)"},
    ),
}


def for_length(steps: int) -> dict[str, Any]:
    """Returns recipe arguments for AdamW and this many steps: the least bytes that cost a small GPT little.

    Example:
        >>> for_length(10_000)
        {'density': 0.0009, 'values': '2bit', 'indices': 'gaps', 'feedback': 'adam'}
    """
    check_count("steps", steps, "the number of steps of the training, 1 or more")
    # short trainings have a lead to spend, long ones send an element nine times: docs/report.md, section 6
    density = min(max(0.0025, 5e-6 * steps), 9 / min(steps, 10_000))
    return {"density": float(f"{density:.2g}"), "values": "2bit", "indices": "gaps", "feedback": "adam"}


_RULES = {item.name: item.default for item in dataclasses.fields(ParameterRules)}


def recipe_signature(name: str) -> inspect.Signature:
    """Returns the arguments that `recipe(name, ...)` takes, with their defaults."""
    own = {item.name: item.default for item in dataclasses.fields(_algorithm_class(name)) if item.init}
    every = {**own, "feedback": "error", **_RULES}
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature([inspect.Parameter(given, only, default=every[given]) for given in every])


def recipe(name: str, **arguments: Any) -> Recipe:
    """Makes a recipe from an algorithm's name and its arguments.

    Args:
        name: the algorithm's name, as in `Compression`; or "best": top-k, which is the most accurate, with
            the wrapped optimizer's rule as feedback (`BestFeedback`); or "sparseloco", for `LocalSteps`.
        **arguments: the algorithm's arguments; `feedback` (a name of `FEEDBACKS`, or a `Feedback`); those of
            `ParameterRules`; and `steps` of "best" (`for_length`). A value with arguments of its own may be
            text: ``schedule="exponential(steps=400)"``.

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
    if name in PRESETS:
        algorithm, preset = PRESETS[name]
        if name == "best" and "steps" in arguments:
            preset = for_length(arguments.pop("steps"))
        return recipe(algorithm, **{**preset, **arguments})
    signature = recipe_signature(name)
    for argument in arguments:
        if argument not in signature.parameters:
            raise UnknownNameError(f"argument of {name}", argument, signature.parameters)
    for argument in NESTED:
        if isinstance(value := arguments.get(argument), str):
            arguments[argument] = parse_value(argument, value)
    if isinstance(density := arguments.get("density"), str):
        raise ArgumentError("density", density, "a kept fraction in (0, 1], as a number such as 0.01")
    feedback = feedback_named(arguments.pop("feedback", "error"))
    rules = ParameterRules(**{rule: arguments.pop(rule) for rule in _RULES if rule in arguments})
    given = not {"density", "schedule"}.isdisjoint(arguments)
    return Recipe(_algorithm_class(name)(**arguments), feedback, rules, density_given=given)


def parse_recipe(text: str) -> Recipe:
    """Makes a recipe of a user's text: ``name`` or ``name:argument=value,argument=value``.

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
    if name not in PRESETS:
        _algorithm_class(name)
    return recipe(name, **parse_arguments(rest))


def _algorithm_class(name: str) -> type[Sparsifier]:
    if name not in ALGORITHMS:
        raise UnknownNameError("compression", name, ALGORITHMS)
    return ALGORITHMS[name]
