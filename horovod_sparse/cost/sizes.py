"""Profiles that were not measured as they are: of another number of ranks, or by formulas alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from horovod_sparse.checks import check_count
from horovod_sparse.cost.fitting import Fit
from horovod_sparse.cost.model import COLLECTIVES
from horovod_sparse.cost.profile import Profile
from horovod_sparse.cost.times import AlphaBeta
from horovod_sparse.errors import ProfileMismatchError
from horovod_sparse.sparsifiers import ALGORITHMS

__all__ = ["assumed_profile", "network_of", "num_rounds", "profile_at", "share_of_bytes"]

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
