"""A profile: the measurements of one cluster, in one JSON file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from horovod_sparse.checks import check_count, check_seconds
from horovod_sparse.collectives import COLLECTIVES
from horovod_sparse.errors import ArgumentError, HorovodSparseError, ProfileMismatchError
from horovod_sparse.planning.model import AffineTime, CostModel, Fit, Workload, communication_of
from horovod_sparse.plans import ParameterFacts
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.topology import ClusterFacts

#: stands for a sparsifier's name in `Profile.selection`, for the work on parameters that stay dense
DENSE = "dense"
PROFILE_VERSION = 4


@dataclass(frozen=True)
class Profile:
    """Fitted times of collectives and selection on one cluster of `size` ranks, and of a model's backward."""

    size: int
    framework: str
    controller: str
    cycle_seconds: float
    #: by kind ("allgather", ...): the time, by the bytes that a rank sends
    collectives: Mapping[str, Fit] = field(default_factory=dict)
    #: by the sparsifier's name: the time of fold and selection, by n and k; "dense": for dense parameters
    selection: Mapping[str, Fit] = field(default_factory=dict)
    #: by the sparsifier's name: the time of decoding and applying, by n and received elements
    decoding: Mapping[str, Fit] = field(default_factory=dict)
    #: by parameter, in the model's order, if a model was measured; and the seconds before backward
    backward_seconds: Mapping[str, float] = field(default_factory=dict)
    forward_seconds: float = 0.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_count("size", self.size, "a number of ranks, 1 or more")
        object.__setattr__(self, "size", int(self.size))  # JSON knows no whole number of NumPy's
        if unknown := sorted(set(self.collectives) - set(COLLECTIVES.values())):
            raise ArgumentError("collectives", unknown, f"only {sorted(COLLECTIVES.values())}")
        check_seconds("forward_seconds", self.forward_seconds)
        for name, seconds in self.backward_seconds.items():
            check_seconds(f"backward_seconds[{name!r}]", seconds)

    def to_json(self) -> str:
        """Returns the profile as JSON text; equal profiles give equal text."""
        saved = {"version": PROFILE_VERSION, **asdict(self)}
        # the model's order is kept by a list: sorted keys would lose it
        saved["backward_seconds"] = [list(item) for item in self.backward_seconds.items()]
        return json.dumps(saved, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Reads a profile from `to_json`'s text; raises a `ProfileMismatchError` for any other text."""
        try:
            saved: dict[str, Any] = dict(json.loads(text))
            version = saved.pop("version")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProfileMismatchError("not a profile: no JSON object with a version") from error
        if version != PROFILE_VERSION:
            raise ProfileMismatchError(
                f"the profile is of version {version}, must be of {PROFILE_VERSION}: measure again"
            )
        try:
            saved["backward_seconds"] = dict(saved["backward_seconds"])
            for key in ("collectives", "selection", "decoding"):
                saved[key] = {name: Fit(**fit) for name, fit in saved[key].items()}
            return cls(**saved)
        except (ValueError, TypeError, KeyError, AttributeError, HorovodSparseError) as error:
            raise ProfileMismatchError(f"the profile is damaged: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the profile to a file atomically."""
        part = Path(f"{path}.part")
        part.write_text(self.to_json(), encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a profile from a file; raises a `ProfileMismatchError` if it holds none."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (ProfileMismatchError, UnicodeDecodeError) as error:
            raise ProfileMismatchError(f"{path}: {error}") from error
        except OSError as error:
            raise ProfileMismatchError(f"{path}: the profile cannot be read ({error.strerror})") from error

    def digest(self) -> str:
        """Returns a short hash of the profile, which ranks compare."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def check(self, where: ClusterFacts) -> list[str]:
        """Returns warnings, one for each difference from the cluster `where` that makes predictions worse.

        Raises a `ProfileMismatchError` for a profile that cannot be applied there at all.
        """
        if where.size > 1 and self.size == 1:
            raise ProfileMismatchError(
                f"the profile was measured with 1 rank, which sends nothing: run horovod-sparse calibrate "
                f"with {where.size} ranks"
            )
        if where.size > 1 and not self.collectives:
            raise ProfileMismatchError("the profile has no collectives: run horovod-sparse calibrate")
        facts = [
            ("{} ranks, here {}: times of collectives depend on it", self.size, where.size),
            ("framework {}, here {}: selection may take another time", self.framework, where.framework),
            ("controller {}, here {}: latency differs", self.controller, where.controller),
        ]
        told = [words.format(own, here) for words, own, here in facts if own != here]
        own, here = self.cycle_seconds, where.cycle_seconds
        if not math.isclose(own, here, rel_tol=0.01):
            told.append(f"a cycle time of {own * 1e3:g} ms, here {here * 1e3:g} ms: it is part of alpha")
        return [f"the profile was measured with {one}" for one in told]

    def workload_and_cost(
        self, parameters: Sequence[ParameterFacts], sparsifier: Sparsifier, size: int
    ) -> tuple[Workload, CostModel]:
        """Returns the model's parameters with measured times, and the cost model for their buckets.

        Raises a `ProfileMismatchError` for a profile of another model.
        """
        facts = {parameter.name: parameter for parameter in parameters}
        if missing := [name for name in facts if name not in self.backward_seconds]:
            raise ProfileMismatchError(
                f"the profile has no backward time for {_shortened(missing)}: measure one for this model"
            )
        measured = [(facts[name], each) for name, each in self.backward_seconds.items() if name in facts]
        ordered, seconds = zip(*measured, strict=True) if measured else ((), ())
        dense = frozenset(parameter.name for parameter in parameters if parameter.density == 1.0)
        workload = Workload(ordered, seconds, self.forward_seconds, dense)
        # Horovod sends what waits at the same time as one
        return workload, self.cost(sparsifier, size, fuse_sparse=True)

    def cost(self, sparsifier: Sparsifier, size: int | None = None, **options: Any) -> CostModel:
        """Returns the cost model of a sparsifier among `size` ranks (by default as many as were measured).

        Decoding counts as selection: the thread that runs backward does it, in some later hook, or in the
        end.

        `options` are further fields of `CostModel`. A `ProfileMismatchError` names what the sparsifier needs
        and was not measured; a rank alone sends nothing, and needs no collective.
        """
        size, name = self.size if size is None else size, sparsifier.name
        needed = {COLLECTIVES[kind] for kind in sparsifier.rounds(size)}
        needed |= {"allreduce"}  # for dense parameters
        measured = dict.fromkeys(needed, Fit(0.0, 0.0)) if size == 1 else self.collectives
        if missing := sorted(needed - set(measured)):
            raise ProfileMismatchError(f"the profile lacks {_shortened(missing)}: calibrate with {name}")
        if name not in self.selection:
            raise ProfileMismatchError(
                f"no selection time for {name} in the profile, only {_shortened(sorted(self.selection))}: "
                "run horovod-sparse calibrate with it"
            )
        times = {kind: fit.time() for kind, fit in measured.items()}
        communication = communication_of(sparsifier, size, times)
        # a share of all elements, with duplicates
        received = min(1.0, sparsifier.density) * (size if sparsifier.density_scope == "per rank" else 1)
        selection = self.selection[name].time(sparsifier.density)
        if name in self.decoding:
            selection += self.decoding[name].time(received)
        dense = self.collectives.get("allreduce") if size > 1 else None
        return CostModel(
            selection=selection,
            communication=communication,
            dense=AffineTime() if dense is None else dense.time(),
            dense_work=self.selection[DENSE].time() if DENSE in self.selection else AffineTime(),
            **options,
        )


def _shortened(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"
