"""A bucket of parameters whose steps a rank makes on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from horovod_sparse.arrays.gradients import GradientParts, joined_pieces
from horovod_sparse.feedback import Bucket, Member, OwnStep
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.tensors.gradients import GradientMemory, host_view, memory_of
from horovod_sparse.tensors.layout import dtype_name, local, shaped, unshaped, view_into
from horovod_sparse.tensors.parameters import BucketParameters, flat
from horovod_sparse.training import parts as common
from horovod_sparse.training.engine import Facts, PartSpec
from horovod_sparse.training.moves import OwnMoves


class ParameterBucket(common.BucketPart):
    """A bucket of parameters that moves reach, one behind the other; see `StepPart`."""

    def __init__(
        self, spec: PartSpec, facts: Facts, place: tuple[int, int], memory: GradientMemory | None = None
    ) -> None:
        self.label = self.name = spec.label
        self.names, self.dense = tuple(spec.names), spec.dense
        self.given = [facts[name][1] for name in spec.names]
        own = [local(parameter) for parameter in self.given]
        stops = np.cumsum([one.numel() for one in own]).tolist()
        self.places = list(zip([0, *stops[:-1]], stops, strict=True))
        self.memory = memory or memory_of(own[0].device, self.names[0])
        self.num_bytes = stops[-1] * own[0].element_size()
        info = BucketInfo(spec.title, stops[-1], *place, dtype_name(own[0]) or "unknown")
        members = [Member(name, *span) for name, span in zip(self.names, self.places, strict=True)]
        held = self.memory.whole(info) if spec.whole else self.memory.accumulator(info, spec.recipe)
        self.bucket = Bucket(info, spec.recipe, held, members)

    def _layout(self, number: int) -> torch.Tensor:
        """Returns a tensor of a parameter's shape and order in the bucket."""
        return local(self.given[number])

    def shaped(self, number: int, values: np.ndarray) -> torch.Tensor:
        return shaped(values, self._layout(number))

    def flat(self, number: int, values: torch.Tensor) -> np.ndarray:
        return unshaped(values, self._layout(number))


class StepBucket(ParameterBucket):
    """A bucket of parameters whose steps are folded, selected and applied."""

    def __init__(
        self,
        spec: PartSpec,
        facts: Facts,
        place: tuple[int, int],
        step: Callable[[int], OwnStep],
        gradient_of: Callable[[torch.Tensor], torch.Tensor | None],
        ages: dict[str, int],
    ) -> None:
        super().__init__(spec, facts, place)
        self.parameters = BucketParameters(self.given, self.places)
        self._step, self._gradient_of = step, gradient_of
        self.moves = OwnMoves(self.bucket, self.parameters)
        #: gradients that each parameter has had, by name: the moments of one that is used late are young
        self.ages = ages
        #: of the pass: moments that were made as old as the bucket's, and what they were before
        self._young: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._counted: list[int] = []
        self._gradients: list[torch.Tensor | None] = []
        self._now = OwnStep(spec.recipe.feedback, (1.0, 0.0), 1.0, 0.0)

    def prepare(self) -> None:
        """Reads the optimizer's settings for this pass."""
        self._now = self._step(self.bucket.progress.age)
        self.bucket.feedback = self._now.feedback
        self._gradients = [self._gradient_of(one) for one in self.parameters.parameters]

    @property
    def rate(self) -> float:
        return self._now.rate

    @property
    def shrink(self) -> float:
        return self._now.shrink

    @property
    def absent(self) -> list[int]:
        if self._now.rate == 0.0:
            return list(range(len(self.names)))
        return [number for number, one in enumerate(self._gradients) if one is None]

    def gradient(self) -> Any:
        """Makes moments of young parameters as old as the bucket's; returns what the accumulator folds."""
        self._young = []
        self._counted = sorted(set(range(len(self.names))) - set(self.absent))
        for number in self._counted:
            own = self.ages[self.names[number]] = self.ages.get(self.names[number], 0) + 1
            if own <= self.bucket.progress.age:
                self._make_older(number, own)
        if self._now.matrices is None:
            return self.parameters.foldable(self._gradients, self._now.weights)
        for momentum, gradient in self._whole():
            self._now.matrices.advance(momentum, gradient)
        if not self.parameters.on_host:
            return torch.cat(list(self._steps()))
        return MadeParts(lambda: map(host_view, self._steps()), self.bucket.info)

    def _whole(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Momentum and gradient of the parameters that move, in their shape."""
        for number in self._counted:
            momentum = self.view(number, self.bucket.accumulator.companions[0])
            gradient = self._gradients[number]
            assert gradient is not None  # such a parameter stands still
            yield momentum, local(gradient).to(momentum.dtype) * self._now.weights[0]

    def _steps(self) -> Iterator[torch.Tensor]:
        """Yields the steps of all parameters, flat: made anew each time, so the host keeps none of them."""
        made, moving = self._whole(), set(self._counted)
        for number, parameter in enumerate(self.parameters.parameters):
            if number in moving:
                yield flat(self._now.matrices.step(*next(made)), parameter)
            else:
                yield torch.zeros_like(self._flat_memory(number)[0])

    def _make_older(self, number: int, own: int) -> None:
        """Prepares the second moment of a parameter for the fold, whose correction is for the bucket's age.

        ``v (1 - b^age) / (1 - b^own)`` is kept of a moment v, so that the correction for the bucket's age is
        that for the parameter's own. The fold adds (1 - b) g^2; this adds what is missing.
        """
        feedback: Any = self._now.feedback
        age = self.bucket.progress.age + 1
        before, after = feedback.moved(own - 1, age - 1), feedback.moved(own, age)
        if after - 1.0 < 1e-7:
            return
        (_, moment), (weight, beside) = self._flat_memory(number), self._now.weights
        parameter, gradient = self.parameters.parameters[number], self._gradients[number]
        self._young.append((moment, moment.clone()))
        step = flat(gradient, parameter).to(moment.dtype) * weight
        if beside:
            step += flat(parameter).to(moment.dtype) * beside
        square = step.square_().nan_to_num_(0.0, 0.0, 0.0)  # the fold finds out what is not finite
        if before:
            moment.mul_(after / before)
        moment.add_(square, alpha=(after - 1.0) * (1.0 - feedback.beta2) / feedback.beta2)

    def abandon(self, *, drop: bool = False) -> None:
        """See `StepPart.abandon`."""
        self.bucket.abandon(drop=drop)
        if drop:
            for moment, before in self._young:
                moment.copy_(before)
            for momentum, gradient in self._whole() if self._now.matrices else ():
                self._now.matrices.take_back(momentum, gradient)
        for number in self._counted:
            self.ages[self.names[number]] -= 1
        self._counted = []

    def release(self) -> None:
        """Lets go of the pass's gradients, which others may want to free."""
        self._young, self._counted, self._gradients = [], [], []

    def age(self, number: int) -> int:
        """Returns how many gradients a parameter's moment is made of."""
        return min(self.ages.get(self.names[number], 0), self.bucket.progress.age)

    def older(self, number: int) -> float:
        """Returns by how much a parameter's moment is larger here than PyTorch's of its own age."""
        return self.bucket.feedback.moved(self.age(number), self.bucket.progress.age) or 1.0

    def _flat_memory(self, number: int) -> list[torch.Tensor]:
        """Residual and companions of a parameter, flat: the very memory that passes change."""
        where = slice(*self.places[number])
        return [torch.as_tensor(one)[where] for one in self.bucket.accumulator.memory()]

    def view(self, number: int, memory: Any) -> torch.Tensor:
        """Views a parameter's part of the bucket's residual, or of a companion, in its shape."""
        parameter: Any = self.parameters.parameters[number]
        one = torch.as_tensor(memory)[slice(*self.places[number])]
        view = view_into(one, one.storage_offset(), local(parameter))
        if not hasattr(parameter, "device_mesh"):
            return view
        from torch.distributed.tensor import DTensor

        given = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(view, parameter.device_mesh, parameter.placements, **given)


class MadeParts(GradientParts):
    """Arrays that are made when they are read, one after the other.

    Args:
        make: gives them.
        info: of the bucket that they fill.
    """

    def __init__(self, make: Callable[[], Iterator[np.ndarray]], info: BucketInfo) -> None:
        self._make, self.size, self.dtype = make, info.num_elements, info.value_dtype

    def pieces(self, size: int, block: int = 1) -> Iterator[tuple[int, np.ndarray]]:
        return joined_pieces(self._make(), self.dtype, min(size, self.size), block)
