"""A profile: the measurements of one cluster, in one JSON file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from horovod_sparse.checks import check_count, check_seconds
from horovod_sparse.errors import ArgumentError, HorovodSparseError, ProfileMismatchError
from horovod_sparse.planning.cost_model import AffineTime, CostModel, Fit, communication_of
from horovod_sparse.plans.dense import SELECTED_BYTES, VALUE_BYTES, received_share
from horovod_sparse.plans.network import COLLECTIVES
from horovod_sparse.sparsifiers import Sparsifier

#: stands for a sparsifier's name in `Profile.selection`, for the work on parameters that stay dense
DENSE = "dense"
PROFILE_VERSION = 3

#: whether gradients are summed densely within hosts first ("host"), or all ranks are equal
Levels: TypeAlias = Literal["flat", "host"]


@dataclass(frozen=True)
class Profile:
    """Measurements of one cluster, as a value. Host names are not part of it.

    Attributes:
        size: P, number of ranks it was measured with.
        framework: "torch" or "tensorflow".
        controller: Horovod's, "gloo" or "mpi", or the backend of torch.distributed.
        cycle_seconds: Horovod's cycle time during the measurement (HOROVOD_CYCLE_TIME).
        collectives: time by the bytes that a rank puts in; "allgather", "allreduce", "exchange",
            "broadcast", "alltoall".
        selection: time of fold and selection by n and k, by the sparsifier's name; "dense": of packing and
            unpacking a parameter that stays dense, by n.
        decoding: time of decoding and applying by n and by received elements, by the sparsifier's name.
        backward_seconds: of every parameter, in the model's order, where a model was measured.
        forward_seconds: of the rest of its step before backward.
        device: what it was measured on, in words ("cpu", the name of a GPU).
        per_host: L, ranks on every host, where two levels were measured.
        levels: collectives by level, then: "host" (among the ranks of a host) and "across" (among one of each
            host, all such groups at a time), by the bytes that a rank puts in.

    Example:
        >>> profile = Profile(4, "torch", "gloo", 0.001, {"allgather": Fit(1e-3, 1e-8)})
        >>> Profile.from_json(profile.to_json()) == profile
        True
    """

    size: int
    framework: str
    controller: str
    cycle_seconds: float
    collectives: Mapping[str, Fit] = field(default_factory=dict)
    selection: Mapping[str, Fit] = field(default_factory=dict)
    decoding: Mapping[str, Fit] = field(default_factory=dict)
    backward_seconds: Mapping[str, float] = field(default_factory=dict)
    forward_seconds: float = 0.0
    device: str = "cpu"
    per_host: int = 1
    levels: Mapping[str, Mapping[str, Fit]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_count("size", self.size, "a number of ranks, 1 or more")
        check_count("per_host", self.per_host, "a number of ranks, 1 or more")
        if self.levels and (self.size % self.per_host or set(self.levels) != {"host", "across"}):
            given = (sorted(self.levels), self.per_host)
            raise ArgumentError(
                "levels and per_host", given, f"'host' and 'across', and hosts of {self.size} ranks"
            )
        object.__setattr__(self, "size", int(self.size))  # JSON knows no whole number of NumPy's
        if unknown := sorted(set(self.collectives) - set(COLLECTIVES.values())):
            raise ArgumentError("collectives", unknown, f"only {sorted(COLLECTIVES.values())}")
        for name, seconds in self.backward_seconds.items():
            check_seconds(f"backward_seconds[{name!r}]", seconds, "seconds, 0 or more")

    def to_json(self) -> str:
        """The profile as text; equal profiles give equal text."""
        saved = {"version": PROFILE_VERSION, **dataclasses.asdict(self)}
        # the model's order is kept by a list: sorted keys would lose it
        saved["backward_seconds"] = [list(item) for item in self.backward_seconds.items()]
        if not self.levels:  # one level is what a reader takes for granted
            del saved["levels"], saved["per_host"]
        return json.dumps(saved, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that `to_json` wrote; a `ProfileMismatchError` if it is not, or of another version."""
        try:
            saved: dict[str, Any] = dict(json.loads(text))
            version = saved.pop("version")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProfileMismatchError("this is not a profile: no JSON object with a version") from error
        if version != PROFILE_VERSION:
            raise ProfileMismatchError(
                f"the profile is of version {version}, this is {PROFILE_VERSION}: measure again"
            )
        try:
            saved["backward_seconds"] = dict(saved["backward_seconds"])
            for key in ("collectives", "selection", "decoding"):
                saved[key] = {name: Fit(**fit) for name, fit in saved[key].items()}
            saved["levels"] = {
                level: {name: Fit(**fit) for name, fit in fits.items()}
                for level, fits in saved.get("levels", {}).items()
            }
            return cls(**saved)
        except (ValueError, TypeError, KeyError, AttributeError, HorovodSparseError) as error:
            raise ProfileMismatchError(f"the profile is damaged: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the profile to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a profile from a file; a `ProfileMismatchError` names the file, if it holds none."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (ProfileMismatchError, UnicodeDecodeError) as error:
            raise ProfileMismatchError(f"{path}: {error}") from error

    def digest(self) -> str:
        """Short text that differs where profiles differ; ranks compare it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def check(
        self, *, size: int, framework: str, controller: str | None = None, cycle_seconds: float | None = None
    ) -> list[str]:
        """Returns what differs between the profile and the cluster that it is applied to.

        Args:
            size: P, here.
            framework: here.
            controller: here; not compared if left out.
            cycle_seconds: here; not compared if left out.

        Returns:
            One sentence for each difference that makes predictions worse: to be logged as warnings.

        Raises:
            ProfileMismatchError: if it cannot be applied at all.
        """
        if self.size == 1 and size > 1:
            raise ProfileMismatchError(
                f"the profile was measured with 1 rank, where nothing is communicated; here are {size}: "
                "run horovod-sparse calibrate with as many ranks"
            )
        if size > 1 and not self.collectives:
            raise ProfileMismatchError("the profile holds no collectives: run horovod-sparse calibrate")
        differences = []
        if size != self.size:
            differences.append(f"{self.size} ranks, here {size}: times of collectives depend on it")
        if framework != self.framework:
            differences.append(
                f"framework {self.framework}, here {framework}: selection may take another time"
            )
        if controller is not None and controller != self.controller:
            differences.append(f"controller {self.controller}, here {controller}: latency differs")
        if cycle_seconds is not None and not math.isclose(cycle_seconds, self.cycle_seconds, rel_tol=0.01):
            differences.append(
                f"a cycle time of {self.cycle_seconds * 1e3:g} ms, here {cycle_seconds * 1e3:g} ms: "
                "it is part of alpha"
            )
        return [f"the profile was measured with {difference}" for difference in differences]

    def backward_of(self, names: Sequence[str]) -> tuple[float, ...]:
        """Backward times of these parameters; a `ProfileMismatchError` if some are missing, or all are 0."""
        if missing := [name for name in names if name not in self.backward_seconds]:
            raise ProfileMismatchError(
                f"the profile has no backward time for {_few(missing)}: is it of another model?"
            )
        times = tuple(float(self.backward_seconds[name]) for name in names)
        if names and not any(times):
            raise ProfileMismatchError("the profile says that backward takes no time: measure again")
        return times

    @property
    def num_hosts(self) -> int:
        """N, where two levels were measured; P otherwise."""
        return self.size // self.per_host

    def cost(
        self, sparsifier: Sparsifier, size: int | None = None, *, levels: Levels = "flat", **options: Any
    ) -> CostModel:
        """The cost model of a sparsifier on this cluster.

        Decoding counts as selection: the thread that runs backward does it, in some later hook, or in the
        end. (Only in the end does it come after communication, and then the sum of both is the same.)

        With two levels a rank folds and selects from n / L elements, and decodes twice: the sum of its shard,
        and that of all. Its messages go to single ranks, and none is sent together with another bucket's.

        Args:
            sparsifier: which, at which density.
            size: P where it is applied; as measured if left out.
            levels: "host" where gradients are summed within hosts first.
            **options: further fields of `CostModel` (`fuse_sparse`, which is False with two levels, ...).

        Raises:
            ProfileMismatchError: if what the sparsifier needs was not measured. A rank alone sends nothing,
                and needs no collective.
        """
        size = self.size if size is None else size
        among, per_host = (size, 1) if levels == "flat" else (size // self.per_host, self.per_host)
        selection = self.work(sparsifier, among, per_host)
        times = self._times(sparsifier, among, self.collectives if levels == "flat" else None)
        communication = communication_of(sparsifier, among, times).per(1 / per_host)
        if levels == "host":
            inside = self.levels["host"]
            communication += inside["reducescatter"].time().per(VALUE_BYTES)
            received = received_share(sparsifier, among)
            communication += inside["allgather"].time().per(SELECTED_BYTES * received / per_host)
            options = {**options, "fuse_sparse": False}
        dense = self.collectives.get("allreduce") if size > 1 else None
        return CostModel(
            selection=selection,
            communication=communication,
            dense=AffineTime() if dense is None else dense.time(),
            dense_work=self.selection[DENSE].time() if DENSE in self.selection else AffineTime(),
            **options,
        )

    def work(self, sparsifier: Sparsifier, size: int, per_host: int = 1) -> AffineTime:
        """Returns the time that a rank works for a bucket, by its n: fold, selection and decoding.

        Where `per_host` ranks share it, each selects from n / L, and decodes its sum, and that of all.
        """
        name = sparsifier.name
        if name not in self.selection:
            raise ProfileMismatchError(
                f"the profile has no selection time for {name}, only for {_few(sorted(self.selection))}: "
                f"run horovod-sparse calibrate with it"
            )
        seconds = self.selection[name].time(sparsifier.density).per(1 / per_host)
        if name in self.decoding:
            decoding = self.decoding[name].time(received_share(sparsifier, size))
            seconds += decoding if per_host == 1 else decoding + decoding.per(1 / per_host)
        return seconds

    def _times(
        self, sparsifier: Sparsifier, size: int, collectives: Mapping[str, Fit] | None
    ) -> dict[str, AffineTime]:
        """Returns the times of collectives among `size` ranks; of those between hosts for None."""
        if collectives is None:
            if not self.levels:
                raise ProfileMismatchError(
                    "the profile was measured with one level: run horovod-sparse calibrate with several "
                    "ranks on every host"
                )
            collectives = self.levels["across"]
        needed = {COLLECTIVES[kind] for kind in sparsifier.rounds(size)}
        if collectives is self.collectives:
            needed |= {"allreduce"}  # of what stays dense
        if size == 1:
            return dict.fromkeys(needed, AffineTime())
        if missing := sorted(needed - set(collectives)):
            raise ProfileMismatchError(
                f"{sparsifier.name} needs {_few(missing)}, which the profile does not hold"
            )
        return {kind: fit.time() for kind, fit in collectives.items()}


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"
