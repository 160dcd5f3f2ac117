"""What is done with gradients on the host; `device_memory.py` has the same for devices.

On the CPU gradients are NumPy arrays over PyTorch's memory, served by numba's kernels. On any other device
they stay tensors (`device_memory.py`), served by Triton's kernels or PyTorch's. Messages are NumPy arrays on
the host in both cases, and both give the same bits.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from horovod_sparse.arrays import Accumulator, GradientParts, HostAccumulator, WholeGradient
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import Recipe, two_level_bucket
from horovod_sparse.kernels import apply_scaled_sum
from horovod_sparse.kernels.host.scatter import apply_scaled_sums
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.tensors.layout import unscaled

if TYPE_CHECKING:
    from horovod_sparse.tensors.streams import CudaStreams

_log = logging.getLogger("horovod_sparse")

#: types of devices whose memory NumPy can read
HOST_DEVICES = frozenset({"cpu"})

#: of a sum: None for all elements
Indices: TypeAlias = np.ndarray | None


def host_view(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's memory as an array of the same shape and strides; bfloat16 as its bits in uint16."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: np.ndarray = tensor.numpy()
    return array


def recipe_arguments(recipe: Recipe) -> dict[str, Any]:
    return {"density": recipe.sparsifier.density, "companions": recipe.feedback.num_companions}


class GradientMemory:
    """What is done with gradients on the host, and with what is kept for them; see `DeviceMemory`, too."""

    def accumulator(self, info: BucketInfo, recipe: Recipe) -> Accumulator:
        """Residual and companions of a bucket: zeros."""
        return HostAccumulator(info.num_elements, info.dtype, **recipe_arguments(recipe))

    def whole(self, info: BucketInfo) -> Accumulator:
        """What stands in an accumulator's place where all is sent."""
        return WholeGradient(info.num_elements, info.dtype)

    def streams(self) -> CudaStreams | None:
        """Keeps the work on one bucket in order; None where that is the order in which it is asked for."""
        return None

    def foldable(self, gradients: Sequence[torch.Tensor], loss_scale: float = 1.0) -> Any:
        """Returns flat gradients over the loss's scale, as the accumulator folds them, and leaves them."""
        return GradientParts([host_view(unscaled(gradient, loss_scale)) for gradient in gradients])

    #: of what `foldable` gave, one array or tensor that Horovod can sum: half types in float32
    summable: Callable[[Any, BucketInfo], Any] = staticmethod(two_level_bucket.summable)
    #: a sum of a part of it, filled up with 0, as the accumulator folds it, and leaves it as it is
    shard: Callable[[Any, int], Any] = staticmethod(two_level_bucket.foldable)

    def write(
        self,
        gradients: Sequence[torch.Tensor],
        places: Sequence[tuple[int, int]],
        indices: Indices,
        values: Any,
        scale: float,
    ) -> int:
        """Puts scale times a sum in place of flat gradients; returns how many different elements it has.

        Args:
            gradients: one behind the other.
            places: [start, stop) of each.
            indices: of the values; None where they are those of all elements, in their order.
            values: of the sum.
            scale: a factor.
        """
        arrays = [host_view(gradient) for gradient in gradients]
        if indices is None or len(arrays) == 1:
            pieces = [values[start:stop] if indices is None else values for start, stop in places]
            return sum(
                apply_scaled_sum(array, indices, piece, scale)
                for array, piece in zip(arrays, pieces, strict=True)
            )
        return apply_scaled_sums(arrays, places, indices, values, scale)


HOST = GradientMemory()


def memory_of(device: torch.device, name: str) -> GradientMemory:
    if device.type in HOST_DEVICES:
        return HOST
    # by its name: it derives from what is here, and is loaded with the first gradient on a device
    devices: Any = importlib.import_module("horovod_sparse.tensors.device_memory")
    try:
        memory: GradientMemory = devices.device_memory(device)
        return memory
    except (RuntimeError, TypeError, AssertionError) as error:  # as PyTorch's backends put it
        raise UnsupportedError(
            f"the gradient of {name} is on {device}, where no sparsifier can work: that takes float64 beside "
            f"the gradient's own type, and copies to the host ({str(error).splitlines()[0]}). Train on the "
            "CPU or on a CUDA device, or use compression=Compression.none or .fp16"
        ) from error


def zeros(num_elements: int, like: torch.Tensor) -> torch.Tensor:
    """Zeros. On the host NumPy's, which asks for huge pages: large folds miss the TLB less."""
    if like.device.type != "cpu" or not num_elements:
        return torch.zeros(num_elements, dtype=like.dtype, device=like.device)
    return torch.from_numpy(np.zeros(num_elements * like.element_size(), np.uint8)).view(like.dtype)
