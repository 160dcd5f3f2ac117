"""One flat buffer for the gradients of a bucket; every parameter's gradient is a view into it.

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
from horovod_sparse.kernels import apply_scaled_sum, clear_all, clear_at
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.tensors.layout import alone, memory_strides, unscaled, view_into

if TYPE_CHECKING:
    from horovod_sparse.tensors.streams import CudaStreams

_log = logging.getLogger("horovod_sparse")

_NOWHERE = np.empty(0, np.int32)
#: relative error of a gradient that went through bfloat16 and back
_HALF_ROUNDING = 2.0**-7
#: places per parameter that are looked at to notice a change that PyTorch did not count
_NUM_PROBES = 16
#: types of devices whose memory NumPy can read
HOST_DEVICES = frozenset({"cpu"})

#: of a sum: None for all elements
Places: TypeAlias = np.ndarray | None

#: scattered elements above this share of a buffer are cleared faster by clearing all of it
_SPARSE_SHARE = 1 / 64


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

    def foldable(self, gradient: torch.Tensor, loss_scale: float = 1.0) -> Any:
        """The gradient over the loss's scale, as the accumulator folds it, and leaves it as it is."""
        return GradientParts([host_view(unscaled(gradient, loss_scale))])

    #: of what `foldable` gave, one array or tensor that Horovod can sum: half types in float32
    summable: Callable[[Any, BucketInfo], Any] = staticmethod(two_level_bucket.summable)
    #: a sum of a part of it, filled up with 0, as the accumulator folds it, and leaves it as it is
    shard: Callable[[Any, int], Any] = staticmethod(two_level_bucket.foldable)

    def write(self, gradient: torch.Tensor, indices: Places, values: Any, scale: float) -> int:
        """Scale times a sum in place of a contiguous gradient; how many different elements the sum has.

        Indices are None where the values are those of all elements, in their order.
        """
        return apply_scaled_sum(host_view(gradient), indices, values, scale)

    def zero(self, gradient: torch.Tensor) -> None:
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


class GradientLayout:
    """Where the gradients of some parameters lie, one behind the other."""

    flat: torch.Tensor

    def __init__(self, parameters: Sequence[torch.Tensor], name: str) -> None:
        self.parameters, self.name = tuple(parameters), name
        lengths = [parameter.numel() for parameter in self.parameters]
        stops = np.cumsum(lengths)
        #: [start, stop) of every parameter
        self.places = [(int(stop - length), int(stop)) for length, stop in zip(lengths, stops, strict=True)]
        self.num_elements = int(stops[-1])
        first = self.parameters[0]
        self.memory = memory_of(first.device, name)
        self.num_bytes = self.num_elements * first.element_size()
        #: shape and order of every parameter's part, which stay when the parameter changes its own
        self.layouts = [
            torch.empty_strided(parameter.shape, memory_strides(parameter), device="meta")
            for parameter in self.parameters
        ]

    def scatter(self, indices: np.ndarray | None, values: Any, scale: float = 1.0) -> int:
        """A sum, times a scale, as the gradients; how many different elements it has."""
        num_union = self.memory.write(self.flat, indices, values, scale)
        self._give_out()
        return num_union

    def _give_out(self) -> None:
        """What the buffer holds as the parameters' gradients, whatever became of these meanwhile."""
        raise NotImplementedError


class FlatGradient(GradientLayout):
    """The gradients of a bucket in one buffer, so that a bucket is folded in one pass.

    ``parameter.grad`` is a view into the buffer, to which autograd adds in place. Whoever replaces it
    (the first backward, ``model.zero_grad()``, user code), or moves the view's memory elsewhere
    (``model.half()`` and ``model.float()``, ``share_memory()``, ``p.grad.data = ...``), costs one copy:
    `gather` takes the gradient over and puts a view back.

    After a step the buffer holds zeros and the scattered sum, so on the CPU `clear` writes to the scattered
    places only, as long as PyTorch's version counters tell that nobody else has written there. Writing
    through ``grad.data`` goes past them: 16 places of every parameter are looked at, which finds whatever
    touches all of a gradient (weight decay added in place), not a change of a few elements.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], name: str = "a bucket") -> None:
        super().__init__(parameters, name)
        self.flat = zeros(self.num_elements, self.parameters[0])
        self.views = [self._view(number) for number in range(len(self.parameters))]
        self._addresses = [view.data_ptr() for view in self.views]
        self._probes = np.concatenate(
            [
                np.linspace(start, stop - 1, min(_NUM_PROBES, stop - start)).astype(np.int64)
                for start, stop in self.places
            ]
        )
        self._foldable = self.memory.foldable(self.flat)
        self._uncounted = False
        self._noted: tuple[list[int], np.ndarray | None] = [], None
        self._mark(_NOWHERE)

    def foldable(self, loss_scale: float) -> Any:
        """All of them over the loss's scale, as an accumulator folds them."""
        return self._foldable if loss_scale == 1.0 else self.memory.foldable(self.flat, loss_scale)

    def _mark(self, scattered: np.ndarray) -> None:
        """The buffer holds zeros, and values only at these places."""
        self._scattered: np.ndarray = scattered
        self._version = self._versions()

    def _versions(self) -> int:
        """Counts every write that goes through PyTorch."""
        return sum(view._version for view in self.views)

    def _view(self, number: int) -> torch.Tensor:
        start, stop = self.places[number]
        return view_into(alone(self.flat, start, stop), 0, self.layouts[number])

    def _in_place(self, number: int) -> bool:
        """Whether a parameter's gradient is its view, and the view is still one."""
        view = self.views[number]
        # `view.data = ...` leaves the tensor what it is, and its memory somewhere else
        return self.parameters[number].grad is view and view.data_ptr() == self._addresses[number]

    def _put_back(self, number: int) -> torch.Tensor:
        """The parameter's view as its gradient; a new one, where the old one's memory was moved."""
        if self.views[number].data_ptr() != self._addresses[number]:
            self.views[number] = self._view(number)
        self.parameters[number].grad = self.views[number]
        return self.views[number]

    def gather(self) -> None:
        """Takes over gradients that lie elsewhere; a parameter without a gradient gets zeros."""
        for number, parameter in enumerate(self.parameters):
            if self._in_place(number):
                continue
            gradient = parameter.grad
            self._check_kind(parameter)
            view = self._put_back(number)
            if gradient is None:
                view.zero_()
            elif gradient.is_sparse:
                view.zero_().add_(gradient)
            else:
                view.copy_(gradient)

    def _check_kind(self, parameter: torch.Tensor) -> None:
        if (parameter.dtype, parameter.device) != (self.flat.dtype, self.flat.device):
            raise UnsupportedError(
                f"a parameter of the bucket of {self.name} was {self.flat.dtype} on {self.flat.device} when "
                f"this step began, and is {parameter.dtype} on {parameter.device} now: convert or move a "
                "model between two steps"
            )

    def gather_existing(self) -> None:
        """As `gather`, but a parameter without a gradient keeps none."""
        missing = [parameter for parameter in self.parameters if parameter.grad is None]
        self.gather()
        for parameter in missing:
            parameter.grad = None

    def settle(self) -> None:
        """As `gather`, and remembers the gradients as they are: from now on nobody may change them."""
        self.gather()
        self._noted = [view._version for view in self.views], self._probed()

    def edited(self) -> list[int]:
        """Which parameters' gradients were changed since `settle`: by number.

        Versions tell, and what stands at the probed places. Memory that has moved (``model.half()`` and
        ``float()``) has changed where values differ by more than halves do.
        """
        versions, probed = self._noted
        changed = [
            number
            for number, parameter in enumerate(self.parameters)
            if parameter.grad is not self.views[number]
            or self.views[number]._version != versions[number]
            or (not self._in_place(number) and self._differs(number))
        ]
        now = self._probed()
        if probed is not None and now is not None and (differing := np.flatnonzero(probed != now)).size:
            stops = np.array([stop for _, stop in self.places])
            changed += np.searchsorted(stops, self._probes[differing], side="right").tolist()
        return sorted(set(changed))

    def _probed(self) -> np.ndarray | None:
        """What stands at the probed places, bit for bit; None where looking would make the host wait."""
        if self.flat.device.type != "cpu":
            return None
        width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[self.flat.element_size()]
        return np.asarray(self.flat.view(width).numpy()[self._probes])

    def _differs(self, number: int) -> bool:
        moved, noted = self.views[number], self._view(number)
        if moved.shape != noted.shape:
            return True
        moved, noted = moved.double().cpu(), noted.double().cpu()
        tolerance = _HALF_ROUNDING * max(float(noted.abs().max()), 1e-30)
        return not torch.allclose(moved, noted, rtol=_HALF_ROUNDING, atol=tolerance, equal_nan=True)

    def overflow(self) -> None:
        """Inf in the first parameter's gradient, for a loss scaler to find."""
        self.reset()
        self.views[0].fill_(torch.inf)

    def only_scaled(self) -> None:
        """Gradients were multiplied by a number since the last sum: zeros are still zeros."""
        self._version = self._versions()

    def scatter(self, indices: np.ndarray | None, values: Any, scale: float = 1.0) -> int:
        if indices is None:
            self._uncounted = True  # zeros are needed everywhere
        num_union = super().scatter(indices, values, scale)
        self._mark(_NOWHERE if indices is None else indices)
        return num_union

    def _give_out(self) -> None:
        for number, parameter in enumerate(self.parameters):
            if self._in_place(number):
                continue
            if (parameter.dtype, parameter.device) == (self.flat.dtype, self.flat.device):
                self._put_back(number)
            else:
                parameter.grad = self._view(number).to(parameter.device, parameter.dtype)

    def to_coo(self) -> None:
        """Gradients in COO form, of the elements that are not 0; the buffer is left alone."""
        for number, parameter in enumerate(self.parameters):
            parameter.grad = self.views[number].to_sparse()

    def clear(self) -> list[torch.Tensor]:
        """Zeros everywhere, written only where needed."""
        if self._uncounted or self._versions() != self._version:
            self.memory.zero(self.flat)
        elif self._scattered.size and self.memory.clear(self.flat, self._scattered, self._probes):
            self._uncounted = True
            _log.info("a gradient was changed through .data: zero_grad() clears whole buffers from now on")
        self._mark(_NOWHERE)
        return [
            parameter
            for number, parameter in enumerate(self.parameters)
            if parameter.grad is not None and not self._in_place(number)
        ]

    def reset(self) -> None:
        """Zeros everywhere, and views as gradients, whatever was there before."""
        self.memory.zero(self.flat)
        self._give_out()
        self._mark(_NOWHERE)


def zeros(num_elements: int, like: torch.Tensor) -> torch.Tensor:
    """Zeros. On the host NumPy's, which asks for huge pages: large folds miss the TLB less."""
    if like.device.type != "cpu" or not num_elements:
        return torch.zeros(num_elements, dtype=like.dtype, device=like.device)
    return torch.from_numpy(np.zeros(num_elements * like.element_size(), np.uint8)).view(like.dtype)
