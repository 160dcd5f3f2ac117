"""Reads a bucket's gradients where autograd leaves them, and overwrites them with the sum over ranks.

On the CPU gradients are NumPy arrays over PyTorch's memory, served by numba's kernels. On any other device
they stay tensors (`device_memory.py`), served by Triton's kernels or PyTorch's. Messages are NumPy arrays on
the host in both cases, and both give the same bits.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from horovod_sparse.arrays import Accumulator, GradientParts
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.kernels.host import scatter
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.telemetry import BucketReport
from horovod_sparse.tensors import layout
from horovod_sparse.tensors.layout import flat, local
from horovod_sparse.topology import RankAndSize, Topology
from horovod_sparse.training.engine import Facts, PartSpec, Starter, Task
from horovod_sparse.training.parts import BucketPart, host_accumulator

if TYPE_CHECKING:
    from horovod_sparse.tensors.streams import CudaStreams

#: elements of a gradient that are compared, to notice changes that PyTorch does not count
_NUM_PROBES = 16

#: types of devices whose memory NumPy can read
HOST_DEVICES = frozenset({"cpu"})


def host_view(tensor: torch.Tensor) -> np.ndarray:
    """Returns a CPU tensor's memory as a NumPy array; bfloat16 as its bits in uint16."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy().view(np.uint16))
    return np.asarray(tensor.numpy())


class GradientMemory:
    """Makes accumulators in host memory, and reads and writes gradients there."""

    #: arguments of `TwoLevelBucket`, whose defaults are for arrays
    summing: ClassVar[Mapping[str, Any]] = {}

    def accumulator(self, info: BucketInfo, recipe: Recipe, *, whole: bool = False) -> Accumulator:
        """Returns a bucket's accumulator with zeros; with `whole` one for `Dense`, without a residual."""
        return host_accumulator(info, recipe, whole=whole)

    def streams(self) -> CudaStreams | None:
        """Returns an object that orders a bucket's work over CUDA streams; None on the host."""
        return None

    def fold_input(self, gradients: Sequence[torch.Tensor], loss_scale: float = 1.0) -> Any:
        """Returns the gradients divided by the loss scale, for an accumulator to fold."""
        if loss_scale != 1.0:
            gradients = [layout.unscaled(gradient, loss_scale) for gradient in gradients]
        return GradientParts([host_view(gradient) for gradient in gradients])

    def write(
        self,
        gradients: Sequence[torch.Tensor],
        spans: Sequence[tuple[int, int]],
        indices: np.ndarray | None,
        values: Any,
        scale: float,
    ) -> int:
        """Overwrites gradients by a scaled sum, whole if `indices` is None; returns its number of indices."""
        arrays = [host_view(gradient) for gradient in gradients]
        return scatter.apply_scaled_sums(arrays, spans, indices, values, scale)


HOST = GradientMemory()


def gradient_memory(device: torch.device, parameter_name: str) -> GradientMemory:
    if device.type in HOST_DEVICES:
        return HOST
    # imported by name at the first gradient on a device, since it derives from this class
    devices: Any = importlib.import_module("horovod_sparse.tensors.device_memory")
    try:
        memory: GradientMemory = devices.device_memory(device)
        return memory
    except (RuntimeError, TypeError, AssertionError) as error:  # as PyTorch's backends put it
        raise UnsupportedError(
            f"the gradient of {parameter_name} is on {device}, where no sparsifier can work: that takes "
            "float64 beside the gradient's own type, and copies to the host "
            f"({str(error).splitlines()[0]}). Train on the CPU or on a CUDA device, or use "
            "compression=Compression.none or .fp16"
        ) from error


class ParameterBucket(BucketPart):
    """A bucket whose elements are its tensors' elements, each tensor in the order of its memory.

    Attributes:
        given: the parameters, of one dtype and device.
        layouts: shape and order of each, which stay when the parameter changes its own.
    """

    def __init__(
        self,
        spec: PartSpec,
        facts: Facts,
        ranks: RankAndSize,
        *,
        memory: GradientMemory | None = None,
        topology: Topology | None = None,
    ) -> None:
        self.given: list[torch.Tensor] = [facts[name][1] for name in spec.names]
        own = [local(parameter) for parameter in self.given]
        self.kind, self.device = own[0].dtype, own[0].device
        self.layouts = [
            torch.empty_strided(one.shape, layout.memory_strides(one), device="meta") for one in own
        ]
        self.memory = memory or gradient_memory(self.device, spec.names[0])
        super().__init__(
            *(spec, [one.shape for one in own], ranks, layout.dtype_name(own[0]) or "unknown"),
            memory=self.memory.accumulator,
            topology=topology,
            **self.memory.summing,
        )
        self.num_bytes = self.spans[-1][1] * own[0].element_size()

    def shaped(self, number: int, values: np.ndarray) -> torch.Tensor:
        copy = torch.from_numpy(np.array(values))
        shaped = layout.view_into(copy, 0, self.layouts[number])
        return shaped.clone(memory_format=torch.contiguous_format)

    def flat(self, number: int, values: torch.Tensor) -> np.ndarray:
        buffer = torch.empty(values.numel(), dtype=values.dtype)
        layout.view_into(buffer, 0, self.layouts[number]).copy_(values)
        return np.asarray(buffer.numpy())


class GradientBucket(ParameterBucket):
    """A bucket whose gradients are exchanged; on the host it reads and writes them without a copy.

    Attributes:
        tells_absent: whether ranks tell each other which parameters have a gradient. If not, a trained
            parameter without a gradient has one of zeros.
        absent: numbers of parameters without a gradient, of which nothing is sent.
        unused: numbers of parameters without a gradient on any rank, which get none.
        streams: CUDA streams that write the gradients; None on other devices.
        num_missing: number of parameters whose gradient is not complete yet in this step.
        task: the exchange in flight; None before `start`.
        scale: see `Bucket.step`.
        carried: indices and values of an earlier sum over ranks that the gradients contain, since this pass
            was accumulated on it; it is subtracted before the exchange.
        last_sum: indices and values of the last sum, if `keeps_sum`; else None.
    """

    tells_absent = keeps_sum = False

    def __init__(
        self,
        spec: PartSpec,
        facts: Facts,
        ranks: RankAndSize,
        *,
        topology: Topology | None = None,
    ) -> None:
        super().__init__(spec, facts, ranks, topology=topology)
        self.whole = spec.whole
        #: True: a sum within a host needs all parameters' gradients
        self._all_get = topology is not None
        self._sharded, self.streams = hasattr(self.given[0], "device_mesh"), self.memory.streams()
        self.num_missing = len(self.names)
        self.task: Task | None = None
        self.scale = self._loss_scale = 1.0
        #: gradients when they were taken, with their version counter and a few elements
        self._taken: list[tuple[torch.Tensor | None, int, torch.Tensor | None]] = []
        self._flat: list[torch.Tensor] = []
        self.absent: list[int] = []
        self.unused: list[int] = []
        self.carried: tuple[np.ndarray, np.ndarray] | None = None
        self.last_sum: tuple[np.ndarray, np.ndarray] | None = None
        self._remembered: float | None = None

    def name_of(self, parameter: torch.Tensor) -> str:
        return next(name for name, one in zip(self.names, self.given, strict=True) if one is parameter)

    def start(
        self, driver: Starter, loss_scale: float = 1.0, turn: str = "", *, mark_cancelled: bool = False
    ) -> None:
        """Takes the gradients and starts their exchange; `turn` makes its name differ from other steps'."""
        if self.streams is not None:
            self.streams.wait_for_writers()  # before gradients are copied or divided by the loss's scale
        self.take_gradients()
        self._loss_scale = loss_scale
        step = self.bucket.step(
            self.fold_input(loss_scale),
            mark_cancelled=mark_cancelled,
            scale=self.scale,
            absent=[] if self.whole else [self.spans[number] for number in self.absent],
        )
        if self.streams is not None:
            step = self.streams.run(step)
        name = self.name + turn
        if self.absent and not self.tells_absent:  # ranks that have frozen others must not meet
            name += " without " + ", ".join(self.names[number] for number in self.absent)
        self.task = driver.start(name, step)

    def check_dtypes_and_devices(self) -> None:
        """Raises if a parameter's dtype or device is not its bucket's."""
        for name, one in zip(self.names, self.given, strict=True):
            if (one.dtype, one.device) != (self.kind, self.device):
                raise UnsupportedError(
                    f"{name} was {self.kind} on {self.device} and is {one.dtype} on {one.device} now, which "
                    "its bucket cannot follow: convert or move a model before its optimizer is made"
                )

    def take_gradients(self) -> None:
        """Records the gradients to exchange, which must not change until the exchange is done."""
        self.check_dtypes_and_devices()
        gradients = [parameter.grad for parameter in self.given]
        self.absent = self.unused = [
            number
            for number, one in enumerate(self.given)
            if one.grad is None and not self._all_get and (self.tells_absent or not one.requires_grad)
        ]
        self._flat = []
        for gradient, like in zip(gradients, self.layouts, strict=True):
            if gradient is None:
                self._flat.append(torch.zeros(like.numel(), dtype=self.kind, device=self.device))
            else:
                own = self._local_gradient(gradient)
                self._flat.append(_flat_view(own.to_dense() if own.is_sparse else own, like))
        if self.carried is not None:
            self._subtract_carried(*self.carried)
        self._taken = [
            (gradient, -1 if gradient is None else gradient._version, _sampled_bits(one))
            for gradient, one in zip(gradients, self._flat, strict=True)
        ]

    def _subtract_carried(self, indices: np.ndarray, values: np.ndarray) -> None:
        for one, (start, stop) in zip(self._flat, self.spans, strict=True):
            here = (start <= indices) & (indices < stop)
            where = torch.from_numpy(indices[here].astype(np.int64) - start).to(self.device)
            one.index_add_(0, where, torch.from_numpy(values[here]).to(self.device, self.kind), alpha=-1.0)

    def fold_input(self, loss_scale: float) -> Any:
        """Returns the taken gradients divided by the loss scale, for an accumulator to fold."""
        return self.memory.fold_input(self._flat, loss_scale)

    def edited_names(self) -> list[str]:
        """Returns the names of parameters whose gradients have changed since `take_gradients`."""
        changed = []
        for number, (gradient, version, probed) in enumerate(self._taken):
            now = self.given[number].grad
            if now is not gradient or (now is not None and now._version != version):
                changed.append(self.names[number])
            elif now is not None and probed is not None and not now.is_sparse:
                # a gradient with another address or dtype is unchanged if its values are
                there = _flat_view(self._local_gradient(now), self.layouts[number])
                if there.dtype == self.kind and not torch.equal(probed, _sampled_bits(there)):
                    changed.append(self.names[number])
        return changed

    def apply(self) -> BucketReport:
        """Overwrites the gradients with the scaled sum over ranks, once the exchange is done."""
        assert self.task is not None  # begun by `start`
        total, scale = self.task.result, self.scale * self._loss_scale
        started = time.perf_counter()
        if self.streams is not None:
            self.streams.wait_for_coroutine()
        if total.whole:  # of n elements: no copy of them
            num_union = self.scatter(None, total.values, scale)
        else:
            values = total.values if scale == 1.0 else total.values * total.values.dtype.type(scale)
            num_union = self.scatter(total.indices, values)
            self.last_sum = (total.indices, values) if self.keeps_sum else None
        self.bucket.accept()
        took = time.perf_counter() - started
        given = self.bucket.last, num_union, self.num_bytes, total.notes.norms
        return BucketReport(*given, self.task.waited_seconds, took)

    def scatter(self, indices: np.ndarray | None, values: Any, scale: float = 1.0) -> int:
        """Overwrites the gradients with a sum times `scale`; returns how many different indices it has.

        `indices` is None if there is a value for every element.
        """
        if self.carried is not None and indices is not None:
            before, values = self.carried, values * scale
            indices, values = np.append(indices, before[0]), np.append(values, before[1])
            scale = 1.0
        targets = [self._writable_gradient(number) for number in range(len(self.given))]
        new = [
            torch.empty(like.numel(), dtype=self.kind, device=self.device) if target is None else target
            for target, like in zip(targets, self.layouts, strict=True)
        ]
        num_union = self.memory.write(new, self.spans, indices, values, scale)
        for number, (target, made) in enumerate(zip(targets, new, strict=True)):
            if target is None and number not in self.unused:
                self._set_gradient(number, made)
        self._taken, self._flat = [], []
        return num_union

    def _writable_gradient(self, number: int) -> torch.Tensor | None:
        """Returns a flat view of a parameter's `.grad` to write the sum to; None if the layout differs."""
        gradient, like = self.given[number].grad, self.layouts[number]
        if gradient is None or (own := self._local_gradient(gradient)).is_sparse:
            return None
        fits = (own.dtype, own.device, own.shape) == (self.kind, self.device, like.shape)
        return _flat_view(own, like) if fits and (own.stride() == like.stride() or own.numel() < 2) else None

    def _local_gradient(self, gradient: Any) -> torch.Tensor:
        own: torch.Tensor = gradient.detach()
        return own.to_local() if self._sharded else own

    def _set_gradient(self, number: int, values: torch.Tensor) -> None:
        parameter = self.given[number]
        shaped = layout.view_into(values, 0, self.layouts[number])
        shaped = shaped.to(parameter.device, parameter.dtype)
        if self._sharded:
            made = torch.zeros_like(parameter)
            local(made).copy_(shaped)
            shaped = made.detach()
        parameter.grad = shaped

    def _gradient_at_last_sum(self) -> float | None:
        """Returns the gradients' element at the last sum's first index; None without a sum or on a device."""
        if self.last_sum is None or not len(self.last_sum[0]):
            return None
        position = int(self.last_sum[0][0])
        number = next(number for number, (_, stop) in enumerate(self.spans) if position < stop)
        own = self._writable_gradient(number)
        if own is None or own.device.type != "cpu":
            return None
        return float(own[position - self.spans[number][0]])

    def remember_sum(self) -> None:
        """Called after `apply`: stores one element of the summed gradients, for `has_last_sum` to compare."""
        self._remembered = self._gradient_at_last_sum()

    def has_last_sum(self) -> bool:
        """True if the gradients still contain the last sum: the element of `remember_sum` is unchanged."""
        return self._gradient_at_last_sum() == self._remembered

    def abandon(self, *, drop: bool = False) -> None:
        if self.streams is not None:
            self.streams.wait_for_coroutine()
        super().abandon(drop=drop)

    @torch.no_grad()
    def clear(self) -> None:
        """Fills the gradients of all parameters with zeros; called when a step is cancelled."""
        for number, like in enumerate(self.layouts):
            own = self._writable_gradient(number)
            if own is not None:
                own.zero_()
            elif number not in self.unused:
                self._set_gradient(number, torch.zeros(like.numel(), dtype=self.kind, device=self.device))
        self._taken, self._flat = [], []


def _flat_view(own: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a gradient's elements in the order of `like`'s memory, without a copy if possible."""
    if own.numel() > 1 and own.stride() != like.stride():
        return flat(own, like.stride())
    return own.as_strided((own.numel(),), (1,), own.storage_offset())


def _sampled_bits(values: torch.Tensor) -> torch.Tensor | None:
    """Returns the bits of a few elements; None on a device, where reading them would block the host."""
    if values.device.type != "cpu":
        return None
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return values[:: max(1, values.numel() // _NUM_PROBES)].view(width).clone()
