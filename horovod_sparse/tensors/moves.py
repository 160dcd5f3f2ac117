"""Buckets of tensors that move by own steps or local steps, in the parameters' own memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from horovod_sparse.arrays import GradientParts, Indices, Values, WeightedParts
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.kernels.host import scatter
from horovod_sparse.sparsifiers import SparseSum
from horovod_sparse.tensors.gradients import HOST, HOST_DEVICES, ParameterBucket, host_view
from horovod_sparse.tensors.layout import ReplicatedTensor, flat, local, memory_strides, view_into
from horovod_sparse.topology import RankAndSize
from horovod_sparse.training.engine import Facts, PartSpec, Starter, Task
from horovod_sparse.training.moves import JointMoves, StepPart
from horovod_sparse.training.parts import Parameters, fold_parts, scaled
from horovod_sparse.training.schedules import LocalSchedule


def make_parameters(tensors: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]]) -> HostParameters:
    """Returns the `Parameters` of a bucket's tensors, which have one dtype and device."""
    first = local(tensors[0])
    plain = first.device.type in HOST_DEVICES and first.dtype in (torch.float32, torch.float64)
    return (HostParameters if plain else TensorParameters)(tensors, spans)


class HostParameters(Parameters):
    """Parameters of float32 or float64 in host memory, which compiled kernels change."""

    def __init__(self, tensors: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]]) -> None:
        for own in map(local, tensors):
            if own.numel() and own.stride() != memory_strides(own):
                shape, strides = list(own.shape), list(own.stride())
                raise UnsupportedError(
                    f"a parameter of shape {shape}, strides {strides}, has gaps in memory: "
                    "make the optimizer after parameter.data = parameter.data.contiguous()"
                )
        super().__init__(spans)
        self._orders = [(one.dtype, memory_strides(local(one))) for one in tensors]
        self.tensors, self.on_host = list(tensors), local(tensors[0]).device.type in HOST_DEVICES
        self._sharded = any(hasattr(one, "device_mesh") for one in tensors)
        #: addresses and strides of the tensors whose arrays are cached
        self._addresses: list[Any] = []

    def arrays(self) -> list[Any]:
        own = [local(one) for one in self.tensors] if self._sharded else self.tensors
        addresses = [(one.data_ptr(), one.stride()) for one in own]
        if addresses != self._addresses:
            if [(one.dtype, memory_strides(one)) for one in own] != self._orders:
                raise UnsupportedError(
                    "parameters have another type or order in memory than when their optimizer was attached: "
                    "convert the model (bfloat16, channels_last) before that"
                )
            self._addresses, self._memory = addresses, [self._as_array(flat(one)) for one in own]
        return self._memory

    def _as_array(self, memory: torch.Tensor) -> Any:
        """Returns the array that moves change: flat memory as NumPy's; in a subclass the tensor itself."""
        return host_view(memory)

    def fold_input(self, gradients: Sequence[torch.Tensor | None], weights: tuple[float, float]) -> Any:
        own = [one if isinstance(one, np.ndarray) else host_view(one) for one in self.arrays()]
        pairs = zip(gradients, self._orders, strict=True)
        return fold_parts(
            [None if one is None else _array(one, order) for one, (_, order) in pairs], own, weights
        )


class TensorParameters(HostParameters):
    """Parameters that PyTorch operations change, since they are on a device or of a half type."""

    def _as_array(self, memory: torch.Tensor) -> torch.Tensor:
        return memory

    def _by_parameter(self, indices: Indices) -> Iterator[tuple[Any, slice, Any]]:
        for array, here, where in super()._by_parameter(indices):
            yield array, here, torch.from_numpy(where).to(array.device).long()

    def take(self, indices: Indices) -> list[Any]:
        return [array[where] for array, _, where in self._by_parameter(indices)]

    def replace(
        self,
        old_values: Sequence[tuple[Indices, Any]] = (),
        decay: Mapping[float, Sequence[int]] | None = None,
        total: SparseSum | None = None,
        scale: float = 1.0,
        moves: Sequence[tuple[Indices, Values]] = (),
    ) -> tuple[int, list[Any]]:
        arrays, num_union, stood = self.arrays(), 0, []
        for indices, before in old_values:
            for (array, _, where), old in zip(self._by_parameter(indices), before, strict=True):
                array[where] = old
        for factor, numbers in (decay or {}).items():
            torch._foreach_mul_([arrays[number] for number in numbers], factor)
        if total is not None and total.whole:
            values = scaled(total, scale)
            num_union = len(values)
            for array, span in zip(arrays, self.spans, strict=True):
                _subtract_at(array, ..., values[slice(*span)])
        elif total is not None:
            indices = scatter.checked(total.indices, int(self._stops[-1]))
            indices, values, _ = scatter.sum_duplicates(indices, scaled(total, scale))
            num_union = indices.size
            for array, here, where in self._by_parameter(indices):
                _subtract_at(array, where, values[here])
        for indices, values in moves:
            stood.append(self.take(indices))
            for array, here, where in self._by_parameter(indices):
                _subtract_at(array, where, values[here])
        return num_union, stood

    def to_save(self, before: Any, array: Callable[[np.ndarray], Any]) -> Any:
        return [one.cpu() for one in before]

    def from_saved(self, saved: Any) -> Any:
        return [one.to(local(self.tensors[0]).device) for one in saved]

    def fold_input(self, gradients: Sequence[torch.Tensor | None], weights: tuple[float, float]) -> Any:
        if self.on_host:
            return super().fold_input(gradients, weights)
        pairs = zip(gradients, self.arrays(), strict=True)
        arrays = [torch.zeros_like(array) if one is None else array for one, array in pairs]
        triples = zip(gradients, self.tensors, arrays, strict=True)
        joined = torch.cat([array if one is None else _flat_like(one, like) for one, like, array in triples])
        if weights != (1.0, 0.0):
            joined = joined.to(torch.promote_types(joined.dtype, torch.float32)) * weights[0]
        if weights[1]:
            joined.add_(torch.cat(arrays).to(joined.dtype), alpha=weights[1])
        return joined


def _array(gradient: torch.Tensor, strides: tuple[int, ...]) -> np.ndarray:
    """Returns a gradient's elements in an order in memory, as a flat array: a view if that is its own."""
    own = local(gradient)
    return host_view(own).ravel("K") if own.stride() == strides else host_view(flat(own, strides))


def _flat_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's elements in the order of a parameter's memory, a copy if its own order differs."""
    return flat(tensor, memory_strides(local(parameter)))


def _subtract_at(array: torch.Tensor, where: Any, step: Any) -> None:
    """Subtracts `step` from ``array[where]`` in the step's precision, and rounds once to the array's."""
    given = torch.as_tensor(step, device=array.device)
    array[where] = (array[where].to(given.dtype) - given).to(array.dtype)


class StepBucket(ParameterBucket, StepPart):
    """A `StepPart` whose parameters are PyTorch tensors."""

    def __init__(
        self, spec: PartSpec, facts: Facts, ranks: RankAndSize, moves_at_once: bool, ages: dict[str, int]
    ) -> None:
        super().__init__(spec, facts, ranks)
        #: number of gradients of each parameter, by name: a late parameter's moment has fewer
        self.ages = ages
        #: this pass's moments that `_correct_late_moment` changed, with copies of their old values
        self._young: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._counted: list[int] = []
        self.bind(make_parameters(self.given, self.spans), moves_at_once)

    def prepare_fold(self) -> Any:
        """Returns gradients (or Muon's steps) to fold; counts them, and corrects late parameters' moments."""
        self._young = []
        self._counted = sorted(set(range(len(self.names))) - set(self.absent))
        age = self.bucket.progress.age
        for number in self._counted:
            own = self.ages[self.names[number]] = self.ages.get(self.names[number], 0) + 1
            if own <= age:
                self._correct_late_moment(number, own)
        if self.now.matrices is None:
            return super().prepare_fold()
        for momentum, gradient in self._momenta_and_gradients():
            self.now.matrices.update_momentum(momentum, gradient)
        if self.memory is not HOST:
            return torch.cat(list(self._flat_steps()))
        return GradientParts(list(map(host_view, self._flat_steps())))

    def _momenta_and_gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields momentum (view) and weighted gradient (copy) of each parameter that has a gradient."""
        for number in self._counted:
            momentum = self.parameter_view(number, self.bucket.accumulator.companions[0])
            gradient = self.gradients[number]
            assert gradient is not None  # without a gradient a parameter does not move
            yield momentum, local(gradient).to(momentum.dtype) * self.now.weights[0]

    def _flat_steps(self) -> Iterator[torch.Tensor]:
        """Yields each parameter's step, flat; zeros for a parameter without a gradient."""
        made, moving = self._momenta_and_gradients(), set(self._counted)
        for number, parameter in enumerate(self.given):
            if number in moving:
                yield _flat_like(self.now.matrices.step(*next(made)), parameter)
            else:
                yield torch.zeros_like(self._residual_and_companions(number)[0])

    def _correct_late_moment(self, number: int, own: int) -> None:
        """Scales up a late parameter's second moment, so that its bucket's bias correction fits it.

        A moment v is stored as ``v (1 - b^age) / (1 - b^own)``: the correction for the bucket's age then
        gives v corrected for the parameter's own. The fold adds (1 - b) g^2, this method the rest.
        """
        feedback: Any = self.now.feedback
        age = self.bucket.progress.age + 1
        before, after = feedback.moment_factor(own - 1, age - 1), feedback.moment_factor(own, age)
        if after - 1.0 < 1e-7:
            return
        (_, moment), (weight, beside) = self._residual_and_companions(number), self.now.weights
        parameter, gradient = self.given[number], self.gradients[number]
        self._young.append((moment, moment.clone()))
        step = _flat_like(gradient, parameter).to(moment.dtype) * weight
        if beside:
            step += flat(parameter).to(moment.dtype) * beside
        square = step.square_().nan_to_num_(0.0, 0.0, 0.0)  # the fold detects NaN and Inf
        if before:
            moment.mul_(after / before)
        moment.add_(square, alpha=(after - 1.0) * (1.0 - feedback.beta2) / feedback.beta2)

    def abandon(self, *, drop: bool = False) -> None:
        super().abandon(drop=drop)
        if drop:
            for moment, before in self._young:
                moment.copy_(before)
            for momentum, gradient in self._momenta_and_gradients() if self.now.matrices else ():
                self.now.matrices.undo_momentum(momentum, gradient)
        for number in self._counted:
            self.ages[self.names[number]] -= 1
        self._counted = []

    def release(self) -> None:
        super().release()
        self._young, self._counted = [], []

    def age(self, number: int) -> int:
        """Returns how many gradients went into a parameter's second moment."""
        return min(self.ages.get(self.names[number], 0), self.bucket.progress.age)

    def moment_ratio(self, number: int) -> float:
        """Returns a parameter's second moment here divided by the one that PyTorch would have."""
        return self.bucket.feedback.moment_factor(self.age(number), self.bucket.progress.age) or 1.0

    def _residual_and_companions(self, number: int) -> list[torch.Tensor]:
        """Returns flat views of a parameter's residual and companions."""
        where = slice(*self.spans[number])
        return [torch.as_tensor(one)[where] for one in self.bucket.accumulator.memory()]

    def parameter_view(self, number: int, memory: Any) -> torch.Tensor:
        """Returns a parameter's part of the bucket's residual, velocity or moment, as a view in its shape."""
        parameter: Any = self.given[number]
        one = torch.as_tensor(memory)[slice(*self.spans[number])]
        view = view_into(one, one.storage_offset(), local(parameter))
        if not hasattr(parameter, "device_mesh"):
            return view
        from torch.distributed.tensor import DTensor

        given = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(view, parameter.device_mesh, parameter.placements, **given)


class Displacement(JointMoves):
    """A bucket's common parameters, and its displacement by local steps: ``start - parameters``.

    Half types are kept in float32: a round often moves a parameter by less than their rounding.

    Attributes:
        start: [n], the common parameters.
        velocity: [n], of the outer step; empty without momentum.
        sent: [n], the parameters when the exchange in flight began; empty without a delay.
    """

    def __init__(self, part: LocalBucket, schedule: LocalSchedule) -> None:
        super().__init__(part)
        self.bucket, self.spans, self.schedule = part.bucket, part.spans, schedule
        self._parameters, self._layouts, self._memory = part.given, part.layouts, part.memory
        first, n = local(part.given[0]), part.bucket.info.num_elements
        wide = first.new_empty(0, dtype=torch.promote_types(first.dtype, torch.float32))

        def empty(like: torch.Tensor, count: int) -> torch.Tensor:
            if like.device.type != "cpu" or not count:
                return torch.zeros(count, dtype=like.dtype, device=like.device)
            # NumPy asks for huge pages: large folds miss the TLB less
            return torch.from_numpy(np.zeros(count * like.element_size(), np.uint8)).view(like.dtype)

        self.start, self.velocity = empty(wide, n), empty(wide, n if schedule.outer.momentum else 0)
        self.sent = empty(first, n if schedule.delay else 0)
        self._common = make_parameters([self.start], [(0, n)])
        self.take_as_common()

    def begin(self, starter: Starter, name: str) -> None:
        self.task = Task(name)
        self.record_sent()
        report = self.bucket.fold(self.displacement())
        self.task = starter.start(name, self.bucket.synchronize(report))

    @torch.no_grad()
    def apply_mean(self, total: SparseSum, scale: float, decay: Mapping[float, Sequence[int]]) -> int:
        """Moves `start` by the mean displacement, and the parameters to `start`; returns the union's size."""
        self.task, outer = None, self.schedule.outer
        total, scale = self.schedule.mean_of(total, self.bucket.recipe.sparsifier, self.bucket.info.size)
        if outer.momentum:  # all is sent
            num_union = len(total.values)
            mean = torch.as_tensor(scaled(total, scale), device=self.start.device)
            self.velocity.mul_(outer.momentum).add_(mean)
            self.start.sub_(mean.add(self.velocity, alpha=outer.momentum), alpha=outer.lr)
        else:
            num_union, _ = self._common.replace(total=total, scale=outer.lr * scale)
        self.return_to_start()
        self.bucket.accept()
        return num_union

    def roll_back(self) -> None:
        """Cancels the exchange in flight; the parameters still contain its displacement."""
        if self.task is not None:
            self.cancel()

    # common parameters and this rank's own

    @torch.no_grad()
    def _copy_parameters(self, into: torch.Tensor) -> None:
        for number, parameter in enumerate(self._parameters):
            self._parameter_view(into, number).copy_(local(parameter))

    def _parameter_view(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        return view_into(flat, self.spans[number][0], self._layouts[number])

    def take_as_common(self) -> None:
        """Copies the parameters to `start`, when they are equal on all ranks (at the begin, after a load)."""
        self._copy_parameters(self.start)
        self.velocity.zero_()
        self.record_sent()

    @torch.no_grad()
    def displacement(self) -> Any:
        """Returns ``start - parameters``, as the accumulator folds it."""
        pairs = []
        for span, parameter, layout in zip(self.spans, self._parameters, self._layouts, strict=True):
            line = self.sent[slice(*span)] if self.sent.numel() else flat(parameter, layout.stride())
            # half types began from `start` rounded to their dtype: that rounding is no displacement
            pairs.append((self.start[slice(*span)].to(line.dtype), line))
        if self._memory is HOST:
            common, own = ([host_view(one) for one in some] for some in zip(*pairs, strict=True))
            return WeightedParts(common, own, (1.0, -1.0))
        kind = self.start.dtype
        return self._memory.fold_input([one.to(kind) - other.to(kind) for one, other in pairs])

    @torch.no_grad()
    def return_to_start(self) -> None:
        """Sets the parameters to `start` plus the steps that this rank made since the exchange began.

        A NaN of those steps stays, and is found in the next exchange.
        """
        for number, own in enumerate(self._parameters):
            parameter, start = local(own), self._parameter_view(self.start, number)
            if not self.sent.numel():
                parameter.copy_(start)
                continue
            sent = self._parameter_view(self.sent, number)
            learned = parameter.to(start.dtype).sub(sent)
            parameter.copy_(torch.where(torch.isfinite(sent), learned, 0).add_(start))
        self.record_sent()

    def record_sent(self) -> None:
        """Copies the parameters to `sent`: later steps belong to the next exchange."""
        if self.sent.numel():
            self.sent = self.sent.to(self._parameters[0].dtype)  # `model.float()` has changed it
            self._copy_parameters(self.sent)

    @contextlib.contextmanager
    def common(self) -> Iterator[None]:
        parameters = [local(parameter) for parameter in self._parameters]
        own = [parameter.clone() for parameter in parameters]
        for number, parameter in enumerate(parameters):
            parameter.copy_(self._parameter_view(self.start, number))
        try:
            yield
        finally:
            torch._foreach_copy_(parameters, own)

    def entry(self, number: int, name: str) -> ReplicatedTensor:
        """Returns the common value of parameter `number`, for a drift check between ranks."""
        return ReplicatedTensor(name, self._parameter_view(self.start, number))

    def to_host(self, name: str) -> np.ndarray:
        """Returns the array called `name` ("start", "velocity" or "sent") on the host, [n]."""
        return np.asarray(getattr(self, name).cpu().to(self.start.dtype).numpy())

    def assign_array(self, name: str, values: np.ndarray) -> None:
        """Copies values into the array called `name`: "start", "velocity" or "sent"."""
        getattr(self, name).copy_(torch.from_numpy(np.array(values)))


class LocalBucket(ParameterBucket):
    """A bucket of parameters whose displacements are exchanged."""

    def __init__(self, spec: PartSpec, facts: Facts, ranks: RankAndSize, schedule: LocalSchedule) -> None:
        super().__init__(spec, facts, ranks)
        self.moves = Displacement(self, schedule)
