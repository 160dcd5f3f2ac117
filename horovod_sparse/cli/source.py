"""Where a prediction's times come from: a measured profile, or formulas for a network."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from horovod_sparse.cli.options import bits_per_second, num_ranks, time
from horovod_sparse.cost import AlphaBeta, Fit, Profile, assumed_profile, profile_at
from horovod_sparse.cost.sizes import TYPICAL_SELECTION
from horovod_sparse.errors import ArgumentError, ProfileMismatchError

#: what stands in for a network that nobody named
BANDWIDTH, LATENCY, RANKS = 1e9, 50e-6, 8


@dataclass(frozen=True)
class Source:
    """What predictions stand on.

    Attributes:
        profile: for the number of ranks that is planned for.
        measured: the profile as it was read; None with formulas.
        words: what it is, for a table's title.
        warnings: what makes predictions worse.
    """

    profile: Profile
    measured: Profile | None
    words: str
    warnings: tuple[str, ...] = ()


def add_network(parser: argparse.ArgumentParser) -> None:
    """Adds what describes a network where no profile does."""
    add = parser.add_argument
    add("--bandwidth", type=bits_per_second, help="of a network that was not measured (default 1gbit)")
    add("--latency", type=time, help="of one of its messages (default 50us)")
    fixed, slope = TYPICAL_SELECTION.fixed_seconds * 1e3, TYPICAL_SELECTION.seconds_per_unit * 1e9
    add(
        "--selection-fixed",
        type=time,
        help=f"selection of a bucket, however small, where it was not measured (default {fixed:g}ms)",
    )
    text = f"selection of an element of it (default {slope:g}ns)"
    add("--selection-per-element", type=time, help=text)


def network_from(options: argparse.Namespace) -> AlphaBeta:
    """The network that the arguments of `add_network` describe."""
    return AlphaBeta(options.latency or LATENCY, 8.0 / (options.bandwidth or BANDWIDTH))


def selection_from(options: argparse.Namespace) -> Fit:
    """Selection time that they describe."""
    return Fit(
        options.selection_fixed or TYPICAL_SELECTION.fixed_seconds,
        options.selection_per_element or TYPICAL_SELECTION.seconds_per_unit,
    )


def source_of(options: argparse.Namespace) -> Source:
    """The profile of `--profile`, for `--ranks`; or formulas for `--bandwidth` and `--latency`.

    Raises:
        ProfileMismatchError: if the profile cannot be applied.
        ArgumentError: if both a profile and a network are given.
    """
    given = [
        name
        for name in ("bandwidth", "latency", "selection_fixed", "selection_per_element")
        if getattr(options, name) is not None
    ]
    if options.profile is None:
        network, size = network_from(options), options.ranks or RANKS
        words = f"{size} ranks, {8e-9 / network.beta_seconds:g} Gbit/s, "
        words += f"{network.alpha_seconds * 1e6:g} us latency, by formulas"
        return Source(assumed_profile(network, size, selection=selection_from(options)), None, words)
    if given:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise ArgumentError(flags, "given beside --profile", "one of the two: the profile says this itself")
    measured = Profile.load(options.profile)
    size = options.ranks or measured.size
    if size < 2:
        raise ProfileMismatchError(
            "the profile was measured with 1 rank, which communicates nothing: give --profile one of "
            "2 ranks or more"
        )
    framework = getattr(options, "framework", None) or measured.framework
    warnings = tuple(measured.check(size=size, framework=framework))
    words = f"{size} ranks, measured ({measured.framework}, {measured.controller}, {measured.device}, "
    words += f"cycle {measured.cycle_seconds * 1e3:g} ms"
    words += ")" if size == measured.size else f", with {measured.size} ranks)"
    return Source(profile_at(measured, size), measured, words, warnings)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Adds what says where times come from."""
    add = parser.add_argument
    add("--profile", metavar="FILE", help="what horovod-sparse calibrate wrote; without it formulas are used")
    add("--ranks", type=num_ranks, metavar="P", help="default: the profile's, or 8")
    add_network(parser)
