"""The model that is planned for: one of the layer tables, or a file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovod_sparse.cli.options import time
from horovod_sparse.cost import Profile
from horovod_sparse.errors import ArgumentError, HorovodSparseError
from horovod_sparse.merging import DEVICES, LAYER_TABLES, ParameterFacts, StepTime, Workload, layer_table

#: of a model's file, in words
FORMAT = (
    '{"parameters": [[name, shape, seconds], ...], "forward_seconds": seconds}: parameters in forward order, '
    "shape a list or a number of elements, seconds of backward (left out where --profile holds them)"
)


@dataclass(frozen=True)
class Model:
    """Parameters and, where they are known, times of a step.

    Attributes:
        name: of the table, or of the file.
        parameters: in forward order.
        backward_seconds: of each; None where the file has none.
        forward_seconds: of the step before backward.
        density: that the table's source trains it with; None for files without one.
        steps: of a table, times on other devices.
        source: where times are from, in words.
    """

    name: str
    parameters: tuple[ParameterFacts, ...]
    backward_seconds: tuple[float, ...] | None
    forward_seconds: float = 0.0
    density: float | None = None
    steps: Mapping[str, StepTime] = field(default_factory=dict)
    source: str = ""

    def on(self, gpu: str | None, step_seconds: float | None) -> Model:
        """The model with the times of another device.

        Args:
            gpu: of a table's `steps`, or None.
            step_seconds: of forward and backward, or None.

        Raises:
            ArgumentError: the model has no times that could be scaled, or none of the device, or both are
                given.

        Example:
            >>> round(read_model("resnet50").on("a100", None).workload().step_seconds, 5)
            0.05182
        """
        if gpu is None and step_seconds is None:
            return self
        if gpu is not None and step_seconds is not None:
            raise ArgumentError("--gpu", gpu, "either it or the time of a step")
        source = "as given"
        if gpu is not None:
            if gpu not in self.steps:
                known = ", ".join(self.steps) or "none here"
                raise ArgumentError(
                    "--gpu", gpu, f"one whose time {self.name} has ({known}), or --step-seconds"
                )
            step = self.steps[gpu]
            step_seconds, source = step.seconds, f"{gpu}, {step.batch} samples ({step.source})"
        if self.backward_seconds is None:
            raise ArgumentError("--step-seconds", step_seconds, "a model with times to be scaled")
        if step_seconds is None or not 0.0 < step_seconds < math.inf:
            raise ArgumentError("--step-seconds", step_seconds, "a time above 0")
        step_now = Workload(self.parameters, self.backward_seconds, self.forward_seconds).lasting(
            step_seconds
        )
        return dataclasses.replace(
            self,
            backward_seconds=step_now.backward_seconds,
            forward_seconds=step_now.forward_seconds,
            source=source,
        )

    def workload(self, profile: Profile | None = None, update_seconds: float | None = None) -> Workload:
        """Parameters with times; those of the profile, where it was measured on this model.

        Args:
            profile: may hold backward times by name, and that of the optimizer's update.
            update_seconds: of that; see `updating_seconds`.

        Raises:
            ProfileMismatchError: there are times in neither, or some are missing, or all are 0.
        """
        names = [parameter.name for parameter in self.parameters]
        if profile is not None and (
            self.backward_seconds is None or set(names) <= set(profile.backward_seconds)
        ):
            profile.backward_of(names)  # refuses a profile that lacks some
            # gradients came in the profile's order, whatever order the file has
            facts = {parameter.name: parameter for parameter in self.parameters}
            ordered = tuple(facts[name] for name in profile.backward_seconds if name in facts)
            times = profile.backward_of([parameter.name for parameter in ordered])
            # measured from the end of a step to that of the next: the update is in it
            return Workload(ordered, times, profile.forward_seconds)
        if self.backward_seconds is None:
            given = f"{self.name} without times"
            raise ArgumentError("--model", given, "a profile with backward times too, or times in the file")
        return Workload(
            self.parameters,
            self.backward_seconds,
            self.forward_seconds,
            update_seconds=updating_seconds(self.parameters, profile, update_seconds),
        )

    def doubts(self, profile: Profile | None) -> tuple[str, ...]:
        """What a user should know about the times that `workload` takes.

        Args:
            profile: as for `workload`.
        """
        if profile is None or not profile.backward_seconds or self.backward_seconds is None:
            return ()
        missing = [fact.name for fact in self.parameters if fact.name not in profile.backward_seconds]
        if not missing:
            return ()
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        return (
            f"the profile has backward times of another model: none for {len(missing)} of "
            f"{len(self.parameters)} parameters ({shown}). Those of {self.name} itself are used",
        )


def updating_seconds(
    parameters: Sequence[ParameterFacts], profile: Profile | None, given: float | None = None
) -> float:
    """What the optimizer's update takes: as given, as the profile says, or nothing where nobody knows.

    Args:
        parameters: of the model.
        profile: that was measured, if there is one.
        given: seconds, or None.
    """
    if given is not None:
        return given
    return 0.0 if profile is None else profile.update_seconds([one.num_elements for one in parameters])


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds what says how long a step computes, where a table's own time is of another device."""
    text = "time of forward and backward on one worker, as in 52ms: all times of the model are scaled to it"
    parser.add_argument("--step-seconds", type=time, metavar="TIME", help=text)
    text = (
        "time of the optimizer's update on one worker (default: the profile's, of SGD with momentum, or none)"
    )
    parser.add_argument("--update", type=time, metavar="TIME", help=text)
    text = "take a table's time of this device; docs/command.md has where each is from"
    parser.add_argument("--gpu", choices=DEVICES, help=text)


def read_model(text: str) -> Model:
    """A model by the name of its table, or from a file.

    Args:
        text: a name of `LAYER_TABLES`, or a path that ends in .json, of the form `FORMAT`.

    Raises:
        ArgumentError: for another name, or a file of another form.

    Example:
        >>> len(read_model("vgg16_cifar").parameters)
        54
    """
    if text in LAYER_TABLES:
        table = layer_table(text)
        workload = table.workload
        return Model(
            text,
            workload.parameters,
            workload.backward_seconds,
            workload.forward_seconds,
            table.density,
            table.steps,
            table.source,
        )
    if not text.endswith(".json"):
        raise ArgumentError("--model", text, f"{', '.join(LAYER_TABLES)}, or a file that ends in .json")
    try:
        return _parse(Path(text).stem, json.loads(Path(text).read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, HorovodSparseError) as error:
        raise ArgumentError("--model", text, f"a file of the form {FORMAT}; found: {error!r}") from error


def _parse(name: str, saved: Mapping[str, Any]) -> Model:
    rows: Sequence[Sequence[Any]] = saved["parameters"]
    if not rows:
        raise ValueError("no parameters")
    lengths = {len(row) for row in rows}
    if lengths not in ({2}, {3}):
        raise ValueError(f"rows of {sorted(lengths)} items, not all of 2 or all of 3")
    parameters = tuple(ParameterFacts(str(row[0]), _elements(row[0], row[1])) for row in rows)
    names = [parameter.name for parameter in parameters]
    if len(set(names)) < len(names):
        raise ValueError("a name stands twice")
    times = tuple(float(row[2]) for row in rows) if lengths == {3} else None
    forward = float(saved.get("forward_seconds", 0.0))
    if times is not None:
        Workload(parameters, times, forward)  # refuses what is negative, not finite, or all 0
    density = saved.get("density")
    return Model(name, parameters, times, forward, None if density is None else float(density))


def _elements(name: str, shape: Any) -> int:
    dimensions = [shape] if isinstance(shape, int) else list(shape)
    if not all(isinstance(length, int) and length > 0 for length in dimensions):
        raise ValueError(f"{name} has the shape {shape}")
    return math.prod(dimensions)
