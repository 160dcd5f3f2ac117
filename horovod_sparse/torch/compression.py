"""The namespace `Compression`: every sparsifier, and Horovod's own choices, as `compression=` takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from horovod_sparse.errors import UnknownNameError
from horovod_sparse.feedback import parse_recipe, recipe, recipe_signature
from horovod_sparse.sparsifiers import ALGORITHMS
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.compressor import SparseCompressor

__all__ = ["Compression", "SparseCompressor"]

_BINDING = ("named_parameters", "process_set")

_COMMON_ARGUMENTS = """
Arguments that every algorithm takes:
    feedback: "error" (default: what is not sent is kept for the next step) or "none".
    named_parameters: names for messages and checkpoints, as from model.named_parameters(). Not needed:
        without them the names of the optimizer are used.
    process_set: the ranks that take part; those of the optimizer if left out.

Returns:
    A SparseCompressor for the argument compression= of horovod.torch.DistributedOptimizer or
    horovod_sparse.torch.DistributedOptimizer.
"""


def _factory(name: str) -> Callable[..., SparseCompressor]:
    """A function that makes a compressor of an algorithm, with that algorithm's arguments and help."""

    def make(
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: Any = None,
        **arguments: Any,
    ) -> SparseCompressor:
        return SparseCompressor(recipe(name, **arguments), named_parameters, process_set)

    algorithm = ALGORITHMS[name]
    make.__name__ = name
    make.__qualname__ = f"Compression.{name}"
    make.__doc__ = f"{inspect.getdoc(algorithm)}\n{_COMMON_ARGUMENTS}"
    own = recipe_signature(name).parameters.values()
    binding = [inspect.Parameter(item, inspect.Parameter.KEYWORD_ONLY, default=None) for item in _BINDING]
    make.__signature__ = inspect.Signature([*own, *binding], return_annotation=SparseCompressor)  # type: ignore[attr-defined]
    return make


_FACTORIES = {name: _factory(name) for name in ALGORITHMS}


class _Algorithms(type):
    """Gives the namespace one factory per algorithm; a new algorithm needs no change here."""

    def __getattr__(cls, name: str) -> Callable[..., SparseCompressor]:
        if name in _FACTORIES:
            return _FACTORIES[name]
        raise AttributeError(
            str(UnknownNameError("compression", name, ["none", "fp16", "parse", *ALGORITHMS]))
        )

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *_FACTORIES})


class Compression(metaclass=_Algorithms):
    """What the argument `compression=` takes; a superset of `horovod.torch.Compression`.

    ``Compression.topk(density=0.01)``, and likewise for every algorithm: ``help(Compression.exdyna)``
    lists arguments. ``Compression.none`` and ``Compression.fp16`` are Horovod's own.

    Example:
        >>> Compression.exdyna(density=0.001)
        Compression.exdyna(density=0.001)
        >>> Compression.topk(densty=0.01)
        Traceback (most recent call last):
        horovod_sparse.errors.UnknownNameError: unknown argument of topk 'densty': the known ones are \
density, feedback, indices, quantum, schedule, values
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16

    @staticmethod
    def parse(
        text: str,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: Any = None,
    ) -> Any:
        """Reads a choice from a command line.

        Args:
            text: "none", "fp16", or an algorithm with its arguments: ``exdyna:density=0.001``.
            named_parameters: see `SparseCompressor`.
            process_set: see `SparseCompressor`.

        Returns:
            What the attribute of that name is, or makes.

        Raises:
            UnknownNameError: for a misspelt algorithm or argument, with the valid ones.
            ArgumentError: for a value that is not allowed.

        Example:
            >>> Compression.parse("micro:density=0.01,threshold=paper")
            Compression.micro(density=0.01, threshold='paper')
            >>> Compression.parse("none") is Compression.none
            True
        """
        if text in ("none", "fp16"):
            return getattr(Compression, text)
        if text.partition(":")[0].strip() not in ALGORITHMS:
            raise UnknownNameError("compression", text, ["none", "fp16", *ALGORITHMS])
        return SparseCompressor(parse_recipe(text), named_parameters, process_set)
