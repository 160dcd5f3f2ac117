"""The argument `compression` of every front end: factories, checks, and the sum of a single tensor by it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod_sparse.arrays import GradientParts
from horovod_sparse.carriers.exchanges import answer_for_one_rank
from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import (
    ArgumentError,
    NonFiniteGradientError,
    UnknownNameError,
    UnsupportedError,
    warn_once,
)
from horovod_sparse.feedback import Bucket, ErrorFeedback, MomentumCorrection, NoFeedback
from horovod_sparse.feedback.recipe import PRESETS, Recipe, parse_recipe, recipe, recipe_signature
from horovod_sparse.kernels.host.scatter import apply_scaled_sums
from horovod_sparse.sparsifiers import ALGORITHMS, BucketInfo, SparseSum
from horovod_sparse.sparsifiers.base import value_text
from horovod_sparse.training import engine
from horovod_sparse.training.agreement import compared, declaration
from horovod_sparse.training.parts import host_accumulator

_log = logging.getLogger("horovod_sparse")
#: Horovod's own
_STOCK = ("none", "fp16")


class Algorithms(type):
    """Metaclass of a front end's `Compression`: one factory per algorithm; a new algorithm needs no change.

    Args:
        make: the compressor's class, called with a recipe.
        help_text: says what all algorithms take; follows the algorithm's own help.
        telling: has the other ranks hear of a factory's errors.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_arguments: Any) -> Any:
        """Makes the class; `__init__` reads the arguments."""
        return super().__new__(cls, name, bases, body)

    def __init__(
        cls,
        name: str,
        bases: tuple[type, ...],
        body: dict[str, Any],
        *,
        make: type,
        help_text: str,
        telling: Callable[..., Any],
    ) -> None:
        super().__init__(name, bases, body)
        cls._factories: dict[str, Callable[..., Any]] = {}
        cls._given = make, help_text, functools.partial(telling, is_last=False)

        def parse(text: str) -> Any:
            """Reads a choice from a command line.

            Args:
                text: "none", "fp16", or an algorithm with its arguments: ``exdyna:density=0.001``.

            Returns:
                What the attribute of that name is, or makes.
            """
            recipe = recipe_of(text)
            return getattr(cls, text) if recipe is None else make(recipe)

        cls.parse = telling(parse)

    def __getattr__(cls, name: str) -> Callable[..., Any]:
        if name in ALGORITHMS or name in PRESETS:
            if name not in cls._factories:  # the file of an algorithm is loaded when somebody asks for it
                cls._factories[name] = _factory(name, *cls._given)
            return cls._factories[name]
        known = [*_STOCK, "parse", *PRESETS, *ALGORITHMS]
        raise AttributeError(str(UnknownNameError("compression", name, known)))

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *PRESETS, *ALGORITHMS})


def _factory(name: str, compressor: type, help_text: str, telling: Callable[..., Any]) -> Any:
    def make(**arguments: Any) -> Any:
        return compressor(recipe(name, **arguments))

    make.__name__, algorithm = name, PRESETS.get(name, (name,))[0]
    make.__qualname__ = f"Compression.{name}"
    make.__doc__ = f"{inspect.getdoc(ALGORITHMS[algorithm])}\n{help_text}"
    signature = recipe_signature(algorithm).replace(return_annotation=compressor)
    make.__signature__ = signature  # type: ignore[attr-defined]
    return telling(make)


def recipe_of(text: str) -> Recipe | None:
    """Reads a recipe from text; None for one of Horovod's own, by name."""
    if text in _STOCK:
        return None
    if text.partition(":")[0].strip() not in (*PRESETS, *ALGORITHMS):
        raise UnknownNameError("compression", text, [*_STOCK, *PRESETS, *ALGORITHMS])
    return parse_recipe(text)


def check_compression(given: object) -> None:
    """Refuses a compression that is neither a sparsifier nor Horovod's."""
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

#: densities at which an element waits longer than a momentum of 0.9 remembers
_SPIKES_BELOW = 0.1


def refuse_double_momentum(
    recipe: Recipe, settings: Callable[[], Sequence[Mapping[str, Any]]], *, adopts: bool = False
) -> None:
    """Refuses momentum after momentum correction, and warns of feedbacks that are made for plain SGD.

    Steps that are normalized already are refused, too, where the front end has no optimizer apply them
    (`adopts`). Warned of are moments (Adam) behind momentum correction, `scale_residual` where something
    outlives the step, and momentum of either kind behind plain error feedback at low density.
    """
    feedback = recipe.feedback
    if feedback.applies_rate and not adopts:
        raise UnsupportedError(
            f"feedback={value_text(feedback).removesuffix('()')!r} makes the optimizer's steps, which this "
            "front end does not apply: horovod_sparse.torch.DistributedOptimizer(torch.optim.AdamW(...)) and "
            "horovod_sparse.ddp.attach(model, ..., optimizer=torch.optim.AdamW(...)) do"
        )
    corrects, scales = isinstance(feedback, MomentumCorrection), feedback.scale_residual
    spikes = isinstance(feedback, ErrorFeedback) and recipe.sparsifier.density < _SPIKES_BELOW
    if not (corrects or scales or spikes):
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
            "at density %g this optimizer's %s every element as a spike, and training is behind dense "
            "training (numbers: docs/results.md). Compression.best(density=%g) leaves that to the feedback",
            *(recipe.sparsifier.density, told, recipe.sparsifier.density),
        )
    if scales and (momentum or has_moments):
        _log.warning(
            "scale_residual=True is made for SGD without momentum: this optimizer remembers gradients longer "
            "than a step, and will remember what a falling learning rate has enlarged; leave it out"
        )


def refuse_later_momentum(recipe: Recipe, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuses momentum that a checkpoint or a schedule has set since the optimizer was wrapped."""
    if any(group.get("momentum") for group in groups):
        refuse_double_momentum(recipe, lambda: groups)


class ArrayMemory:
    """Makes accumulators for NumPy gradients, and overwrites gradients with their sum."""

    accumulator, foldable = staticmethod(host_accumulator), GradientParts
    write = staticmethod(apply_scaled_sums)


class LoneTensor:
    """A tensor that is summed by itself: rules apply to its name, and nothing of it is kept for a later sum.

    Args:
        recipe: sparsifier and rules.
        info: the tensor's facts.
        memory: `ArrayMemory`, or a memory of PyTorch's tensors.
        given: the elements, flat.
        total: becomes the sum, flat.
    """

    def __init__(self, recipe: Recipe, info: BucketInfo, memory: Any, given: Any, total: Any) -> None:
        own = Recipe(recipe.sparsifier, NoFeedback(), recipe.rules)
        own = own.for_parameter(info.name, info.num_elements)
        self._bucket = Bucket(info, own, memory.accumulator(info, own))
        self._given = memory.foldable([given])
        self._write: Callable[..., object] = functools.partial(
            memory.write, [total], [(0, info.num_elements)]
        )

    def summed(self, facts: Mapping[str, str], scale: float) -> Synchronization[None]:
        """Sums over ranks, after ranks have compared facts; reads the tensor before its first request."""
        report = self._bucket.fold(self._given, None)
        yield from compared(facts)
        self._put((yield from self._bucket.synchronize(report, scale)), scale)

    def write_alone(self) -> bool:
        """Overwrites the tensor with this rank's selection; returns False if it is not finite."""
        warn_once(
            "Horovod's own allreduce sends every element of what a sparsifier compresses: elements that are "
            "not selected are 0, and are kept for no later call. allreduce of horovod_sparse sends sparsely"
        )
        try:
            self._put(engine.carry_out(self._bucket.step(self._given, scale=1.0), answer_for_one_rank), 1.0)
        except NonFiniteGradientError:
            return False
        return True

    def _put(self, sum_: SparseSum, scale: float) -> None:
        self._write(None if sum_.whole else sum_.indices, sum_.values, scale)


def terms(
    hvd: Any,
    recipe: Recipe,
    op: Any,
    average: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
) -> tuple[float, Callable[[Any, str], dict[str, str]]]:
    """Returns the factor of a sum over ranks, and a function that says which facts ranks compare.

    Raises:
        ArgumentError: if the operation is neither Average nor Sum, or this rank is not in the process set.
        UnsupportedError: if the operation is Adasum.
    """
    names = {getattr(hvd, name): name for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product")}
    chosen = names.get(hvd.mpi_ops.handle_average_backwards_compatibility(op, average), str(op))
    if chosen == "Adasum":
        raise UnsupportedError(
            "op=Adasum cannot be combined with a sparsifier, which leaves out what it combines by. Use "
            "op=Average or op=Sum, or compression=Compression.none"
        )
    if chosen not in ("Average", "Sum"):
        allowed = "Average or Sum: elements that a rank does not send count as 0; or Compression.none"
        raise ArgumentError("op", chosen, allowed)
    if not process_set.included():
        raise ArgumentError("process_set", str(process_set), "a set with this rank")

    def facts(shape: Any, dtype: str) -> dict[str, str]:
        given = {"shape": list(shape), "dtype": dtype, "process_set": list(process_set.ranks), "op": chosen}
        factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
        return declaration(recipe, "allreduce", **given, **factors)

    return float(postscale_factor) / (process_set.size() if chosen == "Average" else 1), facts


def refuse_gradients(requires_grad: bool) -> None:
    if requires_grad:
        raise UnsupportedError(
            "the tensor requires a gradient, and a sum that a sparsifier makes has none: give "
            "tensor.detach(), or call this under torch.no_grad()"
        )


#: the last start of Horovod, and the calls without a name in it, by process set
_calls: tuple[object, Counter[int]] = (None, Counter())


def call_name(start: object, process_set: Any) -> str:
    """Names a call without a name by its number, counted anew after each start of Horovod."""
    global _calls
    if _calls[0] is not start:
        _calls = start, Counter()
    number = _calls[1][process_set.process_set_id]
    _calls[1][process_set.process_set_id] += 1
    return f"noname.{number}"
