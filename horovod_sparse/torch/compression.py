"""The namespace `Compression`: every sparsifier, and Horovod's own choices, as `compression=` takes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.comparison import construction_errors
from horovod_sparse.torch.compressor import SparseCompressor
from horovod_sparse.training.compression import Algorithms, recipe_of

_COMMON_ARGUMENTS = """
Arguments that every algorithm takes:
    feedback: "error" (default: what is not sent is kept for the next step), "momentum" (momentum
        correction; the optimizer must have none then), "none", or a feedback with arguments, as
        "momentum(momentum=0.9,clip_norm=1.0)".
    dense_below: parameters of fewer elements are sent whole, by an allreduce.
    dense: patterns of names ("*.bias") whose parameters are sent whole.
    densities: densities of parameters by pattern ({"embedding.*": 0.01}).
    named_parameters: names for messages and checkpoints, as from model.named_parameters(). Not needed:
        without them the names of the optimizer are used.
    process_set: the ranks that take part; those of the optimizer if left out.

Returns:
    A SparseCompressor for the argument compression= of horovod.torch.DistributedOptimizer or
    horovod_sparse.torch.DistributedOptimizer.
"""


def __getattr__(name: str) -> Any:
    """Horovod's names of the module that this one stands for: `Compressor`, `FP16Compressor`, ..."""
    return getattr(hvd.compression, name)


class Compression(
    metaclass=Algorithms,
    make=SparseCompressor,
    binding=("named_parameters", "process_set"),
    help_text=_COMMON_ARGUMENTS,
    telling=construction_errors.telling,
):
    """What the argument `compression=` takes; a superset of `horovod.torch.Compression`.

    ``Compression.topk(density=0.01)``, and likewise for every algorithm: ``help(Compression.exdyna)``
    lists arguments. ``Compression.none`` and ``Compression.fp16`` are Horovod's own.

    Example:
        >>> Compression.exdyna(density=0.001)
        Compression.exdyna(density=0.001)
        >>> Compression.topk(densty=0.01)
        Traceback (most recent call last):
        horovod_sparse.errors.UnknownNameError: unknown argument of topk 'densty': the known ones are \
dense, dense_below, densities, density, feedback, indices, quantum, schedule, values
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16

    @staticmethod
    @construction_errors.telling
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
        recipe = recipe_of(text)
        if recipe is None:
            return getattr(Compression, text)
        return SparseCompressor(recipe, named_parameters, process_set)
