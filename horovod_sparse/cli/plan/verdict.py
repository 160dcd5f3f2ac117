"""Is it worth it? Yes or no, how much, what to paste, and from which bandwidth on dense wins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from horovod_sparse.cli.options import Source
from horovod_sparse.cli.plan.accuracy import BETTER
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import NoFeedback, Recipe, parse_recipe
from horovod_sparse.planning.cost_model import AffineTime, CostModel
from horovod_sparse.planning.optimal import optimal
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.timeline import predict
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


def candidates(optimizer: str | None) -> list[Recipe]:
    """What is tried, with the feedback that goes with an optimizer."""
    more = f",feedback={BETTER[optimizer]}" if optimizer in BETTER else ""
    return [parse_recipe(text + more) for text in CANDIDATES]


@dataclass(frozen=True)
class Verdict:
    """What is said.

    Attributes:
        recipe: the best of the candidates.
        dense_seconds: an iteration with dense gradients, overlapped and fused as Horovod does.
        sparse_seconds: one with the recipe.
        computing_seconds: of forward, backward and the optimizer's update alone.
        memory_bytes: that a rank holds besides: the residual, and what its feedback keeps.
        dense_wins_from: bit/s; 0 where dense wins everywhere, infinite where it wins nowhere looked at, NaN
            where nobody has looked.
    """

    recipe: Recipe
    dense_seconds: float
    sparse_seconds: float
    computing_seconds: float
    memory_bytes: int = 0
    dense_wins_from: float = math.nan

    @property
    def speedup(self) -> float:
        """Dense by sparse."""
        return self.dense_seconds / self.sparse_seconds

    @property
    def answer(self) -> str:
        """In a word or two."""
        return "yes" if self.speedup >= _MARGIN else "hardly" if self.speedup > 1.0 else "no"

    def paste(self, merging: str, dtype: str, *, levels: bool) -> str:
        """What to write; with `levels` summing within a host first may pay."""
        if not self.speedup > 1.0:
            return (
                "compression=hvd.Compression.fp16"
                if dtype == "float16"
                else f"nothing: train dense, in {dtype}"
            )
        text = f'compression="{self.recipe.describe()}", merging={merging}'
        return text + (', levels="auto"' if levels else "")


def residual_bytes(recipe: Recipe, num_elements: int, per_host: int = 1) -> int:
    """What a rank holds besides: float32 of all elements, or of its share of a host's sum."""
    kept = recipe.feedback.num_companions + (not isinstance(recipe.feedback, NoFeedback))
    return 4 * kept * -(-num_elements // per_host)


def dense_cost(profile: Profile, gradient_share: float = 1.0) -> CostModel:
    """Of a dense training, by the bytes of its gradients' elements by four."""
    alone = profile.dense_cost()
    fixed = alone.dense.fixed_seconds
    each = (alone.dense.seconds(1e9) - fixed) * 1e-9 * gradient_share
    return dataclasses.replace(alone, dense=AffineTime(fixed, each))


def verdict_of(
    workload: Workload, profile: Profile, recipes: Sequence[Recipe], gradient_share: float = 0.5
) -> Verdict:
    """Dense beside the best of some recipes, denser ones first, with the best buckets.

    Dense is the best that it could be: half types, fused and overlapped; `gradient_share` is 1 for float32.

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
        seconds = predict(workload, optimal(workload, cost), cost).iteration_seconds
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
        return "by formulas: horovod-sparse calibrate measures times, for --profile"
    if source.measured.size != size:
        return f"measured with {source.measured.size} ranks, and converted by formulas"
    tried = "of 16 such predictions 15 were within 15 % (docs/performance.md)"
    if dtype != "float32":
        tried += f"; what {dtype} saves of a dense allreduce is a formula's"
    return f"times are measured on this cluster: {tried}"


def sentences(
    verdict: Verdict,
    dtype: str,
    source: Source,
    *,
    paste: str,
    told: str,
    origin: str,
    assumed: Sequence[str],
) -> dict[str, str]:
    """What is said, line by line; the same in text and in JSON."""
    sparse, dense, alone = (
        f"{1e3 * seconds:,.1f} ms"
        for seconds in (verdict.sparse_seconds, verdict.dense_seconds, verdict.computing_seconds)
    )
    faster = f"{verdict.speedup:.1f} times faster" if verdict.speedup >= _MARGIN else "no gain to speak of"
    limit = verdict.dense_wins_from
    if math.isinf(limit):
        border = "on no network that was looked at, up to 10 Tbit/s"
    elif limit == 0.0:
        border = "everywhere: the model is small for its step, or selection is slow"
    else:
        border = f"from {_bandwidth(limit)} on"
    lines = {
        "worth it": f"{verdict.answer}, {faster} ({source.words})",
        "accuracy": told,
        "iteration": f"{sparse} sparse, {dense} dense ({dtype}, overlapped, fused), {alone} computing alone",
        "memory": f"{verdict.memory_bytes / 1e6:,.0f} MB more on every rank: residual and feedback",
        "paste": paste,
        "dense wins": border,
        "how sure": f"{how_sure(source, source.profile.size, dtype)}; time of the step: {origin}",
        "assumed": "; ".join(assumed) or "nothing but the time of the step",
    }
    if math.isnan(limit):  # nobody has looked
        del lines["dense wins"]
    return lines


def _bandwidth(bits: float) -> str:
    for unit, name in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= unit:
            return f"{bits / unit:.3g} {name}"
    return f"{bits:.0f} bit/s"
