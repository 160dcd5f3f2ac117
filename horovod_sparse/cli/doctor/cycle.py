"""What a step costs: Horovod's cycle time, room in its response cache, and whether sparsifying gains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from horovod_sparse.cli.doctor.facts import Finding, advice, cycle_of, good, problem
from horovod_sparse.cli.plan.verdict import verdict_of
from horovod_sparse.feedback import Recipe
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.strategies import Strategy
from horovod_sparse.planning.timeline import predict
from horovod_sparse.planning.workload import Workload
from horovod_sparse.plans.plan import Plan
from horovod_sparse.sparsifiers import Sparsifier

#: milliseconds that are tried
_CANDIDATES = (0.5, 0.2, 0.1)
#: a shorter cycle is advised if it saves so much of an iteration
_WORTH = 0.03
#: Horovod's own default
_CACHE = 1024


def profile_at_cycle(profile: Profile, cycle_seconds: float) -> Profile:
    """What a profile would be at another cycle time.

    ``alpha' = alpha - (cycle - cycle') / 2``: a message that is ready anywhere in a cycle waits for half
    of it in the mean (measured with 2 ranks: 0.31, 1.26, 2.26 ms at cycles of 0.1, 1 and 4). It is never
    less than half of the new cycle. What takes less than a quarter of a cycle does not wait for one, as
    messages between two ranks through MPI.

    Example:
        >>> from horovod_sparse.cost import Fit
        >>> profile = Profile(2, "torch", "mpi", 1e-3, {"allgather": Fit(8e-4, 1e-9)})
        >>> round(profile_at_cycle(profile, 2e-4).collectives["allgather"].fixed_seconds, 6)
        0.0004
    """
    saved = (profile.cycle_seconds - cycle_seconds) / 2
    collectives = {}
    for kind, fit in profile.collectives.items():
        fixed = fit.fixed_seconds
        if fixed >= profile.cycle_seconds / 4:
            fixed = max(fixed - saved, min(fixed, cycle_seconds / 2))
        collectives[kind] = dataclasses.replace(fit, fixed_seconds=fixed)
    return dataclasses.replace(profile, cycle_seconds=cycle_seconds, collectives=collectives)


def forecast(
    profile: Profile, workload: Workload, sparsifier: Sparsifier, merging: Strategy | Plan
) -> Callable[[float], float]:
    """Predicted seconds of an iteration by the cycle time in milliseconds; plans are made anew for each."""

    def seconds(cycle_ms: float) -> float:
        cost = profile_at_cycle(profile, cycle_ms * 1e-3).cost(sparsifier, fuse_sparse=True)
        plan = merging if isinstance(merging, Plan) else merging(workload, cost)
        return predict(workload.with_dense(plan.dense), plan, cost).iteration_seconds

    return seconds


def check_cycle(
    facts: Mapping[str, Any], num_rounds: int, predicted: Callable[[float], float] | None = None
) -> Iterator[Finding]:
    """The cycle time, and what a shorter one would be worth."""
    text, cycle = facts["settings"].get("HOROVOD_CYCLE_TIME"), cycle_of(facts["settings"])
    if cycle is None:
        why = "Horovod takes 0 for what is no number, and then never sleeps"
        yield problem(
            "cycle time", f"HOROVOD_CYCLE_TIME={text}", why, "milliseconds, as in HOROVOD_CYCLE_TIME=0.5"
        )
        return
    if cycle == 0.0:
        yield problem(
            "cycle time",
            "HOROVOD_CYCLE_TIME=0",
            "Horovod's thread polls without a pause and takes a core from every rank "
            "(measured with 2 ranks on 2 cores: 12 to 40 ms for what takes 0.2 ms at 0.1)",
            "HOROVOD_CYCLE_TIME=0.1, or more",
        )
        return
    now = f"{cycle:g} ms" + ("" if text is not None else " (Horovod's default)")
    if facts["latency_seconds"] is not None:
        now += f"; an allgather of one word takes {facts['latency_seconds'] * 1e3:.2f} ms"
    shorter = [candidate for candidate in _CANDIDATES if candidate < cycle]
    if predicted is not None:
        yield _forecast(now, cycle, shorter, predicted)
    elif cycle >= 0.5:
        most = num_rounds * (cycle - 0.1)
        yield advice(
            "cycle time",
            now,
            f"every round of a bucket waits for the next cycle: with {num_rounds} rounds a cycle of 0.1 ms "
            f"would save {most / 2:.2f} ms in the mean, {most:.2f} ms at most, for the last bucket of a step",
            "try HOROVOD_CYCLE_TIME=0.2 if steps are short; --model and a profile predict what it is worth",
        )
    else:
        yield good("cycle time", now)


def _forecast(now: str, cycle: float, shorter: list[float], predicted: Callable[[float], float]) -> Finding:
    seconds = {candidate: predicted(candidate) for candidate in (cycle, *shorter)}
    told = ", ".join(f"{value * 1e3:.2f} ms at {candidate:g}" for candidate, value in seconds.items())
    best = min(seconds.values())
    # the longest that is nearly as good: short cycles cost processor time
    chosen = max(candidate for candidate, value in seconds.items() if value <= best * 1.01)
    gain = 1.0 - seconds[chosen] / seconds[cycle]
    if gain < _WORTH:
        return good("cycle time", f"{now}; predicted iterations: {told}")
    return advice(
        "cycle time",
        now,
        f"predicted iterations: {told}",
        f"HOROVOD_CYCLE_TIME={chosen:g} saves {gain:.0%} by the model; measure it: every rank's Horovod "
        "thread wakes in every cycle, which costs where cores are short",
    )


def num_names(plan: Plan, sparsifier: Sparsifier, size: int) -> int:
    """Names of collectives in a step: one for every round of a bucket, one for what is dense."""
    return len(plan.buckets) * len(sparsifier.rounds(size)) + len(plan.dense)


def check_gain(profile: Profile, workload: Workload, recipe: Recipe) -> Iterator[Finding]:
    """Whether the model is large enough, and the network slow enough, for the sparsifier to win."""
    verdict = verdict_of(workload, profile, [recipe])
    sparse, dense = (f"{seconds * 1e3:.2f} ms" for seconds in (verdict.sparse_seconds, verdict.dense_seconds))
    number = sum(parameter.num_elements for parameter in workload.parameters)
    told = (
        f"predicted iterations: {sparse} with {recipe.sparsifier.name}, {dense} dense ({number:,} elements)"
    )
    if verdict.answer == "yes":
        yield good("gain", told)
    else:
        why = "the model is too small, or the network too fast, for rounds of Horovod's to pay"
        yield advice("gain", told, why, 'train densely, or tensor_selection="cost", which keeps what pays')


def check_cache(facts: Mapping[str, Any], names: int | None, num_rounds: int) -> Iterator[Finding]:
    """The response cache, which spares a negotiation to every collective whose shape it knows."""
    text = facts["settings"].get("HOROVOD_CACHE_CAPACITY")
    try:
        capacity = _CACHE if text is None else int(text)
    except ValueError:
        why = "Horovod takes 0 for what is no number: no cache"
        yield problem("response cache", f"HOROVOD_CACHE_CAPACITY={text}", why, "a whole number, such as 2048")
        return
    why = "what is not in the cache is negotiated anew: rank 0 gathers and broadcasts in every cycle"
    if capacity <= 0:
        yield advice("response cache", "switched off (HOROVOD_CACHE_CAPACITY=0)", why, "unset it")
    elif names is None:
        fits = capacity // max(1, num_rounds)
        yield good(
            "response cache", f"{capacity} names: {fits} buckets of {num_rounds} rounds (--model counts)"
        )
    elif names > capacity:
        double = 1 << (2 * names - 1).bit_length()
        yield advice(
            "response cache",
            f"{names} names in a step, room for {capacity}",
            why,
            f"HOROVOD_CACHE_CAPACITY={double}, or fewer buckets (--merging)",
        )
    else:
        yield good("response cache", f"{names} names in a step, room for {capacity}")
