"""What a user may say of local steps: `LocalOptions`, and what they are once checked, `RoundSettings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, TypedDict

from horovod_sparse.checks import check_count, check_number
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.feedback import ErrorFeedback, NoFeedback, Recipe, parse_recipe
from horovod_sparse.sparsifiers.base import SelectAndGather
from horovod_sparse.sparsifiers.dense import Dense
from horovod_sparse.training.settings import Settings

#: what a mean is over: all ranks, or at each position those that have sent it
COMBINES = "ranks", "senders"


@dataclass(frozen=True)
class OuterStep:
    """What a mean displacement does to the common parameters: SGD, with Nesterov's momentum if it has any.

    ``v <- momentum v + mean,  theta <- theta - lr (mean + momentum v)``

    Args:
        lr: above 0.
        momentum: in [0, 1). Above 0 only where nothing is compressed: a residual is a momentum itself.

    Source: Douillard et al. 2023 (DiLoCo): 0.7 and 0.9; Sarfi et al. 2025 (SparseLoCo): 1 and 0.

    Example:
        >>> OuterStep.named("nesterov")
        OuterStep(lr=0.7, momentum=0.9)
    """

    lr: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        check_number("outer.lr", self.lr, "a rate above 0, at most 10", low=0.0, high=10.0)
        bounds: dict[str, Any] = {"low": 0.0, "high": 1.0, "include_low": True, "include_high": False}
        check_number("outer.momentum", self.momentum, "a number in [0, 1)", **bounds)

    @classmethod
    def named(cls, given: str | OuterStep) -> OuterStep:
        """By its name, "sgd" or "nesterov", or itself."""
        known = {"sgd": cls(), "nesterov": cls(0.7, 0.9)}
        if isinstance(given, str) and given not in known:
            raise UnknownNameError("outer", given, known)
        found = known.get(given, given) if isinstance(given, str) else given
        if not isinstance(found, cls):
            raise ArgumentError("outer", given, "'sgd', 'nesterov' or an OuterStep(lr=..., momentum=...)")
        return found


class LocalOptions(TypedDict, total=False):
    """What local steps take by keyword beside `every`: see `RoundSettings`, of the last four `Settings`."""

    compression: str | Recipe | None
    outer: str | OuterStep
    combine: str | None
    delay: int
    clip: str | None
    offload: bool
    on_nonfinite: str
    check_every: int | None
    deadline_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """What may be said of local steps: see `LocalSteps` of the front ends.

    Raises:
        ArgumentError: for a value that is not allowed, or values that do not go together.
        UnknownNameError: for a name that there is not.

    Example:
        >>> RoundSettings(every=30, compression="sparseloco", outer="nesterov")
        Traceback (most recent call last):
        horovod_sparse.errors.ArgumentError: outer=OuterStep(lr=0.7, momentum=0.9) is not allowed: give \
'sgd' with a compression: a residual is a momentum already, and two overshoot (compression=None takes any)
    """

    every: int
    compression: InitVar[Any] = None
    recipe: Recipe = field(init=False)
    outer: OuterStep = OuterStep()
    combine: str | None = None
    delay: int = 0
    clip: str | None = None
    offload: bool = False

    def __post_init__(self, compression: Any) -> None:
        check_count("every", self.every, "a number of steps, 1 or more")
        check_count("delay", self.delay, "a number of steps, 0 or more", low=0)
        if self.delay > self.every:
            allowed = f"at most {self.every} steps, after which the next exchange begins"
            raise ArgumentError("delay", self.delay, allowed)
        outer = OuterStep.named(self.outer)
        recipe = parse_recipe(compression) if isinstance(compression, str) else compression
        if recipe is None:
            recipe = Recipe(Dense())
        elif not isinstance(recipe, Recipe):
            allowed = 'a sparsifier as text ("sparseloco") or as a recipe, or None to send everything'
            raise ArgumentError("compression", compression, allowed)
        elif outer.momentum:
            allowed = "'sgd' with a compression: a residual is a momentum already, and two overshoot"
            raise ArgumentError("outer", outer, f"{allowed} (compression=None takes any)")
        if not isinstance(recipe.feedback, (ErrorFeedback, NoFeedback)):
            allowed = "'error' or 'none' with local steps: each rank's own optimizer has its moments already"
            raise ArgumentError("feedback", recipe.feedback, allowed)
        named = isinstance(recipe.sparsifier, SelectAndGather) and recipe.sparsifier.names_senders
        combine = COMBINES[named] if self.combine is None else self.combine
        if combine not in COMBINES:
            raise UnknownNameError("combine", str(combine), COMBINES)
        if self.clip not in (None, "median"):
            raise ArgumentError("clip", self.clip, "'median', or None")
        if not named:
            why = f"with {recipe.sparsifier.name}: its sums do not say who has sent what"
            if self.clip:
                raise ArgumentError("clip", self.clip, f"None {why}")
            if combine == "senders" and not isinstance(recipe.sparsifier, Dense):
                raise ArgumentError("combine", combine, f"'ranks' {why}")
        object.__setattr__(self, "outer", outer)
        object.__setattr__(self, "recipe", recipe)
        object.__setattr__(self, "combine", combine)

    @classmethod
    def of(cls, every: int, options: Mapping[str, Any], front_end: str) -> tuple[RoundSettings, Settings]:
        """Of a front end's arguments: `LocalOptions`, as the user gave them."""
        own = LocalOptions.__annotations__.keys() - {one.name for one in fields(Settings)}
        others = {name: value for name, value in options.items() if name not in own}
        settings = Settings.of(others, front_end, LocalOptions, ("every",))
        return cls(every=every, **{name: options[name] for name in own & options.keys()}), settings

    def describe(self) -> dict[str, object]:
        """What has to be equal on all ranks, by argument; of the recipe they hear anyway."""
        return {name: getattr(self, name) for name in ("every", "outer", "combine", "delay", "clip")}
