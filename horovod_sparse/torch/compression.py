"""Values of `compression=`: sparsifiers and Horovod's own choices."""

from __future__ import annotations

from typing import Any

import torch

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.tensors.layout import dtype_name
from horovod_sparse.torch.driver import construction_errors, hvd
from horovod_sparse.training import compression as common


class SparseCompressor(hvd.compression.Compressor):
    """A recipe as a value for `compression=`; made by `Compression.topk(...)` and others.

    One compressor may serve several optimizers.

    Stock ``horovod.torch.DistributedOptimizer(optimizer, named_parameters=..., compression=...)`` is adopted
    where it would begin to synchronize gradients: it becomes what our `DistributedOptimizer` gives with
    ``merging="layerwise", tensor_selection="all"``, so every parameter is a bucket of its own, and density
    applies to each for itself. Horovod's `groups` have no use then. With one rank Horovod synchronizes
    nothing, and the optimizer stays Horovod's: gradients stay as they are, so it trains without the momentum
    that momentum correction was to apply. ``horovod_sparse.torch.DistributedOptimizer`` does with one rank
    what it does with many.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._num_compressed = 0

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns the tensor with 0 for all elements that one rank would not select; keeps no residual.

        Called by ``horovod.torch.allreduce(tensor, compression=...)``. Integers, COO tensors, and tensors
        with a NaN or Inf stay as they are.

        Example:
            >>> Compression.topk(density=0.5).compress(torch.tensor([1.0, -4.0]))
            (tensor([ 0., -4.]), None)
        """
        if dtype_name(tensor) is None or tensor.layout != torch.strided:
            return tensor, None
        if tensor.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError("a sparsified tensor has no gradient: give tensor.detach() of this one")
        self._num_compressed += 1
        array = tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32)).numpy()
        kept = common.keep_selected(self.recipe, array, self._num_compressed)
        return torch.from_numpy(kept).to(tensor), None

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the tensor unchanged."""
        return tensor

    def __repr__(self) -> str:
        return f"Compression.parse({self.recipe.describe()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (SparseCompressor, (self.recipe,))


def __getattr__(name: str) -> Any:
    """Returns names of Horovod's module that this module replaces: `Compressor`, `FP16Compressor`, ..."""
    return getattr(hvd.compression, name)


class Compression(
    metaclass=common.Algorithms,
    make=SparseCompressor,
    publishing_errors=construction_errors.publishing_errors,
):
    """The values for the argument `compression=`; a superset of `horovod.torch.Compression`.

    ``Compression.topk(density=0.01)``, and likewise for every algorithm: ``help(Compression.exdyna)``
    lists arguments. ``Compression.none`` and ``Compression.fp16`` are Horovod's own.

    Example:
        >>> Compression.parse("exdyna:density=0.001"), Compression.parse("none") is Compression.none
        (Compression.parse('exdyna:density=0.001'), True)
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16
