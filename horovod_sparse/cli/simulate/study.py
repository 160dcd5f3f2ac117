"""From few ranks to many, and where dense begins to win: from the coroutines, shown as tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from horovod_sparse.cli.console import plain_table, show
from horovod_sparse.collectives import AllToAll
from horovod_sparse.cost import HOST_NETWORK, AffineTime, AlphaBeta, Levels
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe
from horovod_sparse.merging import Plan, Strategy, Workload
from horovod_sparse.simulation import ScalePoint, break_even, crossings, scale_point, simulate_traffic

#: an all-to-all of P ranks is P * P messages
MOST_RANKS_ALL_TO_ALL = 512
#: elements of all ranks' accumulators together: as many again are gradients, 1 GiB in all
_MOST_ELEMENTS = 2**27
#: k of the smaller simulated bucket
_FEWEST_SELECTED = 8
_DENSITIES, _BANDWIDTHS = (1e-4, 1.0), (1e6, 1e12)


@dataclass(frozen=True)
class Question:
    """What is simulated.

    Attributes:
        workload: parameters and times of a rank's step.
        merging: a strategy, asked anew for every P, density and bandwidth; or a plan.
        network: alpha and beta.
        sizes: numbers of ranks, ascending.
        at: number of ranks for crossings in density and bandwidth.
        selection: of a recipe at a density, among so many ranks, of which so many share the elements: time by
            n, decoding included.
        num_elements: of the two simulated buckets; chosen by P and density if left out.
        seed: of the gradients.
        per_host: L, ranks of a host, which share its network card; with more than one there are two levels.
        inside: alpha and beta between the ranks of a host.
    """

    workload: Workload
    merging: Strategy | Plan
    network: AlphaBeta
    sizes: tuple[int, ...]
    at: int
    selection: Callable[[Recipe, int, int], AffineTime]
    num_elements: tuple[int, int] | None = None
    seed: int = 0
    per_host: int = 1
    inside: AlphaBeta = HOST_NETWORK

    @property
    def levels(self) -> Levels:
        """Hosts of several ranks sum gradients first."""
        return "host" if self.per_host > 1 else "flat"


@dataclass(frozen=True)
class Crossing:
    """Where dense and sparse change places along one quantity.

    Attributes:
        values: at which they do, ascending.
        sparse_first: whether sparse wins below the first of them (everywhere, if there is none).
        low: smallest value looked at.
        high: largest value.
        curve: (value, speedup over dense), ascending.
    """

    values: tuple[float, ...]
    sparse_first: bool
    low: float
    high: float
    curve: tuple[tuple[float, float], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Study:
    """What came out for one sparsifier.

    Attributes:
        recipe: which.
        points: by number of ranks.
        ranks: crossing in the number of ranks; None if there are fewer than two points.
        density: at `Question.at` ranks; None where density does not steer the sparsifier.
        bandwidth: in bit/s, at as many.
        notes: what was left out, and why.
    """

    recipe: Recipe
    points: tuple[ScalePoint, ...]
    ranks: Crossing | None
    density: Crossing | None
    bandwidth: Crossing
    notes: tuple[str, ...] = ()


def simulated_sizes(size: int, density: float) -> tuple[int, int]:
    """Elements of two buckets that are large enough for k, and small enough for P of them in memory.

    Args:
        size: P.
        density: of the sparsifier.

    Example:
        >>> simulated_sizes(16, 0.01), simulated_sizes(4096, 0.0001)
        ((800, 3200), (8192, 32768))
    """
    small = max(512, math.ceil(_FEWEST_SELECTED / density))
    small = max(1, min(small, _MOST_ELEMENTS // size // 4))
    return small, 4 * small


def study_of(question: Question, recipe: Recipe, tell: Callable[[str], None] = lambda what: None) -> Study:
    """Simulates a sparsifier over P, density and bandwidth.

    Args:
        question: what is simulated.
        recipe: of the sparsifier.
        tell: gets a line before each piece of work.

    Raises:
        ArgumentError: if not a single number of ranks can be simulated.
    """
    sizes, notes = _possible(question.sizes, recipe)
    at = question.at
    if not _possible((at,), recipe)[0]:
        raise ArgumentError("--at", at, f"{MOST_RANKS_ALL_TO_ALL} ranks at most for {recipe.sparsifier.name}")
    notes += _coarse(question, recipe, sizes)
    points = []
    for size in sizes:
        tell(f"{recipe.sparsifier.name} on {size} ranks")
        points.append(_beside_flat(question, recipe, size))
    tell(f"{recipe.sparsifier.name}: crossing in density")
    steered = recipe.sparsifier.follows_density
    density = _in_density(question, recipe) if steered else None
    tell(f"{recipe.sparsifier.name}: crossing in bandwidth")
    return Study(
        recipe,
        tuple(points),
        _in_ranks(points) if len(points) > 1 else None,
        density,
        _in_bandwidth(question, recipe),
        tuple(notes),
    )


def _possible(sizes: Sequence[int], recipe: Recipe) -> tuple[list[int], list[str]]:
    """The sizes that are simulated, and a note about the others."""
    fits = [
        size
        for size in sizes
        if size <= MOST_RANKS_ALL_TO_ALL or AllToAll not in recipe.sparsifier.rounds(size)
    ]
    if len(fits) == len(sizes):
        return fits, []
    reason = f"an all-to-all is simulated up to {MOST_RANKS_ALL_TO_ALL} ranks"
    return fits, [f"{recipe.sparsifier.name}: {reason}, so {sorted(set(sizes) - set(fits))} are left out"]


def _coarse(question: Question, recipe: Recipe, sizes: Sequence[int]) -> list[str]:
    density = recipe.sparsifier.density
    few = question.per_host * _FEWEST_SELECTED / 2
    small = [size for size in sizes if _elements(question, size, density)[0] * density < few]
    if not small:
        return []
    return [
        f"{recipe.sparsifier.name}: with {small[0]} ranks or more the simulated buckets are so small that "
        "k is a handful and rounding shows"
    ]


def _elements(question: Question, size: int, density: float) -> tuple[int, int]:
    # a rank selects from its shard alone
    return question.num_elements or simulated_sizes(size, density / question.per_host)


def _stepper(
    question: Question, recipe: Recipe, size: int, levels: Levels
) -> Callable[[AlphaBeta], ScalePoint]:
    """The step by network. Simulated once: bytes and rounds do not depend on the network."""
    per_host = question.per_host
    traffic = simulate_traffic(
        recipe,
        size,
        num_elements=_elements(question, size, recipe.sparsifier.density),
        seed=question.seed,
        per_host=per_host,
        levels=levels,
    )
    shared = per_host if levels == "host" else 1
    selection = question.selection(recipe, size // shared, shared)

    def step(network: AlphaBeta) -> ScalePoint:
        workload, merging = question.workload, question.merging
        return scale_point(workload, merging, traffic, network, selection, question.inside)

    return step


def _point(question: Question, recipe: Recipe, size: int, network: AlphaBeta) -> ScalePoint:
    return _stepper(question, recipe, size, question.levels)(network)


def _beside_flat(question: Question, recipe: Recipe, size: int) -> ScalePoint:
    """A point of two levels, with what one level would take."""
    point = _point(question, recipe, size, question.network)
    if question.levels == "flat":
        return point
    flat = _stepper(question, recipe, size, "flat")(question.network)
    return dataclasses.replace(point, flat_seconds=flat.sparse_seconds)


def _in_ranks(points: Sequence[ScalePoint]) -> Crossing:
    curve = tuple((float(point.size), point.speedup) for point in points)
    return Crossing(tuple(crossings(points)), curve[0][1] > 1.0, curve[0][0], curve[-1][0], curve)


def _in_density(question: Question, recipe: Recipe) -> Crossing:
    def speedup(density: float) -> float:
        sparsifier = dataclasses.replace(recipe.sparsifier, density=density, schedule=None)
        changed = dataclasses.replace(recipe, sparsifier=sparsifier)
        return _point(question, changed, question.at, question.network).speedup

    return _crossing(speedup, *_DENSITIES)


def _in_bandwidth(question: Question, recipe: Recipe) -> Crossing:
    step = _stepper(question, recipe, question.at, question.levels)

    def speedup(bandwidth: float) -> float:
        return step(AlphaBeta(question.network.alpha_seconds, 8.0 / bandwidth)).speedup

    return _crossing(speedup, *_BANDWIDTHS)


def _crossing(speedup: Callable[[float], float], low: float, high: float) -> Crossing:
    seen: dict[float, float] = {}

    def remembered(value: float) -> float:
        if value not in seen:
            seen[value] = speedup(value)
        return seen[value]

    values = break_even(remembered, low, high, precision=0.01)
    curve = tuple(sorted(seen.items()))
    return Crossing(tuple(values), curve[0][1] > 1.0, low, high, curve)


def crossing_words(crossing: Crossing | None, show: Callable[[float], str]) -> str:
    """A crossing in words.

    Args:
        crossing: or None, where nothing was looked for.
        show: a value as text.

    Example:
        >>> crossing_words(Crossing((99.2,), True, 2, 4096), lambda size: f"P = {size:.0f}")
        'dense wins from P = 99 on'
        >>> crossing_words(Crossing((), True, 2, 4096), lambda size: f"P = {size:.0f}")
        'sparse wins from P = 2 to P = 4096'
    """
    if crossing is None:
        return "-"
    first, second = ("sparse", "dense") if crossing.sparse_first else ("dense", "sparse")
    if not crossing.values:
        return f"{first} wins from {show(crossing.low)} to {show(crossing.high)}"
    parts = []
    for number, value in enumerate(crossing.values):
        winner = second if number % 2 == 0 else first
        parts.append(f"{winner} wins from {show(value)} on")
    return ", ".join(parts)


def print_studies(
    console: Console, model: str, merging: str, question: Question, studies: Sequence[Study]
) -> None:
    """A table over P for every sparsifier, and one of crossings.

    Args:
        console: where to.
        model: its name.
        merging: as it was asked for.
        question: what was simulated.
        studies: of `study_of`.
    """
    network = question.network
    where = f"{8e-9 / network.beta_seconds:.4g} Gbit/s, {network.alpha_seconds * 1e6:.4g} us latency"
    two = question.levels == "host"
    if two:
        within = (
            f"{8e-9 / question.inside.beta_seconds:.4g} Gbit/s, {question.inside.alpha_seconds * 1e6:.4g} us"
        )
        where += f" between hosts of {question.per_host} ranks, {within} within"
    show(console, f"{model}, merging {merging}, {where}; the batch of a rank stays the same", "bold")
    columns: tuple[str, ...] = (
        "P",
        "iteration ms",
        "dense ms",
        "speedup",
        "bytes per rank",
        "dense",
        "union",
        "buckets",
    )
    if two:
        columns = ("hosts x ranks", *columns[1:], "flat ms")
    for study in studies:
        told = "bytes that a rank puts in, each counted once"
        told += "; those within its host left out; flat: with one level" if two else ""
        table = plain_table(study.recipe.describe(), columns, told)
        for point in study.points:
            table.add_row(
                f"{point.size // question.per_host} x {question.per_host}" if two else f"{point.size}",
                f"{point.sparse_seconds * 1e3:,.1f}",
                f"{point.dense_seconds * 1e3:,.1f}",
                f"{point.speedup:.2f}",
                f"{point.bytes_per_rank:,.0f}",
                f"{point.dense_bytes_per_rank:,.0f}",
                f"{point.union_density:.4f}",
                f"{len(point.plan.buckets)}",
                *(() if point.flat_seconds is None else (f"{point.flat_seconds * 1e3:,.1f}",)),
                style="" if point.speedup > 1.0 else "dim",
            )
        console.print(table)
        for note in study.notes:
            show(console, f"note: {note}", "yellow")
    along = ("in the number of ranks", f"in density, P = {question.at}", f"in bandwidth, P = {question.at}")
    table = plain_table("Where dense wins", ("sparsifier", *along))
    for column in table.columns:
        column.justify, column.no_wrap = "left", False
    for study in studies:
        table.add_row(
            study.recipe.describe(),
            crossing_words(study.ranks, lambda size: f"P = {size:.0f}"),
            crossing_words(study.density, lambda value: f"{value:.3g}"),
            crossing_words(study.bandwidth, bandwidth_text),
        )
    console.print(table)


def bandwidth_text(bits: float) -> str:
    """A bandwidth as it is written on cables.

    Example:
        >>> bandwidth_text(2.5e9), bandwidth_text(1e6)
        ('2.5 Gbit/s', '1 Mbit/s')
    """
    for unit, name in ((1e12, "Tbit/s"), (1e9, "Gbit/s")):
        if bits >= unit * 0.9995:
            return f"{bits / unit:.3g} {name}"
    return f"{bits / 1e6:.3g} Mbit/s"


def numbers_of(model: str, merging: str, question: Question, studies: Sequence[Study]) -> dict[str, Any]:
    """The same in plain values; see `print_studies`."""

    def crossing(one: Crossing | None) -> dict[str, Any] | None:
        if one is None:
            return None
        return {
            "values": list(one.values),
            "sparse_first": one.sparse_first,
            "low": one.low,
            "high": one.high,
        }

    return {
        "model": model,
        "merging": merging,
        "alpha_seconds": question.network.alpha_seconds,
        "beta_seconds": question.network.beta_seconds,
        "at": question.at,
        "per_host": question.per_host,
        "studies": [
            {
                "sparsifier": study.recipe.describe(),
                "points": [
                    {
                        "size": point.size,
                        "sparse_seconds": point.sparse_seconds,
                        "dense_seconds": point.dense_seconds,
                        "bytes_per_rank": point.bytes_per_rank,
                        "dense_bytes_per_rank": point.dense_bytes_per_rank,
                        "union_density": point.union_density,
                        "buckets": len(point.plan.buckets),
                        "flat_seconds": point.flat_seconds,
                    }
                    for point in study.points
                ],
                "crossings": {
                    "ranks": crossing(study.ranks),
                    "density": crossing(study.density),
                    "bandwidth": crossing(study.bandwidth),
                },
                "notes": list(study.notes),
            }
            for study in studies
        ],
    }
