"""The model that is planned for: one of the layer tables, or a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_sparse.cost import Profile
from horovod_sparse.errors import ArgumentError, HorovodSparseError
from horovod_sparse.merging import LAYER_TABLES, ParameterFacts, Workload, layer_table

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
    """

    name: str
    parameters: tuple[ParameterFacts, ...]
    backward_seconds: tuple[float, ...] | None
    forward_seconds: float = 0.0
    density: float | None = None

    def workload(self, profile: Profile | None = None) -> Workload:
        """Parameters with times; those of the profile, where it was measured on this model.

        Args:
            profile: may hold backward times by name.

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
            return Workload(ordered, times, profile.forward_seconds)
        if self.backward_seconds is None:
            given = f"{self.name} without times"
            raise ArgumentError("--model", given, "a profile with backward times too, or times in the file")
        return Workload(self.parameters, self.backward_seconds, self.forward_seconds)

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
            text, workload.parameters, workload.backward_seconds, workload.forward_seconds, table.density
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
