"""A profile: what was measured on a cluster, in one JSON file, or worked out for another size or network."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovod_sparse.checks import check_count, check_seconds
from horovod_sparse.cost.fitting import Fit
from horovod_sparse.cost.model import COLLECTIVES, CostModel, communication_of
from horovod_sparse.cost.times import AffineTime, AlphaBeta
from horovod_sparse.errors import ArgumentError, HorovodSparseError, ProfileMismatchError
from horovod_sparse.sparsifiers import ALGORITHMS, Sparsifier

#: stands for a sparsifier's name in `Profile.selection`, for the work on parameters that stay dense
DENSE = "dense"
PROFILE_VERSION = 1


@dataclass(frozen=True)
class Profile:
    """Measurements of one cluster, as a value. Host names are not part of it.

    Attributes:
        size: P, number of ranks it was measured with.
        framework: "torch" or "tensorflow".
        controller: Horovod's: "gloo" or "mpi".
        cycle_seconds: Horovod's cycle time during the measurement (HOROVOD_CYCLE_TIME).
        collectives: time by the bytes that a rank puts in; "allgather", "allreduce", "exchange",
            "broadcast", "alltoall".
        selection: time of fold and selection by n and k, by the sparsifier's name; "dense": of packing and
            unpacking a parameter that stays dense, by n.
        decoding: time of decoding and applying by n and by received elements, by the sparsifier's name.
        backward_seconds: of every parameter, in the model's order, where a model was measured.
        forward_seconds: of the rest of its step before backward.
        device: what it was measured on, in words ("cpu", the name of a GPU).

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

    def __post_init__(self) -> None:
        check_count("size", self.size, "a number of ranks, 1 or more")
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
        return json.dumps(saved, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that `to_json` wrote.

        Raises:
            ProfileMismatchError: if it is something else, or of another version.
        """
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
            return cls(**saved)
        except (ValueError, TypeError, KeyError, AttributeError, HorovodSparseError) as error:
            raise ProfileMismatchError(f"the profile is damaged: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the profile to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a profile from a file.

        Raises:
            ProfileMismatchError: naming the file, if it holds no profile.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (ProfileMismatchError, UnicodeDecodeError) as error:
            raise ProfileMismatchError(f"{path}: {error}") from error

    def digest(self) -> str:
        """Short text that differs where profiles differ; ranks compare it (`check_same_profile`)."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def check(
        self, *, size: int, framework: str, controller: str | None = None, cycle_seconds: float | None = None
    ) -> list[str]:
        """What differs from where the profile shall be applied.

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
        """Backward times of these parameters.

        Raises:
            ProfileMismatchError: if parameters are missing, or all times are 0.
        """
        if missing := [name for name in names if name not in self.backward_seconds]:
            raise ProfileMismatchError(
                f"the profile has no backward time for {_few(missing)}: is it of another model?"
            )
        times = tuple(float(self.backward_seconds[name]) for name in names)
        if names and not any(times):
            raise ProfileMismatchError("the profile says that backward takes no time: measure again")
        return times

    def cost(self, sparsifier: Sparsifier, size: int | None = None, **options: Any) -> CostModel:
        """The cost model of a sparsifier on this cluster.

        Decoding counts as selection: the thread that runs backward does it, in some later hook, or in the
        end. (Only in the end does it come after communication, and then the sum of both is the same.)

        Args:
            sparsifier: which, at which density.
            size: P where it is applied; as measured if left out.
            **options: further fields of `CostModel` (`fuse_sparse`, ...).

        Raises:
            ProfileMismatchError: if what the sparsifier needs was not measured. A rank alone sends nothing,
                and needs no collective.
        """
        size = self.size if size is None else size
        name = sparsifier.name
        if name not in self.selection:
            raise ProfileMismatchError(
                f"the profile has no selection time for {name}, only for {_few(sorted(self.selection))}: "
                f"run horovod-sparse calibrate with it"
            )
        needed = {COLLECTIVES[kind] for kind in sparsifier.rounds(size)} | {"allreduce"}
        times = {kind: fit.time() for kind, fit in self.collectives.items()}
        if size == 1:
            times = dict.fromkeys(needed, AffineTime())
        if missing := sorted(needed - set(times)):
            raise ProfileMismatchError(f"{name} needs {_few(missing)}, which the profile does not hold")
        communication = communication_of(sparsifier, size, times)
        selection = self.selection[name].time(sparsifier.density)
        if name in self.decoding:
            per_rank = sparsifier.density_scope == "per rank"
            received = min(1.0, sparsifier.density) * (size if per_rank else 1)
            selection += self.decoding[name].time(received)
        return CostModel(
            selection=selection,
            communication=communication,
            dense=times.get("allreduce", AffineTime()),
            dense_work=self.selection[DENSE].time() if DENSE in self.selection else AffineTime(),
            **options,
        )


def check_same_profile(digests: Sequence[str]) -> None:
    """Refuses ranks that loaded different profiles: they would make different plans.

    Args:
        digests: of all ranks, gathered.

    Raises:
        ProfileMismatchError: naming the ranks that differ from rank 0.

    Example:
        >>> check_same_profile(["a", "a", "b"])
        Traceback (most recent call last):
        horovod_sparse.errors.ProfileMismatchError: ranks 2 loaded another profile than rank 0 (b, not a)...
    """
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise ProfileMismatchError(
            f"ranks {_few([str(rank) for rank in others])} loaded another profile than rank 0 "
            f"({digests[others[0]]}, not {digests[0]}): give all ranks the same file"
        )


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"


#: Selection of a rank that nobody has measured: a fold and exact top-k of float32 on one core of 2024,
#: about 0.1 ms for a bucket and 0.3 ns for an element (docs/performance.md).
TYPICAL_SELECTION = Fit(1e-4, 3e-10)


def num_rounds(kind: str, size: int) -> int:
    """Messages one behind the other in a collective, by its usual algorithm.

    Example:
        >>> [num_rounds(kind, 8) for kind in ("allgather", "allreduce", "exchange")]
        [3, 6, 1]
    """
    doublings = math.ceil(math.log2(size)) if size > 1 else 0
    rounds = {
        "allgather": doublings,
        "allreduce": 2 * doublings,
        "broadcast": doublings,
        "alltoall": size - 1,
    }
    return rounds.get(kind, min(1, doublings))


def share_of_bytes(kind: str, size: int) -> float:
    """Bytes that arrive at a rank for every byte that a rank puts in.

    Example:
        >>> [share_of_bytes(kind, 8) for kind in ("allgather", "allreduce", "exchange")]
        [7.0, 1.75, 1.0]
    """
    if kind == "allgather":
        return float(size - 1)
    return 2.0 * (size - 1) / size if kind == "allreduce" else float(size > 1)


def profile_at(profile: Profile, size: int) -> Profile:
    """What a profile says about another number of ranks on a network of the same kind.

    ``alpha(P) = w + (alpha - w) rounds(P) / rounds(P0)``, ``beta(P) = beta share(P) / share(P0)``

    with w, the wait for Horovod's next cycle, paid once whatever P; it is taken to be half of the cycle
    time, as measurements begin anywhere in a cycle, or all of alpha where that is less. The formulas know
    neither contention nor the slowest of many ranks, so what they say is the least to be expected.
    Selection does not depend on P.

    Args:
        profile: measured with P0 ranks, 2 or more.
        size: P.

    Raises:
        ProfileMismatchError: if it was measured with one rank, where there is nothing to go by.
        ArgumentError: if P is below 1.

    Example:
        >>> four = Profile(4, "torch", "gloo", 1e-3, {"allgather": Fit(2e-3, 3e-9)})
        >>> sixteen = profile_at(four, 16).collectives["allgather"]
        >>> round(sixteen.fixed_seconds, 6), round(sixteen.seconds_per_unit, 12)
        (0.0035, 1.5e-08)
    """
    check_count("size", size, "a number of ranks, 1 or more")
    if size == profile.size:
        return profile
    if profile.size == 1:
        raise ProfileMismatchError(
            f"the profile was measured with 1 rank, which says nothing about {size}: "
            "run horovod-sparse calibrate with 2 or more"
        )
    scaled = {
        kind: _scaled(kind, fit, profile.size, size, profile.cycle_seconds)
        for kind, fit in profile.collectives.items()
    }
    return dataclasses.replace(profile, size=size, collectives=scaled)


def _scaled(kind: str, fit: Fit, old: int, new: int, cycle_seconds: float) -> Fit:
    waiting = min(cycle_seconds / 2, fit.fixed_seconds)
    rounds = num_rounds(kind, new) / num_rounds(kind, old)
    return dataclasses.replace(
        fit,
        fixed_seconds=waiting + (fit.fixed_seconds - waiting) * rounds,
        seconds_per_unit=fit.seconds_per_unit * share_of_bytes(kind, new) / share_of_bytes(kind, old),
    )


def network_of(profile: Profile) -> AlphaBeta:
    """Latency of a message and time of a byte, as the profile's allgather shows them.

    Args:
        profile: of 2 ranks or more.

    Raises:
        ProfileMismatchError: if it holds no allgather of 2 ranks or more.

    Example:
        >>> network_of(Profile(4, "torch", "gloo", 1e-3, {"allgather": Fit(2e-3, 3e-9)}))
        AlphaBeta(alpha_seconds=0.001, beta_seconds=1e-09)
    """
    if profile.size < 2 or "allgather" not in profile.collectives:
        raise ProfileMismatchError("the profile holds no allgather of 2 ranks or more")
    fit = profile.collectives["allgather"]
    rounds, share = num_rounds("allgather", profile.size), share_of_bytes("allgather", profile.size)
    return AlphaBeta(fit.fixed_seconds / rounds, fit.seconds_per_unit / share)


def assumed_profile(
    network: AlphaBeta,
    size: int,
    *,
    selection: Fit = TYPICAL_SELECTION,
    decoding: Mapping[str, Fit] | None = None,
) -> Profile:
    """A profile by formulas: where nothing was measured, or a cluster is only thought of.

    ``T = rounds(P) alpha + share(P) bytes beta`` for every collective

    Args:
        network: alpha and beta.
        size: P, 2 or more.
        selection: of every sparsifier.
        decoding: by the sparsifier's name; none if left out.

    Raises:
        ArgumentError: if P is below 2: one rank communicates nothing.

    Example:
        >>> profile = assumed_profile(AlphaBeta(1e-4, 8e-9), 4)
        >>> round(profile.collectives["allreduce"].fixed_seconds, 6)
        0.0004
    """
    check_count("size", size, "a number of ranks, 2 or more", low=2)
    alpha, beta = network.alpha_seconds, network.beta_seconds
    collectives = {
        kind: Fit(num_rounds(kind, size) * alpha, share_of_bytes(kind, size) * beta)
        for kind in COLLECTIVES.values()
    }
    return Profile(
        size,
        "formulas",
        "formulas",
        0.0,
        collectives,
        dict.fromkeys(ALGORITHMS, selection),
        decoding or {},
    )
