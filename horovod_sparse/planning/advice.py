"""What is advised: dense gradients or a recipe by predicted times, and what is known of its accuracy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import (
    AdamFeedback,
    AutoDensity,
    BestFeedback,
    ErrorFeedback,
    MomentumCorrection,
    NoFeedback,
    Recipe,
    RMSpropFeedback,
    parse_recipe,
)
from horovod_sparse.planning.cost_model import AffineTime, CostModel
from horovod_sparse.planning.optimal import optimal
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.selection import densest_plan
from horovod_sparse.planning.timeline import Timeline, predict
from horovod_sparse.planning.workload import Workload
from horovod_sparse.plans.dense import bytes_by_round
from horovod_sparse.plans.plan import HALVES, Plan
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.sparsifiers.exclusive import ExclusiveThreshold
from horovod_sparse.training.parts import needs_bucket
from horovod_sparse.wire import WireFormat

#: local steps from one exchange to the next that are looked at, and what an exchange sends
EVERY, LOCAL = (10, 30, 100, 300), "sparseloco"
#: what is known of one of them: the GPT of docs/measurements/local_steps.json
_LOCAL_STEPS = {30: "unknown for large models; a small GPT ended 7 % above dense AdamW's loss"}

#: what is tried, denser first: of two that take equally long the denser one is advised
CANDIDATES = ("exdyna:density=0.01", "topk:density=0.01", "exdyna:density=0.001", "topk:density=0.001")
#: behind steps of AdamW, where parts of one rank each cost accuracy
_OF_STEPS = ("topk:density=0.01", "topk:density=0.003,values=2bit,indices=gaps")
#: a sparser one has to be this much faster
_MARGIN = 1.05
#: bytes of an element in a dense allreduce
GRADIENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: that are looked at for the crossing, bit/s
_LOWEST, _HIGHEST = 1e6, 1e13

#: that `--optimizer` takes
OPTIMIZERS = ("sgd", "momentum", "adamw")
#: from here on a residual is sent before it is old; below it momentum and AdamW lose
DENSE_ENOUGH = 0.1
#: small models at density 0.01 with error feedback beside dense ones: a perceptron with every schedule
#: (docs/measurements/schedules.json), a GPT of 0.84 million parameters (gpt.json)
_MEASURED = {
    "sgd": "SGD without momentum kept up: a perceptron ended 1.1 points behind to 2.1 before dense",
    "momentum": "momentum lost 1.4 to 3.9 points where the rate ended at 0, and up to 9.8 where it did not",
    "adamw": "AdamW lost 2.4 to 6.8 points, and a small GPT 0.68 bits per byte (0.24 at density 0.05)",
}
#: the densest plan behind steps of Adam, whose first moment is what waits: a GPT of 0.84 million parameters
#: ended before dense AdamW at 0.003 and 0.01, behind it at 0.1 (docs/measurements/share.json)
_DENSEST_STEPS = 0.01
#: the feedback that goes with an optimizer in place of "error"
BETTER = {"momentum": "best", "adamw": "adam"}
_REMEDIES = {
    "momentum": "write feedback='best', or SGD without momentum at rate / (1 - momentum), which lost nothing",
    "adamw": "write feedback='adam', which normalizes before it selects",
}


def loses(recipe: Recipe, optimizer: str | None) -> tuple[str, str, str] | None:
    """What an optimizer loses behind a recipe, why, and what to write in place of it; None for all else."""
    sparsifier, feedback = recipe.sparsifier, recipe.feedback
    steps = isinstance(feedback, AdamFeedback) or (
        isinstance(feedback, BestFeedback) and optimizer == "adamw"
    )
    if steps and isinstance(sparsifier, ExclusiveThreshold):
        what = "on 8 ranks a small GPT ended 0.3 to 0.4 bits per byte behind, with topk not behind"
        return what, "one rank's view of an element is not enough", "write topk"
    low = sparsifier.has_density and sparsifier.density < DENSE_ENOUGH
    if optimizer not in _REMEDIES or not low or not isinstance(feedback, ErrorFeedback):
        return None
    why = "what waits in a residual arrives late, and the optimizer goes on with it"
    return f"in small trainings at density 0.01 {_MEASURED[optimizer]}", why, _REMEDIES[optimizer]


def accuracy(recipe: Recipe, optimizer: str | None) -> str:
    """A sentence beside every verdict, which is about time."""
    if told := loses(recipe, optimizer):
        return f"{told[0]}: {told[2]}"
    if isinstance(recipe.feedback, MomentumCorrection):
        known = (
            "switch off the optimizer's own momentum; so a perceptron lost 1.8 and 3.0 points with restarts"
        )
    elif isinstance(recipe.feedback, AdamFeedback) and recipe.sparsifier.density <= _DENSEST_STEPS:
        known = "small GPTs ended 0.1 bits per byte behind to 0.3 before dense AdamW at such densities"
    elif isinstance(recipe.feedback, BestFeedback) and optimizer == "momentum":
        known = f"momentum goes, and {_MEASURED['sgd']} in small trainings at density 0.01"
    elif isinstance(recipe.feedback, BestFeedback) and optimizer is None:
        known = "at density 0.01 a perceptron ended 0.9 points behind to 1.5 before (docs/results.md)"
    elif not isinstance(recipe.feedback, ErrorFeedback):
        known = "docs/results.md has feedbacks other than 'error'"
    elif not recipe.sparsifier.has_density or recipe.sparsifier.density >= DENSE_ENOUGH:
        known = "docs/results.md has quantizers and densities from 0.1 on"
    elif optimizer == "sgd":
        known = f"in small trainings at density 0.01 {_MEASURED['sgd']}"
    else:
        every = "; ".join(_MEASURED.values())
        known = f"in small trainings at density 0.01 {every}. `plan --optimizer` says what to write"
    return f"unknown for large models; {known}"


def candidates(optimizer: str | None) -> list[Recipe]:
    """What is tried, with the feedback that goes with an optimizer; "best" suits itself to one not told."""
    more = "" if optimizer == "sgd" else f",feedback={BETTER.get(optimizer or '', 'best')}"
    return [parse_recipe(text + more) for text in (_OF_STEPS if optimizer in (None, "adamw") else CANDIDATES)]


@dataclass(frozen=True)
class Verdict:
    """What is said.

    Attributes:
        recipe: the best of the candidates.
        dense_seconds: an iteration with dense gradients, overlapped and fused as Horovod does.
        sparse_seconds: one with the recipe.
        computing_seconds: of forward, backward and the optimizer's update alone.
        memory_bytes: that a rank holds besides: the residual, and what its feedback keeps.
    """

    recipe: Recipe
    dense_seconds: float
    sparse_seconds: float
    computing_seconds: float
    memory_bytes: int = 0

    @property
    def speedup(self) -> float:
        """Dense by sparse."""
        return self.dense_seconds / self.sparse_seconds

    @property
    def answer(self) -> str:
        """In a word or two."""
        return "yes" if self.speedup >= _MARGIN else "hardly" if self.speedup > 1.0 else "no"


class LocalRounds(NamedTuple):
    """Local steps, and an exchange after every so many, as times predict them.

    Attributes:
        every: H, steps from one exchange to the next.
        exchange_seconds: of an exchange: what it sends, and the work for it.
        num_bytes: that a rank puts into one.
        dense_bytes: of all parameters in float32.
        share: of the time that exchanges take.
    """

    every: int
    exchange_seconds: float
    num_bytes: int
    dense_bytes: int
    share: float

    @property
    def line(self) -> str:
        """What to write."""
        outer = f'compression="{LOCAL}", outer=OuterStep(lr=1.5)'
        return f"LocalSteps(optimizer, model, every={self.every}, {outer})"

    @property
    def accuracy(self) -> str:
        """What is known of it."""
        return _LOCAL_STEPS.get(self.every, f"unknown at {self.every}; measured at {min(_LOCAL_STEPS)}")

    def __str__(self) -> str:
        return f"{self.line}: predicted {self.share:.1%} network; accuracy: {self.accuracy}"


def local_rounds(profile: Profile, sparsifier: Sparsifier, workload: Workload) -> list[LocalRounds]:
    """What local steps would come to, by the times of a profile; fewer steps from one exchange first.

    Args:
        profile: of the cluster.
        sparsifier: one whose selection was measured; that of an exchange is taken to cost as much.
        workload: a step.
    """
    num_elements = sum(parameter.num_elements for parameter in workload.parameters)
    sent = bytes_by_round(parse_recipe(LOCAL).sparsifier, profile.size, num_elements)
    num_bytes, seconds = sum(each for _, each in sent), 0.0
    if profile.size > 1 and "allgather" in profile.collectives:
        seconds = profile.collectives["allgather"].time().seconds(num_bytes)
    elif profile.size > 1:  # a ring sends P - 1 messages there, and in an allreduce of n bytes about 2 n
        seconds = profile.collectives["allreduce"].time().seconds(num_bytes * profile.size / 2)
    seconds += profile.work(sparsifier, profile.size).seconds(num_elements)
    computing = workload.step_seconds + workload.update_seconds
    shares = [seconds / (seconds + every * computing) for every in EVERY]
    told = seconds, num_bytes, 4 * num_elements
    return [LocalRounds(every, *told, share) for every, share in zip(EVERY, shares, strict=True)]


class Chosen(NamedTuple):
    """A plan, two of the three lines that say what it is, and whether the network keeps to its share."""

    plan: Plan
    density: float
    words: str
    times: str
    fits: bool


#: sparse plans are chosen for so much of the share: what is measured varies
_AIM = 0.8


def by_share(
    limit: float,
    recipe: Recipe,
    profile: Profile,
    workload: Workload,
    plan_at: Callable[..., Plan],
    step_of: Callable[[Plan, float], Timeline],
) -> tuple[Chosen, str]:
    """The first that fits: dense gradients, then every step sparse, as densely as possible.

    The network's share is what a faster one would take away of an iteration (`Timeline.network_share`).
    Selecting is no network, but is paid for, too: so no sparse plan is taken that is slower than dense ones.
    Behind steps of Adam, which have no first moment without a residual, every plan is sparse, and the
    densest is taken.
    Dense gradients in float16 are left out where the feedback keeps something for them; values of 2 bits
    where something is said of values, where what they lose is not kept, or messages would be of other kinds.

    Returns:
        The choice, the fastest where nothing fits; and what to write then, or nothing.
    """
    given, names = recipe.sparsifier, tuple(parameter.name for parameter in workload.backward)
    computing = workload.step_seconds + workload.update_seconds
    plans = {"dense": Plan((), names)}
    if not needs_bucket(recipe.for_dense()):
        plans[HALVES] = Plan((), names, values=HALVES)
    dense = {name: (plan, step_of(plan, given.density)) for name, plan in plans.items()}
    words = "every step sparse" + (" at density {:g}" if given.follows_density else "")
    sparse: dict[str, Callable[[float], Plan]] = {words: plan_at}
    exact = given.has_density and given.wire == WireFormat(quantum=given.quantum)
    if exact and not isinstance(recipe.feedback, NoFeedback):
        short = given.sent_as(given.density, "2bit")
        if not short.diverges and short.rounds(profile.size) == given.rounds(profile.size):
            sparse[f"{words}, values of 2 bits"] = partial(plan_at, values="2bit")
    limits = recipe.auto or AutoDensity(given.density, given.density)
    fastest = min(step.iteration_seconds for _, step in dense.values())
    if of_steps := isinstance(recipe.feedback, (AdamFeedback, RMSpropFeedback)):
        fastest = math.inf
        limits = dataclasses.replace(limits, most=max(limits.least, min(limits.most, _DENSEST_STEPS)))

    def chosen(plan: Plan, density: float, words: str) -> Chosen:
        step = step_of(plan, density)
        seconds, network = step.iteration_seconds, step.network_share
        work = max(0.0, 1.0 - network - computing / seconds)
        told = f"{1e3 * seconds:.4g} ms an iteration, {network:.1%} of it network, {work:.1%} work for it"
        others = (f"{name} {1e3 * each.iteration_seconds:.4g} ms" for name, (_, each) in dense.items())
        told = f"predicted: {told}; {', '.join(others)}; computing alone {1e3 * computing:.4g} ms"
        fits = network <= limit
        return Chosen(plan, density, words if fits else f"{words}, which is too much", told, fits)

    def strain(plan: Plan, density: float) -> float:
        step = step_of(plan, density)
        return max(step.network_share / (_AIM * limit), step.iteration_seconds / fastest)

    whole = [
        chosen(plan, given.density, "dense gradients" + ("" if name == "dense" else f" in {name}"))
        for name, (plan, _) in dense.items()
    ]
    fitting = [one for one in whole if one.fits]
    if fitting and not of_steps:
        return fitting[0], ""
    best, kept = whole[0], []
    for words, make in sparse.items():
        found = densest_plan(limits, make, strain, 1.0)
        hint = "; dense training would fit, too" if fitting else ""
        best = chosen(found.plan, found.density, words.format(found.density) + hint)
        kept += [best] if found.seconds <= 1.0 else []
    if kept:  # of steps those of 2 bits lose less than a lower density does
        return max(kept, key=lambda one: one.density) if of_steps else kept[0], ""
    if fastest <= step_of(best.plan, best.density).iteration_seconds:
        best = min(whole, key=lambda one: step_of(one.plan, one.density).iteration_seconds)
    remedy = str(fitting_rounds(local_rounds(profile, given, workload), limit))
    if recipe.auto is None and given.follows_density:
        remedy = f"density='auto' in place of {given.density:g}, or {remedy}"
    return best, "" if best.fits else remedy


def fitting_rounds(rounds: Sequence[LocalRounds], share: float) -> LocalRounds:
    """The first that keeps to the network's share, or the last."""
    return next((one for one in rounds if one.share <= share), rounds[-1])


def residual_bytes(recipe: Recipe, num_elements: int, per_host: int = 1) -> int:
    """What a rank holds besides: float32 of all elements, or of its share of a host's sum."""
    kept = recipe.feedback.num_companions + (not isinstance(recipe.feedback, NoFeedback))
    return 4 * kept * -(-num_elements // per_host)


def dense_step(workload: Workload, cost: CostModel) -> tuple[Plan, float]:
    """The plan that sparsifies nothing, and seconds of its iteration."""
    every = workload.with_dense([parameter.name for parameter in workload.parameters])
    plan = Plan((), every.dense_names)
    return plan, predict(every, plan, cost).iteration_seconds


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
    _, dense_seconds = dense_step(workload, dense_cost(profile, gradient_share))
    return Verdict(best[1], dense_seconds, best[0], workload.step_seconds + workload.update_seconds)


def crossing(at: Callable[[float], Verdict]) -> float:
    """The bandwidth from which on dense wins, by bisection: 0 for everywhere, infinite for nowhere."""
    if at(_LOWEST).speedup <= 1.0:
        return 0.0
    if at(_HIGHEST).speedup > 1.0:
        return math.inf
    low, high = math.log(_LOWEST), math.log(_HIGHEST)
    while high - low > 0.02:
        middle = (low + high) / 2
        low, high = (middle, high) if at(math.exp(middle)).speedup > 1.0 else (low, middle)
    return math.exp(high)
