"""Arguments that subcommands share: quantities, sparsifiers, ways to merge, a profile or a network."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from horovod_sparse.checks import whole_number
from horovod_sparse.errors import ArgumentError, HorovodSparseError, ProfileMismatchError
from horovod_sparse.feedback import AutoDensity, Recipe, parse_recipe
from horovod_sparse.feedback.recipe import parse_arguments, parse_value
from horovod_sparse.planning.formulas import TYPICAL_SELECTION, assumed_profile, profile_at, with_levels
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.request import STRATEGIES, strategy_named
from horovod_sparse.planning.selection import TensorSelection, min_elements
from horovod_sparse.planning.strategies import Strategy, fixed
from horovod_sparse.plans.network import HOST_NETWORK, AlphaBeta
from horovod_sparse.plans.plan import Plan
from horovod_sparse.sparsifiers import ALGORITHMS
from horovod_sparse.sparsifiers.base import value_text

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BITS = {
    f"{prefix}{word}": 10.0**power
    for word in ("bit", "bps")
    for prefix, power in (("", 0), ("k", 3), ("m", 6), ("g", 9), ("t", 12))
}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def _quantity(text: str, units: dict[str, float], what: str) -> float:
    """A number and its unit: which of them is meant is not guessed."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)(?:/s)?\s*", text.lower())
    try:
        value = float(match[1]) * units[match[2]] if match else -1.0
    except (KeyError, ValueError):
        value = -1.0
    if not 0.0 < value < math.inf:
        wrong = "has no unit" if match and not match[2] and "" not in units else "is no number above 0"
        raise argparse.ArgumentTypeError(f"{text!r} {wrong}, with {what}")
    return value


def time(text: str) -> float:
    return _quantity(text, _SECONDS, "s, ms, us or ns behind it, as in 50us")


def bits_per_second(text: str) -> float:
    if re.search(r"[0-9]\s*[kMGTmgt]?B", text):
        raise argparse.ArgumentTypeError(f"{text!r} is in bytes: write bits, as in 25gbit or 25Gbps")
    return _quantity(text, _BITS, "kbit, mbit, gbit or tbit behind it, as in 25gbit or 25Gbps")


def num_parameters(text: str) -> float:
    return _quantity(text, _COUNTS, "k, M or B behind it, as in 124M, or nothing")


def density(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no kept fraction in (0, 1]")
    return value


def density_or_auto(text: str) -> float | AutoDensity:
    """A kept fraction in (0, 1], or ``auto``, or ``auto(least=0.001,most=0.1)``."""
    if not text.startswith(AutoDensity.text_name):
        return density(text)
    try:
        made = AutoDensity() if text == AutoDensity.text_name else parse_value("density", text)
    except HorovodSparseError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not isinstance(made, AutoDensity):
        raise argparse.ArgumentTypeError(f"{text!r} is no auto(least=0.001,most=0.1)")
    return made


def num_ranks(text: str) -> int:
    """A number of ranks from 2: one alone communicates nothing."""
    number = whole_number(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks, 2 or more")
    return number


def several(read: Callable[[str], int]) -> Callable[[str], list[int]]:
    """A reader of several values with commas between."""
    return lambda text: [read(part) for part in text.split(",")]


def read_recipe(text: str, density: float | AutoDensity | None) -> Recipe:
    """A sparsifier as the user writes it, with the density of the command line where it names none."""
    name, _, arguments = text.partition(":")
    if name in ALGORITHMS and not ALGORITHMS[name].has_density:
        density = None
    if density is not None and "density" not in parse_arguments(arguments):
        arguments = f"density={value_text(density)}" + ("," if arguments else "") + arguments
    return parse_recipe(f"{name}:{arguments}")


def read_merging(text: str) -> Strategy | Plan:
    """A way to merge: a strategy's name, `fixed(num_elements=...)`, `fixed(bytes=...)`, or a plan's file."""
    if text.endswith(".json"):
        try:
            return Plan.from_dict(json.loads(Path(text).read_text(encoding="utf-8")))
        except (ValueError, TypeError, AttributeError, HorovodSparseError) as error:
            raise ArgumentError("--merging", text, f"a file that --save-plan wrote ({error})") from error
    if match := re.fullmatch(r"fixed[(:](.*?)\)?", text):
        arguments = parse_arguments(match[1])
        if set(arguments) - {"num_elements", "bytes"}:
            raise ArgumentError("--merging", text, "fixed(num_elements=8192) or fixed(bytes=4194304)")
        return fixed(**arguments)
    if text not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise ArgumentError(
            "--merging", text, f"{known}, fixed(num_elements=...), fixed(bytes=...) or a file"
        )
    return strategy_named(text)


def read_tensor_selection(text: str) -> TensorSelection:
    """What stays dense: ``all`` (nothing does), ``cost``, or ``min_elements(...)``."""
    if match := re.fullmatch(r"min_elements[(:]([0-9]+)\)?", text):
        return min_elements(int(match[1]))
    if text not in ("all", "cost"):
        raise ArgumentError("--tensor-selection", text, "all, cost or min_elements(1024)")
    return text


#: what stands in for a network that nobody named
BANDWIDTH, LATENCY, RANKS = 1e9, 50e-6, 8


@dataclass(frozen=True)
class Source:
    """A profile for so many ranks, as it was read (None with formulas), in words, what is assumed, wrong."""

    profile: Profile
    measured: Profile | None
    words: str
    assumed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def network_from(options: argparse.Namespace) -> AlphaBeta:
    return AlphaBeta(options.latency or LATENCY, 8.0 / (options.bandwidth or BANDWIDTH))


def count(text: str) -> int:
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 1 or more")
    return number


def host_network_from(options: argparse.Namespace) -> AlphaBeta:
    beta = HOST_NETWORK.beta_seconds if options.host_bandwidth is None else 8.0 / options.host_bandwidth
    return AlphaBeta(options.host_latency or HOST_NETWORK.alpha_seconds, beta)


def source_of(options: argparse.Namespace, size: int | None) -> Source:
    """The profile of `--profile`, for `--ranks`; or formulas for `--bandwidth` and `--latency`."""
    given = [name for name in ("bandwidth", "latency") if getattr(options, name) is not None]
    per_host = options.per_host
    inside = HOST_NETWORK if per_host is None else host_network_from(options)
    if options.profile is None:
        network, size = network_from(options), size or RANKS
        words = f"{_ranks(size, per_host)}, {8e-9 / network.beta_seconds:g} Gbit/s, "
        words += f"{network.alpha_seconds * 1e6:g} us latency, by formulas"
        fit = TYPICAL_SELECTION
        made = assumed_profile(network, size, per_host=per_host or 1, host_network=inside)
        spent = f"{fit.fixed_seconds * 1e3:g} ms a bucket and {fit.seconds_per_unit * 1e9:g} ns an element"
        assumed = [f"selection and decoding {spent} (one core)", "no cycle of Horovod's"]
        if made.per_host > 1:
            gigabits = 8e-9 / inside.beta_seconds
            assumed.append(f"{gigabits:g} Gbit/s and {inside.alpha_seconds * 1e6:g} us within a host")
        return Source(made, None, words, tuple(assumed))
    if given:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise ArgumentError(flags, "given beside --profile", "one of the two: the profile says this itself")
    measured = Profile.load(options.profile)
    size = size or measured.size
    if size < 2:
        raise ProfileMismatchError(
            "the profile was measured with 1 rank, which communicates nothing: give --profile one of "
            "2 ranks or more"
        )
    within = [name for name in ("host_bandwidth", "host_latency") if getattr(options, name) is not None]
    if within and measured.levels and per_host in (None, measured.per_host):
        flags = " and ".join("--" + name.replace("_", "-") for name in within)
        raise ArgumentError(flags, "given beside --profile", "left out: the profile says this itself")
    warnings = tuple(measured.check(size=size, framework=measured.framework))
    usable = profile_at(measured, size)
    usable = usable if per_host is None else with_levels(usable, per_host, inside)
    words = f"{_ranks(size, usable.per_host)}, measured ({measured.framework}, {measured.controller}, "
    words += f"{measured.device}, "
    words += f"cycle {measured.cycle_seconds * 1e3:g} ms"
    words += ")" if size == measured.size else f", with {measured.size} ranks)"
    return Source(usable, measured, words, (), warnings)


def _ranks(size: int, per_host: int | None) -> str:
    several = per_host is not None and per_host > 1
    return f"{size} ranks" + (f", {per_host} on a host" if several else "")


def add_source(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--profile", metavar="FILE", help="what horovod-sparse calibrate wrote; without it formulas are used")
    add("--ranks", type=several(num_ranks), metavar="P[,P...]", help="default: the profile's, or 8")
    add("--bandwidth", type=bits_per_second, help="of a network that was not measured (default 1gbit)")
    add("--latency", type=time, help="of one of its messages (default 50us)")
    add("--nodes", type=count, metavar="N", help="hosts of --per-host ranks each, in place of --ranks")
    text = "ranks of a host, which share its network card (default: the profile's, or 1)"
    add("--per-host", "--per-node", type=count, metavar="L", help=text)
    bandwidth, latency = 8e-9 / HOST_NETWORK.beta_seconds, HOST_NETWORK.alpha_seconds * 1e6
    text = f"between the ranks of a host, where it was not measured (default {bandwidth:g}gbit)"
    add("--host-bandwidth", type=bits_per_second, help=text)
    add("--host-latency", type=time, help=f"likewise (default {latency:g}us)")
