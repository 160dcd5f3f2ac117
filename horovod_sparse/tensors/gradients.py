"""The gradients of a bucket, where autograd leaves them: a fold reads them, and the sum takes their place.

On the CPU gradients are NumPy arrays over PyTorch's memory, served by numba's kernels. On any other device
they stay tensors (`device_memory.py`), served by Triton's kernels or PyTorch's. Messages are NumPy arrays on
the host in both cases, and both give the same bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from horovod_sparse.arrays import Accumulator, GradientParts
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.kernels.host import scatter
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.tensors import layout
from horovod_sparse.training.parts import host_accumulator

if TYPE_CHECKING:
    from horovod_sparse.tensors.streams import CudaStreams

#: places of a gradient that are looked at to notice a change that PyTorch did not count
_NUM_PROBES = 16

#: types of devices whose memory NumPy can read
HOST_DEVICES = frozenset({"cpu"})

#: of a sum: None for all elements
Indices: TypeAlias = np.ndarray | None


def host_view(tensor: torch.Tensor) -> np.ndarray:
    """Views a CPU tensor's memory as an array of its shape and strides; bfloat16 as bits in uint16."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: np.ndarray = tensor.numpy()
    return array


class GradientMemory:
    """Makes accumulators on the host, and reads and writes gradients there; see `DeviceMemory`, too."""

    def accumulator(self, info: BucketInfo, recipe: Recipe, *, whole: bool = False) -> Accumulator:
        """Returns residual and companions of a bucket, zeros; with `whole` all is sent, and none kept."""
        return host_accumulator(info, recipe, whole=whole)

    def streams(self) -> CudaStreams | None:
        """Keeps the work on one bucket in order; None where that is the order in which it is asked for."""
        return None

    def foldable(self, gradients: Sequence[torch.Tensor], loss_scale: float = 1.0) -> Any:
        """Returns flat gradients over the loss's scale, as the accumulator folds them, and leaves them."""
        if loss_scale != 1.0:
            gradients = [layout.unscaled(gradient, loss_scale) for gradient in gradients]
        return GradientParts([host_view(gradient) for gradient in gradients])

    def summable(self, foldable: Any, info: BucketInfo) -> Any:
        """Returns what `foldable` gave as one array or tensor that can be summed: half types in float32."""
        from horovod_sparse.feedback import two_level_bucket

        return two_level_bucket.summable(foldable, info)

    def shard(self, total: Any, num_elements: int) -> Any:
        """Returns a sum of a part of it, filled up with 0, as the accumulator folds it, and leaves it."""
        from horovod_sparse.feedback import two_level_bucket

        return two_level_bucket.foldable(total, num_elements)

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
        return scatter.apply_scaled_sums(arrays, places, indices, values, scale)


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
    """Makes zeros; on the host NumPy's, which asks for huge pages: large folds miss the TLB less."""
    if like.device.type != "cpu" or not num_elements:
        return torch.zeros(num_elements, dtype=like.dtype, device=like.device)
    return torch.from_numpy(np.zeros(num_elements * like.element_size(), np.uint8)).view(like.dtype)


class Gradients:
    """The gradients of a bucket, one behind the other, as an accumulator sees them.

    Nothing is copied on the host, and ``parameter.grad`` stays the tensor that autograd made.

    Args:
        parameters: of one dtype and device.
        name: for errors.

    Attributes:
        places: [start, stop) of every parameter.
        layouts: shape and order of every parameter, which stay when the parameter changes its own.
        told: whether ranks tell each other which parameters have a gradient. Else a parameter that is trained
            and has none has one of zeros.
        all_get: whether every parameter gets a gradient, as where hosts sum first, whose sums are of all.
        absent: numbers of those without a gradient: nothing of them is sent.
        unused: numbers of those that have none on any rank, and get none.
        carried: places and values of a sum that stands in the gradients beside what is to be exchanged: it
            was put there after a former pass, to which this one adds.
    """

    told = all_get = False

    def __init__(self, parameters: Sequence[torch.Tensor], name: str) -> None:
        self.parameters, self.name = tuple(parameters), name
        self._sharded = hasattr(self.parameters[0], "device_mesh")
        own = [self._own(parameter) for parameter in self.parameters]
        stops = np.cumsum([one.numel() for one in own]).tolist()
        self.places = list(zip([0, *stops[:-1]], stops, strict=True))
        self.num_elements = int(stops[-1])
        self.dtype, self.device = own[0].dtype, own[0].device
        self.memory = memory_of(self.device, name)
        self.num_bytes = self.num_elements * own[0].element_size()
        self.layouts = [
            torch.empty_strided(one.shape, layout.memory_strides(one), device="meta") for one in own
        ]
        #: gradients as they were when they were taken, with PyTorch's count of changes and some elements
        self._taken: list[tuple[torch.Tensor | None, int, torch.Tensor | None]] = []
        self._flat: list[torch.Tensor] = []
        self.absent: list[int] = []
        self.unused: list[int] = []
        self.carried: tuple[np.ndarray, np.ndarray] | None = None

    def settle(self) -> None:
        """Takes the gradients as they are: from now on nobody may change them."""
        gradients = [parameter.grad for parameter in self.parameters]
        self.absent = self.unused = [
            number
            for number, parameter in enumerate(self.parameters)
            if parameter.grad is None and not self.all_get and (self.told or not parameter.requires_grad)
        ]
        self._flat = []
        for parameter, gradient, like in zip(self.parameters, gradients, self.layouts, strict=True):
            self._check_kind(parameter)
            if gradient is None:
                self._flat.append(torch.zeros(like.numel(), dtype=self.dtype, device=self.device))
            else:
                own = self._own(gradient)
                self._flat.append(_in_order(own.to_dense() if own.is_sparse else own, like))
        if self.carried is not None:
            self._take_away(*self.carried)
        self._taken = [
            (gradient, -1 if gradient is None else gradient._version, self._probed(one))
            for gradient, one in zip(gradients, self._flat, strict=True)
        ]

    def _take_away(self, indices: np.ndarray, values: np.ndarray) -> None:
        for one, (start, stop) in zip(self._flat, self.places, strict=True):
            here = (start <= indices) & (indices < stop)
            where = torch.from_numpy(indices[here].astype(np.int64) - start).to(self.device)
            one.index_add_(0, where, torch.from_numpy(values[here]).to(self.device, self.dtype), alpha=-1.0)

    def _check_kind(self, parameter: torch.Tensor) -> None:
        if (parameter.dtype, parameter.device) != (self.dtype, self.device):
            raise UnsupportedError(
                f"a parameter of the bucket of {self.name} was {self.dtype} on {self.device} when this step "
                f"began, and is {parameter.dtype} on {parameter.device} now: convert or move a model between "
                "two steps"
            )

    def _probed(self, values: torch.Tensor) -> torch.Tensor | None:
        """Returns the bits of some elements; None where reading them would make the host wait."""
        if values.device.type != "cpu":
            return None
        width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        return values[:: max(1, values.numel() // _NUM_PROBES)].view(width).clone()

    def edited(self) -> list[int]:
        """Returns the numbers of the parameters whose gradients were changed since `settle`."""
        changed = []
        for number, (gradient, version, probed) in enumerate(self._taken):
            now = self.parameters[number].grad
            if now is not gradient or (now is not None and now._version != version):
                changed.append(number)
            elif now is not None and probed is not None and not now.is_sparse:
                # in memory of its own, or another type's, it is the same gradient while its values are
                there = _in_order(self._own(now), self.layouts[number])
                if there.dtype == self.dtype and not torch.equal(self._probed(there), probed):
                    changed.append(number)
        return changed

    def foldable(self, loss_scale: float) -> Any:
        """Returns all gradients over the loss's scale, as an accumulator folds them."""
        return self.memory.foldable(self._flat, loss_scale)

    def _target(self, number: int) -> torch.Tensor | None:
        """Returns a parameter's gradient in its layout's order, to write to; None if it has another form."""
        gradient, like = self.parameters[number].grad, self.layouts[number]
        if gradient is None or (own := self._own(gradient)).is_sparse:
            return None
        fits = (own.dtype, own.device, own.shape) == (self.dtype, self.device, like.shape)
        return _in_order(own, like) if fits and (own.stride() == like.stride() or own.numel() < 2) else None

    def value_at(self, position: int) -> float | None:
        """Returns one element; None where its parameter has no gradient of the kind, or it is on a device."""
        number = next(number for number, (_, stop) in enumerate(self.places) if position < stop)
        own = self._target(number)
        if own is None or own.device.type != "cpu":
            return None
        return float(own[position - self.places[number][0]])

    def scatter(self, indices: np.ndarray | None, values: Any, scale: float = 1.0) -> int:
        """Puts a sum, times a scale, in place of the gradients; returns how many different elements it has.

        Indices are None where the values are those of all elements, in their order.
        """
        if self.carried is not None and indices is not None:
            before, values = self.carried, values * scale
            indices, values = np.append(indices, before[0]), np.append(values, before[1])
            scale = 1.0
        targets = [self._target(number) for number in range(len(self.parameters))]
        new = [
            torch.empty(like.numel(), dtype=self.dtype, device=self.device) if target is None else target
            for target, like in zip(targets, self.layouts, strict=True)
        ]
        num_union = self.memory.write(new, self.places, indices, values, scale)
        for number, (target, made) in enumerate(zip(targets, new, strict=True)):
            if target is None and number not in self.unused:
                self._give(number, made)
        self._taken, self._flat = [], []
        return num_union

    def _give(self, number: int, values: torch.Tensor) -> None:
        parameter = self.parameters[number]
        shaped = layout.view_into(values, 0, self.layouts[number])
        shaped = shaped.to(parameter.device, parameter.dtype)
        if hasattr(parameter, "device_mesh"):
            made = torch.zeros_like(parameter)
            self._own(made).copy_(shaped)
            shaped = made.detach()
        parameter.grad = shaped

    def _own(self, tensor: Any) -> torch.Tensor:
        """Returns the whole tensor, or this rank's shard of a sharded one."""
        own: torch.Tensor = tensor.detach()
        return own.to_local() if self._sharded else own

    @torch.no_grad()
    def reset(self) -> None:
        """Fills all gradients with zeros."""
        for number, like in enumerate(self.layouts):
            own = self._target(number)
            if own is None and number in self.unused:
                continue
            if own is None:
                self._give(number, torch.zeros(like.numel(), dtype=self.dtype, device=self.device))
            else:
                own.zero_()
        self._taken, self._flat = [], []

    def overflow(self) -> None:
        """Inf in the first parameter's gradient, for a loss scaler to find; zeros in all others."""
        self.reset()
        self.parameters[0].grad.fill_(torch.inf)

    def to_coo(self) -> None:
        """Converts gradients to COO form, of the elements that are not 0."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse()


def _in_order(own: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's elements in the order of a layout; its own memory where it has that order."""
    if own.numel() > 1 and own.stride() != like.stride():
        own = torch.empty_strided(like.shape, like.stride(), dtype=own.dtype, device=own.device).copy_(own)
    return own.as_strided((own.numel(),), (1,), own.storage_offset())
