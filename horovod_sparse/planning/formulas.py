"""Profiles by formulas: for another number of ranks, for a network that was not measured, for two levels."""

from __future__ import annotations

import dataclasses

from horovod_sparse.checks import check_count
from horovod_sparse.collectives import Level
from horovod_sparse.errors import ArgumentError, ProfileMismatchError
from horovod_sparse.planning.cost_model import Fit
from horovod_sparse.planning.profile import ALLREDUCE, Profile
from horovod_sparse.plans.dense import ELEMENT_SECONDS, SELECTION_SECONDS
from horovod_sparse.plans.network import (
    COLLECTIVES,
    HOST_NETWORK,
    AlphaBeta,
    collective_seconds,
    num_rounds,
    share_of_bytes,
)
from horovod_sparse.sparsifiers import ALGORITHMS

#: of a rank that nobody has measured
TYPICAL_SELECTION = Fit(SELECTION_SECONDS, ELEMENT_SECONDS)
#: stands for framework and controller where nothing was measured
_FORMULAS = "formulas"


def profile_at(profile: Profile, size: int) -> Profile:
    """What a profile says about another number of ranks on a network of the same kind.

    ``alpha(P) = w + (alpha - w) rounds(P) / rounds(P0)``, ``beta(P) = beta share(P) / share(P0)``

    with w, the wait for Horovod's next cycle, paid once whatever P; it is taken to be half of the cycle
    time, as measurements begin anywhere in a cycle, or all of alpha where that is less. The formulas know
    neither contention nor the slowest of many ranks, so what they say is the least to be expected.
    Selection does not depend on P; what quantizers decode, n elements of every rank, does. Where two levels
    were measured, there are more hosts of as many ranks; the levels are left out where P is no multiple of
    that.

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
    cycle, hosts = profile.cycle_seconds, size // profile.per_host
    scaled = {
        kind: _scaled(kind, fit, profile.size, size, cycle) for kind, fit in profile.collectives.items()
    }
    training = {
        name: _scaled(name, fit, profile.size, size, cycle) if name == ALLREDUCE else fit
        for name, fit in profile.training.items()
    }
    decoding = {
        name: dataclasses.replace(fit, seconds_per_unit=fit.seconds_per_unit * size / profile.size)
        if name in ALGORITHMS and not ALGORITHMS[name].has_density
        else fit
        for name, fit in profile.decoding.items()
    }
    changed = dataclasses.replace(
        profile, size=size, collectives=scaled, decoding=decoding, levels={}, per_host=1, training=training
    )
    if not profile.levels or size % profile.per_host or profile.num_hosts == 1:
        return changed
    across = {
        kind: _scaled(kind, fit, profile.num_hosts, hosts, cycle)
        for kind, fit in profile.levels["across"].items()
    }
    levels = {"host": profile.levels["host"], "across": across}
    return dataclasses.replace(changed, levels=levels, per_host=profile.per_host)


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
    per_host: int = 1,
    host_network: AlphaBeta = HOST_NETWORK,
    cycle_seconds: float = 0.0,
) -> Profile:
    """A profile by formulas: where nothing was measured, or a cluster is only thought of.

    ``T = rounds(P) alpha + share(P) bytes beta`` for every collective

    Where hosts have L ranks each, these share the host's network card: among one rank of every host, L such
    groups communicate at a time.

    Args:
        network: alpha and beta, of a host.
        size: P, 2 or more.
        selection: of every sparsifier.
        per_host: L; P is a multiple of it.
        host_network: alpha and beta between the ranks of a host.
        cycle_seconds: of Horovod: each collective waits for half of one.

    Raises:
        ArgumentError: if P is below 2: one rank communicates nothing. Or if hosts are unequal.

    Example:
        >>> profile = assumed_profile(AlphaBeta(1e-4, 8e-9), 4)
        >>> round(profile.collectives["allreduce"].fixed_seconds, 6)
        0.0004
        >>> profile = assumed_profile(AlphaBeta(1e-4, 8e-9), 8, per_host=4)
        >>> profile.num_hosts, sorted(profile.levels["host"])
        (2, ['allgather', 'allreduce', 'reducescatter'])
    """
    check_count("size", size, "a number of ranks, 2 or more", low=2)
    check_count("per_host", per_host, "a number of ranks, 1 or more")
    if size % per_host:
        raise ArgumentError("per_host", per_host, f"a number that {size} ranks are a multiple of")
    num_hosts = size // per_host

    def fit(kind: str, level: Level, among: int) -> Fit:
        fixed, each = collective_seconds(kind, level, network, num_hosts, per_host, host_network)
        return Fit(fixed + (cycle_seconds / 2 if among > 1 else 0.0), each)

    kinds = [kind for kind in COLLECTIVES.values() if kind != "reducescatter"]
    levels = {}
    if per_host > 1:
        inside = ("allgather", "allreduce", "reducescatter")
        levels = {
            "host": {kind: fit(kind, "host", per_host) for kind in inside},
            "across": {kind: fit(kind, "across", num_hosts) for kind in kinds},
        }
    return Profile(
        size,
        _FORMULAS,
        _FORMULAS,
        cycle_seconds,
        {kind: fit(kind, "all", size) for kind in kinds},
        dict.fromkeys(ALGORITHMS, selection),
        {},
        per_host=per_host,
        levels=levels,
    )


def with_levels(profile: Profile, per_host: int, inside: AlphaBeta = HOST_NETWORK) -> Profile:
    """A profile of two levels; by formulas from its network, where it was measured with one.

    Args:
        profile: of all ranks.
        per_host: L.
        inside: alpha and beta within a host, where they were not measured.

    Raises:
        ArgumentError: if P is no multiple of L.
    """
    if per_host == 1 or (profile.levels and profile.per_host == per_host):
        return profile
    assumed = assumed_profile(
        network_of(profile),
        profile.size,
        per_host=per_host,
        host_network=inside,
        cycle_seconds=profile.cycle_seconds,
    )
    return dataclasses.replace(profile, levels=assumed.levels, per_host=per_host)
