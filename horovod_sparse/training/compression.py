"""The argument `compression` of every front end: factories, checks, and Horovod's `compress`."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse.arrays import GradientParts
from horovod_sparse.errors import ArgumentError, UnknownNameError, UnsupportedError, warn_once
from horovod_sparse.feedback import Bucket, ErrorFeedback, MomentumCorrection, NoFeedback
from horovod_sparse.feedback.recipe import PRESETS, Recipe, parse_recipe, recipe, recipe_signature
from horovod_sparse.kernels.host.scatter import apply_scaled_sums
from horovod_sparse.sparsifiers import ALGORITHMS, BucketInfo
from horovod_sparse.sparsifiers.base import value_text
from horovod_sparse.training import engine
from horovod_sparse.training.parts import host_accumulator

_log = logging.getLogger("horovod_sparse")
#: Horovod's own
_STOCK = ("none", "fp16")
#: the end of each algorithm's help
_COMMON_ARGUMENTS = """
Arguments that every algorithm takes:
    density: kept fraction in (0, 1], of each rank's elements or of the union of all ranks.
    feedback: "error" (default: what is not sent is kept for the next step), "momentum" (momentum
        correction; the optimizer must have none then), "none", or a feedback with arguments, as
        "momentum(momentum=0.9,clip_norm=1.0)".
    dense_below: parameters of fewer elements are sent whole, by an allreduce.
    dense: patterns of names ("*.bias") whose parameters are sent whole.
    densities: densities of parameters by pattern ({"embedding.*": 0.01}).
"""


class Algorithms(type):
    """Metaclass of `Compression`, which gives it a factory for each algorithm: `Compression.topk(...)`.

    Args:
        make: the compressor's class, called with a recipe.
        publishing_errors: wraps a factory, so that its errors reach the other ranks.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_arguments: Any) -> Any:
        """Makes the class without the keyword arguments, which `__init__` uses."""
        return super().__new__(cls, name, bases, body)

    def __init__(
        cls,
        name: str,
        bases: tuple[type, ...],
        body: dict[str, Any],
        *,
        make: type,
        publishing_errors: Callable[..., Any],
    ) -> None:
        super().__init__(name, bases, body)
        cls._factories: dict[str, Callable[..., Any]] = {}
        cls._given = make, functools.partial(publishing_errors, is_last=False)

        def parse(text: str) -> Any:
            """Returns the compression that a text means: "none", "fp16" or ``exdyna:density=0.001``."""
            recipe = recipe_of(text)
            return getattr(cls, text) if recipe is None else make(recipe)

        cls.parse = publishing_errors(parse)

    def __getattr__(cls, name: str) -> Callable[..., Any]:
        if name in ALGORITHMS or name in PRESETS:
            if name not in cls._factories:  # the file of an algorithm is loaded when somebody asks for it
                cls._factories[name] = _factory(name, *cls._given)
            return cls._factories[name]
        known = [*_STOCK, "parse", *PRESETS, *ALGORITHMS]
        raise AttributeError(str(UnknownNameError("compression", name, known)))

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *PRESETS, *ALGORITHMS})


def _factory(name: str, compressor: type, publishing_errors: Callable[..., Any]) -> Any:
    def make(**arguments: Any) -> Any:
        return compressor(recipe(name, **arguments))

    make.__name__, algorithm = name, PRESETS.get(name, (name,))[0]
    make.__qualname__ = f"Compression.{name}"
    make.__doc__ = f"{inspect.getdoc(ALGORITHMS[algorithm])}\n{_COMMON_ARGUMENTS}"
    signature = recipe_signature(algorithm).replace(return_annotation=compressor)
    make.__signature__ = signature  # type: ignore[attr-defined]
    return publishing_errors(make)


def recipe_of(text: str) -> Recipe | None:
    """Returns the recipe that a text means; None for a name of Horovod's own compressions."""
    if text in _STOCK:
        return None
    if text.partition(":")[0].strip() not in (*PRESETS, *ALGORITHMS):
        raise UnknownNameError("compression", text, [*_STOCK, *PRESETS, *ALGORITHMS])
    return parse_recipe(text)


def check_compression(given: object) -> None:
    """Raises if the argument is neither a sparsifier nor one of Horovod's compressions."""
    if all(callable(getattr(given, name, None)) for name in ("compress", "decompress")):
        return
    name, words = getattr(given, "__name__", ""), ""
    if inspect.isroutine(given) and name in ALGORITHMS:
        given, words = f"Compression.{name}", ", with a call"
    example = f"{name if words else 'topk'}(density=0.1){words}"
    allowed = f"a sparsifier as Compression.{example}, its text, or a compressor of Horovod's as "
    raise ArgumentError("compression", given, allowed + "Compression.none")


#: settings that only optimizers have which adapt to gradients: Adam and its kin, RMSprop, Adagrad, Ftrl
_MOMENTS = {"betas", "eps", "etas", "beta_1", "epsilon", "rho", "initial_accumulator_value"}

#: densities below this keep an element in the residual for longer than a momentum of 0.9 remembers
_SPIKES_BELOW = 0.1


def check_momentum(
    recipe: Recipe, settings: Callable[[], Sequence[Mapping[str, Any]]], *, adopts: bool = False
) -> None:
    """Raises if the optimizer has momentum besides the feedback's; warns if the feedback is for plain SGD.

    Also raises for a feedback with an optimizer's own steps, unless the front end applies these (`adopts`).
    Warns of Adam behind momentum correction, and of momentum or moments behind plain error feedback at low
    density.
    """
    feedback = recipe.feedback
    if feedback.applies_rate and not adopts:
        raise UnsupportedError(
            f"feedback={value_text(feedback).removesuffix('()')!r} makes the optimizer's steps, which this "
            "front end does not apply: horovod_sparse.torch.DistributedOptimizer(torch.optim.AdamW(...)) and "
            "horovod_sparse.ddp.attach(model, ..., optimizer=torch.optim.AdamW(...)) do"
        )
    corrects = isinstance(feedback, MomentumCorrection)
    spikes = isinstance(feedback, ErrorFeedback) and recipe.sparsifier.density < _SPIKES_BELOW
    if not (corrects or spikes):
        return
    groups = settings()
    momentum = max((float(group.get("momentum") or 0.0) for group in groups), default=0.0)
    has_moments = any(_MOMENTS & set(group) for group in groups)
    if isinstance(feedback, MomentumCorrection) and momentum:
        raise ArgumentError(
            "momentum",
            momentum,
            "momentum=0 to the optimizer, since the feedback "
            f"MomentumCorrection(momentum={feedback.momentum}) applies momentum before selection; "
            'or feedback="error" to the compression, to leave momentum to the optimizer',
        )
    if corrects and has_moments:
        _log.warning(
            "momentum correction is made for SGD without momentum; this optimizer smooths gradients itself"
        )
    if spikes and (momentum or has_moments):
        told = "moments meet" if has_moments else "momentum meets"
        _log.warning(
            "at density %g this optimizer's %s every element as a spike, and training falls behind dense "
            "training (numbers: docs/report.md). Compression.best(density=%g) leaves that to the feedback",
            *(recipe.sparsifier.density, told, recipe.sparsifier.density),
        )


def check_added_momentum(recipe: Recipe, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises if the optimizer got momentum since it was wrapped, from a checkpoint or a schedule."""
    if any(group.get("momentum") for group in groups):
        check_momentum(recipe, lambda: groups)


def keep_selected(recipe: Recipe, array: np.ndarray, number: int) -> np.ndarray:
    """Returns the array with 0 for elements that the sparsifier would not send; unchanged if not finite.

    Horovod calls `compress` for a single tensor. `number` counts the calls, and seeds random numbers.
    """
    warn_once(
        "Horovod's own allreduce sends every element of what a sparsifier compresses: elements that are not "
        "selected are 0, and are kept for no later call. DistributedOptimizer sends sparsely"
    )
    if not array.size or not np.isfinite(array).all():
        return array
    info = BucketInfo(f"compressed.{number}", array.size, 0, 1, array.dtype.name)
    own = Recipe(recipe.sparsifier, NoFeedback(), recipe.rules).for_parameter(info.name, array.size)
    bucket = Bucket(info, own, host_accumulator(info, own))
    gradient = GradientParts([np.ascontiguousarray(array).reshape(-1)])
    sum_ = engine.carry_out(bucket.step(gradient, scale=1.0))
    kept = np.empty(array.shape, array.dtype)  # flat below as a view, whatever the array's strides
    places = None if sum_.whole else sum_.indices
    apply_scaled_sums([kept.reshape(-1)], [(0, array.size)], places, sum_.values, 1.0)
    return kept
