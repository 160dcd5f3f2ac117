"""Is it worth it? Yes or no, how much, what to paste, and from which bandwidth on dense wins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from horovod_sparse.cli.options import Source
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe
from horovod_sparse.planning.cost_model import CostModel
from horovod_sparse.planning.optimal import search_plan
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.timeline import predict
from horovod_sparse.planning.times import AffineTime
from horovod_sparse.planning.workload import Workload
from horovod_sparse.plans.plan import Plan

#: what is tried, denser first: of two that take equally long the denser one is advised
CANDIDATES = ("exdyna:density=0.01", "topk:density=0.01", "exdyna:density=0.001", "topk:density=0.001")
#: a sparser one has to be this much faster
_MARGIN = 1.05
#: bytes of an element in a dense allreduce
GRADIENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: that are looked at for the crossing, bit/s
_LOWEST, _HIGHEST = 1e6, 1e13


@dataclass(frozen=True)
class Verdict:
    """What is said.

    Attributes:
        recipe: the best of the candidates.
        dense_seconds: an iteration with dense gradients, overlapped and fused as Horovod does.
        sparse_seconds: one with the recipe.
        computing_seconds: of forward, backward and the optimizer's update alone.
        dense_wins_from: bit/s; 0 where dense wins everywhere, infinite where it wins nowhere looked at, NaN
            where nobody has looked.
    """

    recipe: Recipe
    dense_seconds: float
    sparse_seconds: float
    computing_seconds: float
    dense_wins_from: float = math.nan

    @property
    def speedup(self) -> float:
        """Dense by sparse."""
        return self.dense_seconds / self.sparse_seconds

    @property
    def answer(self) -> str:
        """In a word or two."""
        return "yes" if self.speedup >= _MARGIN else "hardly" if self.speedup > 1.0 else "no"

    def headline(self, words: str) -> str:
        """The answer, on a cluster in words."""
        times = f"{self.speedup:.1f} times faster" if self.speedup >= _MARGIN else "no gain to speak of"
        return f"worth it: {self.answer}, {times} ({words})"

    def numbers(self, size: int) -> dict[str, object]:
        """For JSON."""
        return {
            "worth_it": self.answer,
            "ranks": size,
            "recipe": self.recipe.describe(),
            "speedup": self.speedup,
            "sparse_seconds": self.sparse_seconds,
            "dense_seconds": self.dense_seconds,
            "computing_seconds": self.computing_seconds,
            "dense_wins_from_bits_per_second": self.dense_wins_from
            if math.isfinite(self.dense_wins_from)
            else None,
        }


def dense_cost(profile: Profile, gradient_share: float = 1.0) -> CostModel:
    """Of a dense training, by the bytes of its gradients' elements by four."""
    alone = profile.dense_cost()
    fixed = alone.dense.fixed_seconds
    each = (alone.dense.seconds(1e9) - fixed) * 1e-9 * gradient_share
    return dataclasses.replace(alone, dense=AffineTime(fixed, each))


def verdict_of(
    workload: Workload, profile: Profile, recipes: Sequence[Recipe], gradient_share: float = 1.0
) -> Verdict:
    """Dense beside the best of some recipes, denser ones first, merged as `optimal` does but for its proof.

    Example:
        >>> from horovod_sparse.cost import AlphaBeta, assumed_profile
        >>> from horovod_sparse.feedback import parse_recipe
        >>> from horovod_sparse.merging import ParameterFacts
        >>> workload = Workload((ParameterFacts("all", 25_000_000),), (0.1,))
        >>> gigabit = assumed_profile(AlphaBeta(50e-6, 8e-9), 8)
        >>> verdict_of(workload, gigabit, [parse_recipe("topk:density=0.001")]).answer
        'yes'
    """
    best: tuple[float, Recipe] | None = None
    for recipe in recipes:
        cost = profile.cost(recipe.sparsifier)
        seconds = predict(workload, search_plan(workload, cost, quick=True), cost).iteration_seconds
        if best is None or seconds * _MARGIN < best[0]:
            best = seconds, recipe
    if best is None:
        raise ArgumentError("recipes", recipes, "one or more")
    every = workload.with_dense([parameter.name for parameter in workload.parameters])
    dense = predict(every, Plan((), every.dense_names), dense_cost(profile, gradient_share))
    computing = workload.step_seconds + workload.update_seconds
    return Verdict(best[1], dense.iteration_seconds, best[0], computing)


def crossing(at: Callable[[float], Verdict]) -> float:
    """The bandwidth from which on dense wins, by bisection: sparse loses as networks get faster."""
    if at(_LOWEST).speedup <= 1.0:
        return 0.0
    if at(_HIGHEST).speedup > 1.0:
        return math.inf
    low, high = math.log(_LOWEST), math.log(_HIGHEST)
    while high - low > 0.02:
        middle = (low + high) / 2
        low, high = (middle, high) if at(math.exp(middle)).speedup > 1.0 else (low, middle)
    return math.exp(high)


def how_sure(source: Source, size: int, dtype: str) -> str:
    """What the times are worth, in words."""
    if source.measured is None:
        return (
            "by formulas, without Horovod's own cost and the optimizer's: horovod-sparse calibrate measures "
            "them, for --profile"
        )
    if source.measured.size != size:
        return f"measured with {source.measured.size} ranks, and converted by formulas"
    tried = "of 16 such predictions 15 were within 15 % (docs/performance.md)"
    if dtype != "float32":
        tried += f"; what {dtype} saves of a dense allreduce is a formula's"
    return f"times are measured on this cluster: {tried}"


def sentences(
    verdict: Verdict, dtype: str, words: str, origin: str, *, sure: str, levels: bool = False
) -> list[str]:
    """Five lines; with `levels` summing within a host first may pay."""
    sparse, dense, alone = (
        f"{1e3 * seconds:,.1f} ms"
        for seconds in (verdict.sparse_seconds, verdict.dense_seconds, verdict.computing_seconds)
    )
    name, _, arguments = verdict.recipe.describe().partition(":")
    paste = f'compression=hvd.Compression.{name}({arguments}), merging="optimal"'
    if levels:
        paste += ', levels="auto"'
    if not verdict.speedup > 1.0:
        paste = (
            "compression=hvd.Compression.fp16" if dtype == "float16" else f"nothing: train dense, in {dtype}"
        )
    limit = verdict.dense_wins_from
    if math.isnan(limit):
        border = "at another bandwidth: leave --profile out and give --bandwidth"
    elif math.isinf(limit):
        border = "on no network that was looked at, up to 10 Tbit/s"
    elif limit == 0.0:
        border = "everywhere: the model is small for its step, or selection is slow"
    else:
        border = f"from {_bandwidth(limit)} on"
    return [
        verdict.headline(words),
        f"iteration: {sparse} sparse, {dense} dense ({dtype}, overlapped and fused), {alone} computing alone",
        f"paste: {paste}",
        f"dense wins: {border}",
        f"how sure: {sure}; time of the step: {origin.rstrip('.')}",
    ]


def _bandwidth(bits: float) -> str:
    for unit, name in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= unit:
            return f"{bits / unit:.3g} {name}"
    return f"{bits:.0f} bit/s"
