"""The model that is planned for: one of the layer tables, or a file."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovod_sparse.cli.options import time
from horovod_sparse.errors import ArgumentError, HorovodSparseError
from horovod_sparse.planning.calibration.steps import step_of
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.workload import DEVICES, LAYER_TABLES, StepTime, Workload, layer_table
from horovod_sparse.plans.plan import MAX_BUCKET_ELEMENTS, ParameterFacts

#: of a model's file, in words
FORMAT = (
    '{"parameters": [[name, shape, seconds], ...], "forward_seconds": seconds}: parameters in forward order, '
    "shape a list or a number of elements, seconds of backward (left out where --profile holds them)"
)


#: of a step's computing, where nothing else is known: backward is two of three multiplications
_FORWARD_SHARE = 1 / 3
#: equal pieces of a model of which only the number of parameters is known
_PIECES = 48


@dataclass(frozen=True)
class Model:
    """Parameters and, where they are known, times of a step."""

    #: of the table, or of the file
    name: str
    #: in forward order
    parameters: tuple[ParameterFacts, ...]
    #: of each; None where the file has none
    backward_seconds: tuple[float, ...] | None
    #: of the step before backward
    forward_seconds: float = 0.0
    #: that the table's source trains it with; None for files without one
    density: float | None = None
    #: of a table, times on other devices
    steps: Mapping[str, StepTime] = field(default_factory=dict)
    #: where times are from, in words
    source: str = "of the file"

    def on(self, gpu: str | None, seconds: float | None) -> Model:
        """The model with the times of another device."""
        source = "as given"
        if gpu is not None:
            if seconds is not None:
                raise ArgumentError("--gpu", gpu, "either it or the time of a step")
            if gpu not in self.steps:
                known = ", ".join(self.steps) or "none here"
                raise ArgumentError("--gpu", gpu, f"one whose time {self.name} has ({known}), or --step-ms")
            step = self.steps[gpu]
            seconds, source = step.seconds, f"{gpu}, {step.batch} samples ({step.source})"
        if seconds is None:
            return self
        if self.backward_seconds is None:
            raise ArgumentError("--step-ms", 1e3 * seconds, "a model with times to be scaled")
        step_now = Workload(self.parameters, self.backward_seconds, self.forward_seconds).lasting(seconds)
        return dataclasses.replace(
            self,
            backward_seconds=step_now.backward_seconds,
            forward_seconds=step_now.forward_seconds,
            source=source,
        )

    def workload(self, profile: Profile | None = None, update_seconds: float | None = None) -> Workload:
        """Parameters with times; those of the profile, where it was measured on this model."""
        if profile is not None:
            names = {parameter.name for parameter in self.parameters}
            if self.backward_seconds is None or names <= set(profile.backward_seconds):
                return step_of(profile, self.parameters)
        if self.backward_seconds is None:
            given = f"{self.name} without times"
            raise ArgumentError("--model", given, "a profile with backward times too, or times in the file")
        if update_seconds is None:  # as the profile says, or nothing where nobody knows
            sizes = [one.num_elements for one in self.parameters]
            update_seconds = 0.0 if profile is None else profile.update_seconds(sizes)
        times = self.backward_seconds
        return Workload(self.parameters, times, self.forward_seconds, update_seconds=update_seconds)

    def doubts(self, profile: Profile | None) -> tuple[str, ...]:
        """What a user should know about the times that `workload` takes."""
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


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds what says how long a step computes, where a table's own time is of another device."""
    add = parser.add_argument
    text = "of forward and backward on one worker: all times of the model are scaled to it"
    add("--step-ms", type=float, metavar="MS", help=text)
    text = (
        "time of the optimizer's update on one worker (default: the profile's, of SGD with momentum, or none)"
    )
    add("--update", type=time, metavar="TIME", help=text)
    text = "take a table's time of this device; docs/command.md has where each is from"
    add("--gpu", choices=DEVICES, help=text)


def model_of(options: argparse.Namespace) -> Model:
    """That of `--model`, or one of `--params` in equal pieces, with the times that are asked for."""
    seconds = None if options.step_ms is None else options.step_ms / 1e3
    if seconds is not None and not 0.0 < seconds < math.inf:
        raise ArgumentError("--step-ms", options.step_ms, "a time in milliseconds above 0")
    if (options.params is None) == (options.model is None):
        raise ArgumentError("--model", options.model, "either this or --params, and not both")
    if options.model is not None:
        return read_model(options.model).on(options.gpu, seconds)
    if options.gpu is not None:
        raise ArgumentError("--gpu", options.gpu, "--model too: tables have times by device")
    if not 1.0 <= options.params <= 1e12:
        raise ArgumentError("--params", options.params, "a number of parameters, from 1 to 1e12")
    if seconds is None:
        raise ArgumentError("--step-ms", None, "the time of forward and backward beside --params")
    n = int(options.params)
    pieces = min(n, max(_PIECES, -(-n // MAX_BUCKET_ELEMENTS)))
    bounds = [n * number // pieces for number in range(pieces + 1)]
    facts = tuple(
        ParameterFacts(f"piece{number}", stop - start)
        for number, (start, stop) in enumerate(itertools.pairwise(bounds))
    )
    times = ((1 - _FORWARD_SHARE) * seconds / pieces,) * pieces
    return Model(f"{n:,} parameters", facts, times, _FORWARD_SHARE * seconds, source="as given")


def read_model(text: str) -> Model:
    """A model by the name of its table, or from a file."""
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
