"""The namespace `Compression`: every sparsifier, and Horovod's own choices, as `compression=` takes them."""

from __future__ import annotations

from typing import Any

from horovod.tensorflow.compression import Compressor as Compressor
from horovod.tensorflow.compression import FP16Compressor as FP16Compressor
from horovod.tensorflow.compression import NoneCompressor as NoneCompressor

from horovod_sparse.frontend.compression import Algorithms, recipe_of
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.compressor import SparseCompressor

_COMMON_ARGUMENTS = """
Arguments that every algorithm takes:
    feedback: "error" (default: what is not sent is kept for the next step) or "none".
    process_set: the ranks that take part; those of the tape or optimizer if left out.

Returns:
    A SparseCompressor for the argument compression= of Horovod's tapes and optimizers, and of ours.
    It keeps the residuals: make it once, outside of the training loop, one for every tape or optimizer.
"""


class Compression(
    metaclass=Algorithms,
    make=SparseCompressor,
    binding=("process_set",),
    help_text=_COMMON_ARGUMENTS,
):
    """What the argument `compression=` takes; a superset of `horovod.tensorflow.Compression`.

    ``Compression.topk(density=0.01)``, and likewise for every algorithm: ``help(Compression.exdyna)``
    lists arguments. ``Compression.none`` and ``Compression.fp16`` are Horovod's own.

    Example:
        >>> Compression.exdyna(density=0.001)
        Compression.exdyna(density=0.001)
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16

    @staticmethod
    def parse(text: str, *, process_set: Any = None) -> Any:
        """Reads a choice from a command line.

        Args:
            text: "none", "fp16", or an algorithm with its arguments: ``exdyna:density=0.001``.
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
        return SparseCompressor(recipe, process_set)
