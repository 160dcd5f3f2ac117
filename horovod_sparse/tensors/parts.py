"""What is synchronized as one: a bucket, or parameters that stay dense. Both as a task of the driver.

And what a plan of parts looks at: the facts of every parameter.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import Bucket, Member, ParameterRules, Recipe, TwoLevelBucket, shard_of
from horovod_sparse.plans.plan import ParameterFacts
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.telemetry import BucketReport
from horovod_sparse.tensors.adoption import element, feedback_of, note_step
from horovod_sparse.tensors.flat_gradient import FlatGradient, GradientMemory
from horovod_sparse.tensors.layout import dtype_name, shaped, unscaled, unshaped
from horovod_sparse.topology import Topology
from horovod_sparse.training import parts as common
from horovod_sparse.training.engine import Facts, PartSpec, Starter, Task

#: makes what holds the gradients of a part
MakeGradient: TypeAlias = Callable[[Sequence[torch.Tensor], str], Any]


class Part:
    """Parameters that are synchronized together, as their gradients lie in one memory.

    Attributes:
        names: of the parameters.
        label: stable over ranks and steps.
        gradient: their memory.
        streams: told of every gradient that is written, where there are several.
        num_missing: parameters whose gradient is not complete yet in this step.
        task: under way, None before `start`.
        places: [start, stop) of every parameter.
    """

    bucket: Bucket
    dense: bool

    def __init__(
        self,
        label: str,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        make_gradient: MakeGradient,
    ) -> None:
        self.label, self.names = label, tuple(names)
        self.dtype = dtype_name(parameters[0]) or "unknown"  # others are refused before
        self.gradient: FlatGradient = make_gradient(parameters, self.names[0])
        self.places = self.gradient.places
        self.memory: GradientMemory = self.gradient.memory
        self.streams = self.memory.streams()
        self.num_missing = len(self.names)
        self.task: Task | None = None
        self._loss_scale = 1.0

    def shaped(self, number: int, values: np.ndarray) -> torch.Tensor:
        return shaped(values, self.gradient.layouts[number])

    def flat(self, number: int, values: torch.Tensor) -> np.ndarray:
        return unshaped(values, self.gradient.layouts[number])

    def start(self, driver: Starter, loss_scale: float = 1.0, *, refused: bool = False) -> None:
        """Takes the gradients and starts their synchronization."""
        if self.streams is not None:
            self.streams.meet()  # before gradients are copied together, or divided by the loss's scale
        self.gradient.settle()
        self._loss_scale = loss_scale
        self._run(driver, self._step(refused))

    def again(self, driver: Starter, *, drop: bool) -> None:
        """Starts the synchronization once more, after `abandon`, of what waits here."""
        raise NotImplementedError

    def _step(self, refused: bool) -> Synchronization[Any]:
        raise NotImplementedError

    def _run(self, driver: Starter, step: Synchronization[Any]) -> None:
        if self.streams is not None:
            step = self.streams.run(step)
        self.task = driver.start(self.label, step)

    def apply(self, scale: float) -> BucketReport:
        """Puts scale (and the loss's) times the sum over ranks where the gradients are. The task is done."""
        task = self.task
        if task is None or not task.done:
            raise RuntimeError("the synchronization is not done: this is a bug, please report it")
        if task.error is not None:
            raise task.error
        started = time.perf_counter()
        if self.streams is not None:
            self.streams.join()
        report = self._put(task.result, scale * self._loss_scale)
        took = time.perf_counter() - started
        return dataclasses.replace(report, wait_seconds=task.waited_seconds, apply_seconds=took)

    def _put(self, total: Any, scale: float) -> BucketReport:
        raise NotImplementedError

    def abandon(self, *, drop: bool = False, again: bool = False) -> None:
        """See `Bucket.abandon`: takes the step back, as far as it came."""
        raise NotImplementedError


class SparseBucket(common.BucketPart, Part):
    def __init__(
        self,
        label: str,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        recipe: Recipe,
        group: Callable[[], Mapping[str, Any]],
        place: tuple[int, int],
        *,
        dense: bool = False,
        make_gradient: MakeGradient = FlatGradient,
        topology: Topology | None = None,
    ) -> None:
        super().__init__(label, names, parameters, make_gradient)
        self.name, self.dense = label, dense
        #: the optimizer's settings for these parameters, as they are now; empty without an optimizer
        self.group = group
        #: see `Bucket.step`
        self.scale: float | None = None
        self._num_steps = 0
        self._noted: list[torch.Tensor] = []
        whole = BucketInfo(label, self.gradient.num_elements, *place, self.dtype)
        members = [Member(item, *span) for item, span in zip(self.names, self.places, strict=True)]
        if topology is None:
            self.bucket = Bucket(whole, recipe, self.memory.accumulator(whole, recipe), members)
        else:
            accumulator = self.memory.accumulator(shard_of(whole, topology), recipe)
            self.bucket = TwoLevelBucket(
                *(whole, recipe, accumulator, members, topology),
                summable=self.memory.summable,
                foldable=self.memory.shard,
            )

    def _step(self, refused: bool) -> Synchronization[Any]:
        group, feedback = self.group(), self.bucket.recipe.feedback
        if getattr(feedback, "applies_rate", False):
            self.bucket.feedback = feedback_of(feedback, group)
        rate = group.get("lr")
        rate = None if rate is None else float(rate)
        foldable = self.gradient.foldable(self._loss_scale)
        return self.bucket.step(foldable, rate, refused=refused, scale=self.scale)

    def again(self, driver: Starter, *, drop: bool) -> None:
        self._run(driver, self.bucket.again(scale=self.scale))

    def _put(self, total: Any, scale: float) -> BucketReport:
        if total.whole:  # of n elements: no copy of them
            num_union = self.gradient.scatter(None, total.values, scale)
        else:
            values = total.values if scale == 1.0 else total.values * total.values.dtype.type(scale)
            num_union = self.gradient.scatter(total.indices, values)
            if getattr(self.bucket.feedback, "applies_rate", False):
                self._note_step(total.indices, values)
        self.bucket.accept()
        return BucketReport(self.bucket.last, num_union, self.gradient.num_bytes, total.notes.norms)

    def _note_step(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Who clips what comes back clips steps: the optimizer notices by the largest, from time to time."""
        for parameter in self._noted:  # of a step that no optimizer has applied
            note_step(parameter, 0, 0.0)
        self._noted.clear()
        self._num_steps += 1
        if self._num_steps % _EVERY == 1 and values.size:  # reading an element waits for a device
            position = int(indices[int(np.abs(values).argmax())])
            number = next(at for at, (_, stop) in enumerate(self.places) if position < stop)
            value = float(element(self.gradient.flat, position)) / self._loss_scale
            self._noted.append(self.gradient.parameters[number])
            note_step(self._noted[0], position - self.places[number][0], value)

    def abandon(self, *, drop: bool = False, again: bool = False) -> None:
        if self.streams is not None:
            self.streams.join()
        self.bucket.abandon(drop=drop, again=again)


class DenseParameters(common.DensePart, Part):
    """Parameters that a plan leaves dense: one allreduce of all, see `GradientMemory.sum_dense`."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        place: tuple[int, int],
        make_gradient: MakeGradient = FlatGradient,
        halves: bool = False,
    ) -> None:
        super().__init__(f"dense.{names[0]}", names, parameters, make_gradient)
        self.num_elements, self._place, self._halves = self.gradient.num_elements, place, halves
        #: what float16 has taken from the gradient under way
        self._rounded: torch.Tensor | None = None

    def again(self, driver: Starter, *, drop: bool) -> None:
        if drop:
            self.memory.zero(self.gradient.flat)
        self._run(driver, self._step(refused=False))

    def _step(self, refused: bool) -> Synchronization[Any]:
        flat = unscaled(self.gradient.flat, self._loss_scale)
        members = [(name, stop) for name, (_, stop) in zip(self.names, self.places, strict=True)]
        carried = self.carried
        if self._halves:
            wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
            wide = wide if carried is None else wide + torch.as_tensor(carried, device=wide.device)
            most = torch.finfo(torch.float16).max / self._place[1]  # no sum is larger than a half may be
            flat, carried = torch.where(wide.isfinite(), wide.clamp(-most, most), wide).half(), None
            self._rounded = wide - flat
        given = self.title, flat, carried, self._place
        return self.memory.sum_dense(*given, refused=refused, members=members, halves=self._halves)

    def held(self) -> tuple[np.ndarray, ...]:
        return tuple(torch.as_tensor(one).cpu().numpy() for one in super().held())

    def _put(self, total: Any, scale: float) -> BucketReport:
        self.gradient.fill((total.float() if self._halves else total) * scale)
        self.carried = self._rounded  # on its device
        return self.report(self._place[1], total.element_size(), self.gradient.num_bytes, 0.0)


def make_parts(
    specs: Sequence[PartSpec],
    facts: Facts,
    place: tuple[int, int],
    topology: Topology | None,
    optimizer: Any | None,
    make_gradient: MakeGradient = FlatGradient,
) -> list[Part]:
    parts: list[Part] = []
    for spec in specs:
        parameters = [facts[name][1] for name in spec.names]
        if spec.recipe is None:
            parts.append(DenseParameters(spec.names, parameters, place, make_gradient, spec.halves))
            continue
        group = partial(_group, optimizer, facts[spec.names[0]][0].group)
        hosts = None if spec.dense else topology
        given = spec.label, spec.names, parameters, spec.recipe, group, place
        parts.append(SparseBucket(*given, dense=spec.dense, make_gradient=make_gradient, topology=hosts))
    return parts


def _group(optimizer: Any | None, number: int) -> Mapping[str, Any]:
    # by number: load_state_dict makes new dicts of the groups
    found: Mapping[str, Any] = {} if optimizer is None else optimizer.param_groups[number]
    return found


_NO_RULES = ParameterRules()
#: steps from one look at them to the next
_EVERY = 16


def facts_of(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    group_of: Mapping[torch.Tensor, int] | None,
    rules: ParameterRules = _NO_RULES,
    advice: str = "",
) -> dict[str, tuple[ParameterFacts, torch.Tensor]]:
    """Facts and tensor of every parameter that has elements, by name; `advice` if a dtype is refused."""
    facts = {}
    for name, parameter in named_parameters:
        n, dtype = parameter.numel(), dtype_name(parameter)
        if n == 0:
            continue
        if parameter.is_complex():
            raise UnsupportedError(
                f"{name} is complex ({parameter.dtype}), and selection looks at each real number: "
                "keep it as real numbers, and let forward take torch.view_as_complex of it"
            )
        if dtype is None:
            raise UnsupportedError(
                f"{name} has dtype {parameter.dtype}: gradients of float32, float64, float16 and bfloat16 "
                f"can be synchronized{advice}"
            )
        group = 0 if group_of is None else group_of[parameter]
        device, density = str(parameter.device), rules.density_of(name, n) or 0.0
        facts[name] = (
            ParameterFacts(name, n, dtype, device, group, density, tuple(parameter.shape)),
            parameter,
        )
    return facts


def groups_of(optimizer: Any) -> dict[torch.Tensor, int]:
    return {
        parameter: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
