"""What is done with gradients where they are, and the host's memory.

On the CPU gradients are NumPy arrays over PyTorch's memory, served by numba's kernels. On any other device
they stay tensors (`device_memory.py`), served by Triton's kernels or PyTorch's. Messages are NumPy arrays on
the host in both cases, and both give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from horovod_sparse.arrays import Accumulator, GradientParts, HostAccumulator
from horovod_sparse.collectives import AllReduce, Synchronization
from horovod_sparse.feedback import Recipe, two_level_bucket
from horovod_sparse.kernels import apply_scaled_sum, clear_all, clear_at
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.training.parts import REFUSED, Members, check_sum

if TYPE_CHECKING:
    from horovod_sparse.tensors.streams import CudaStreams

#: types of devices whose memory NumPy can read
HOST_DEVICES = frozenset({"cpu"})

#: of a sum: None for all elements
Places: TypeAlias = np.ndarray | None

#: scattered elements above this share of a buffer are cleared faster by clearing all of it
_SPARSE_SHARE = 1 / 8


def unscaled(gradient: torch.Tensor, loss_scale: float) -> torch.Tensor:
    """A gradient over the scale of its loss, half types in float32; the gradient itself where that is 1."""
    if loss_scale == 1.0:
        return gradient.detach()
    return gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)) * (1.0 / loss_scale)


def host_view(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's memory as an array of the same shape and strides; bfloat16 as its bits in uint16."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: np.ndarray = tensor.numpy()
    return array


def recipe_arguments(recipe: Recipe) -> dict[str, Any]:
    """Of an accumulator."""
    return {"density": recipe.sparsifier.density, "companions": recipe.feedback.num_companions}


class GradientMemory:
    """What is done with gradients on the host, and with what is kept for them; see `DeviceMemory`, too."""

    def accumulator(self, info: BucketInfo, recipe: Recipe) -> Accumulator:
        """Residual and companions of a bucket: zeros."""
        return HostAccumulator(info.num_elements, info.dtype, **recipe_arguments(recipe))

    def streams(self) -> CudaStreams | None:
        """Keeps the work on one bucket in order; None where that is the order in which it is asked for."""
        return None

    def foldable(self, gradient: torch.Tensor, loss_scale: float = 1.0) -> Any:
        """The gradient over the loss's scale, as the accumulator folds it, and leaves it as it is."""
        return GradientParts([host_view(unscaled(gradient, loss_scale))])

    def summable(self, foldable: Any, whole: BucketInfo) -> Any:
        """Of what `foldable` gave, one array or tensor that Horovod can sum: half types in float32."""
        return two_level_bucket.summable(foldable, whole)

    def shard(self, total: Any, num_elements: int) -> Any:
        """A sum of a part of it, filled up with 0, as the accumulator folds it, and leaves it as it is."""
        return two_level_bucket.foldable(total, num_elements)

    def write(self, gradient: torch.Tensor, indices: Places, values: np.ndarray, scale: float) -> int:
        """Scale times a sum in place of a contiguous gradient; how many different elements the sum has.

        Indices are None where the values are those of all elements, in their order.
        """
        return apply_scaled_sum(host_view(gradient), indices, values, scale, is_zero=False)

    def zero(self, gradient: torch.Tensor) -> None:
        """Zeros everywhere in a flat gradient, whatever it holds."""
        clear_all(host_view(gradient))

    def clear(self, gradient: torch.Tensor, scattered: np.ndarray, probes: np.ndarray) -> bool:
        """Zeros everywhere in a flat gradient that should hold something at the scattered places only.

        Whether it held something at other places, as far as somebody looks.
        """
        if scattered.size > _SPARSE_SHARE * gradient.numel():
            self.zero(gradient)
            return False
        array = host_view(gradient)
        clear_at(array, scattered)
        changed = bool(array[probes].any())
        if changed:
            self.zero(gradient)
        return changed

    def sum_dense(
        self,
        name: str,
        gradient: torch.Tensor,
        carried: np.ndarray | None,
        place: tuple[int, int],
        *,
        refused: bool = False,
        members: Members = (),
    ) -> Synchronization[torch.Tensor]:
        """As `sum_densely`, of a flat gradient where it is: half types in float32."""
        (rank, size), count = place, gradient.numel()
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        buffer = wide.new_zeros(count + size)
        own, mark = buffer[:count], buffer[count + rank]
        torch.add(wide, 0 if carried is None else torch.tensor(carried, device=wide.device), out=own)
        if refused:
            mark.fill_(REFUSED)
        else:  # without waiting for a device
            finite = torch.isfinite(own)
            stops = torch.tensor([stop for _, stop in members], dtype=torch.int64, device=wide.device)
            first = torch.searchsorted(stops, torch.argmin(finite.to(torch.uint8)), right=True)
            mark.copy_(torch.where(finite.all(), 0, 1 + first))
        total = torch.as_tensor((yield AllReduce(self._sent(buffer))))
        check_sum(
            name, total[count:].cpu().numpy(), lambda: bool(torch.isfinite(total[:count]).all()), members
        )
        return total[:count]

    def _sent(self, buffer: torch.Tensor) -> Any:
        """What is given to a collective."""
        return buffer.numpy()


HOST = GradientMemory()
