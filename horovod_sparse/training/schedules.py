"""Schedules of exchanges: every so many passes (`Schedule`) or local steps (`LocalSchedule`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import Any, TypedDict

from horovod_sparse.checks import check_count, check_number
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.feedback import ErrorFeedback, NoFeedback, Recipe, parse_recipe
from horovod_sparse.kernels.host.scatter import sum_duplicates
from horovod_sparse.sparsifiers import SparseSum
from horovod_sparse.sparsifiers.base import SelectAndGather
from horovod_sparse.sparsifiers.dense import Dense
from horovod_sparse.training.settings import Settings

#: "ranks": the mean is over all ranks; "senders": at each index over those that sent it
COMBINES = "ranks", "senders"


@dataclass(frozen=True)
class Schedule:
    """Says when ranks exchange, every `every` passes, and apply a mean, `delay` exchanges later."""

    every: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        check_count("every", self.every, "a number of steps, 1 or more")
        allowed = "a number of exchanges, 0 to 64"
        check_count("delay", self.delay, allowed, low=0)
        if self.delay > 64:  # each exchange in flight has memory of its own on every rank
            raise ArgumentError("delay", self.delay, allowed)

    @property
    def moves_at_once(self) -> bool:
        """True if a rank applies its own step before it has received the others'."""
        return self.every > 1 or self.delay > 0

    def check(self, recipe: Recipe, settings: Settings) -> None:
        """Raises if the recipe cannot have this `every` and `delay`, or own steps exclude a setting."""
        if not recipe.feedback.applies_rate:
            if self.moves_at_once:
                allowed = "'best' if every > 1 or delay > 0: others' gradients are exchanged in every step"
                raise ArgumentError("compression", recipe.describe(), allowed)
            return
        for name in ("merging", "tensor_selection", "profile", "max_grad_norm"):
            if (given := getattr(settings, name)) is not None:
                remedy = "feedback='error' exchanges gradients"
                if name == "max_grad_norm":
                    remedy = "torch.nn.utils.clip_grad_norm_ before step() clips"
                raise ArgumentError(name, given, f"None: this feedback exchanges steps; {remedy}")
        if settings.levels != "flat":
            allowed = "'flat' with this feedback; feedback='error' takes 'host', too"
            raise ArgumentError("levels", settings.levels, allowed)
        if self.moves_at_once and not isinstance(recipe.sparsifier, (SelectAndGather, Dense)):
            name, given = ("every", self.every) if self.every > 1 else ("delay", self.delay)
            allowed = (
                f"every=1 and delay=0 with {recipe.sparsifier.name}, whose selections need other ranks in "
                "every step; topk, chunk_topk, dgc, sidco, hard_threshold and randomk select on their own"
            )
            raise ArgumentError(name, given, allowed)

    def describe(self) -> dict[str, str]:
        """Returns the arguments that have to be equal on all ranks, as text."""
        return {"every": str(self.every), "delay": str(self.delay)}


def mean_over_senders(sum_: SparseSum) -> SparseSum:
    """Divides each element of a sum by the number of ranks that sent it.

    Example:
        >>> import numpy as np
        >>> indices, values = np.array([2, 5, 2], np.int32), np.array([1.0, 4.0, 3.0])
        >>> mean = mean_over_senders(SparseSum(indices, values, np.array([2, 1])))
        >>> mean.indices.tolist(), mean.values.tolist()
        ([2, 5], [2.0, 4.0])
    """
    indices, totals, senders = sum_duplicates(sum_.indices, sum_.values)
    return replace(sum_, indices=indices, values=totals / senders)


@dataclass(frozen=True)
class OuterStep:
    """Applies the mean displacement to the common parameters by SGD, optionally with Nesterov momentum.

    ``v <- momentum v + mean,  theta <- theta - lr (mean + momentum v)``

    Args:
        lr: above 0.
        momentum: in [0, 1). Above 0 only where nothing is compressed: a residual is a momentum itself.

    Source: Douillard et al. 2023 (DiLoCo): 0.7 and 0.9; Sarfi et al. 2025 (SparseLoCo): 1 and 0.
    """

    lr: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        check_number("outer.lr", self.lr, "a rate above 0, at most 10", "(0, 10]")
        check_number("outer.momentum", self.momentum, "a number in [0, 1)", "[0, 1)")

    @classmethod
    def named(cls, given: str | OuterStep) -> OuterStep:
        """Returns the outer step called "sgd" or "nesterov", or the given `OuterStep`."""
        known = {"sgd": cls(), "nesterov": cls(0.7, 0.9)}
        if isinstance(given, str) and given not in known:
            raise UnknownNameError("outer", given, known)
        found = known.get(given, given) if isinstance(given, str) else given
        if not isinstance(found, cls):
            raise ArgumentError("outer", given, "'sgd', 'nesterov' or an OuterStep(lr=..., momentum=...)")
        return found


class LocalOptions(TypedDict, total=False):
    """Keyword arguments of local steps beside `every`."""

    compression: str | Recipe | None
    outer: str | OuterStep
    combine: str | None
    delay: int
    on_nonfinite: str
    check_every: int | None
    deadline_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class LocalSchedule(Schedule):
    """The checked arguments of `LocalSteps`: how often ranks exchange, and how displacements are averaged.

    Example:
        >>> LocalSchedule(every=30, compression="sparseloco", outer="nesterov")
        Traceback (most recent call last):
        horovod_sparse.errors.ArgumentError: outer=OuterStep(lr=0.7, momentum=0.9) is not allowed: give \
'sgd' with a compression: a residual is a momentum already, and two overshoot (compression=None takes any)
    """

    compression: InitVar[Any] = None
    recipe: Recipe = field(init=False)
    outer: OuterStep = OuterStep()
    combine: str | None = None

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
        if combine == "senders" and not named and not isinstance(recipe.sparsifier, Dense):
            why = f"'ranks' with {recipe.sparsifier.name}: its sums do not say which ranks sent an element"
            raise ArgumentError("combine", combine, why)
        object.__setattr__(self, "outer", outer)
        object.__setattr__(self, "recipe", recipe)
        object.__setattr__(self, "combine", combine)

    @classmethod
    def of(cls, every: int, options: Mapping[str, Any], front_end: str) -> tuple[LocalSchedule, Settings]:
        """Makes schedule and settings of the user's keyword arguments (`LocalOptions`)."""
        own = LocalOptions.__annotations__.keys() - {one.name for one in fields(Settings)}
        others = {name: value for name, value in options.items() if name not in own}
        settings = Settings.of(others, front_end, LocalOptions, ("every",))
        return cls(every=every, **{name: options[name] for name in own & options.keys()}), settings

    @property
    def moves_at_once(self) -> bool:
        return True

    def check(self, recipe: Recipe, settings: Settings) -> None:
        """Accepts every sparsifier, since local steps select in an exchange only."""

    def describe(self) -> dict[str, str]:
        return {name: str(getattr(self, name)) for name in ("every", "outer", "combine", "delay")}

    def mean_of(self, sum_: SparseSum, sparsifier: Any, size: int) -> tuple[SparseSum, float]:
        """Returns a sum and a factor, whose product is the mean displacement of all ranks or of senders."""
        if self.combine == "senders" and isinstance(sparsifier, SelectAndGather):
            return mean_over_senders(sum_), 1.0
        return sum_, 1.0 / size
