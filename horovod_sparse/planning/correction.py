"""What a model of single operations misses, taken from whole iterations that were measured."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from horovod_sparse.planning.calibration.backward_times import BackwardTimes
from horovod_sparse.planning.cost_model import CostModel
from horovod_sparse.planning.fitting import Fit
from horovod_sparse.planning.formulas import profile_at, with_levels
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.timeline import predict
from horovod_sparse.planning.workload import Workload, whole_parameters
from horovod_sparse.plans.plan import ParameterFacts, Plan
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.topology import Topology

#: buckets that a probe must have more than the plan in use: from fewer nothing can be told
_FEWEST_MORE = 16
#: about so many buckets share the parameters of a large model in a probe of two levels
_PIECES_ON_HOSTS = 32
#: costs are not made less than this share of what was measured, however short iterations were
_LEAST_SCALE = 0.25
#: a prediction that is off by less is right
_CLOSE = 1e-6
#: halvings of the interval in which a scale, or time per bucket, is looked for
_HALVINGS = 12
#: of that interval, before
_DOUBLINGS = 6


def measured_step(
    profile: Profile,
    parameters: Sequence[ParameterFacts],
    sparsifier: Sparsifier,
    size: int,
    topology: Topology | None = None,
) -> tuple[Workload, CostModel]:
    """A step of the model, and what its buckets cost, as a complete profile says."""
    facts = {parameter.name: parameter for parameter in parameters}
    profile.backward_of(list(facts))
    ordered = tuple(facts[name] for name in profile.backward_seconds if name in facts)
    seconds = profile.backward_of([parameter.name for parameter in ordered])
    workload = Workload(ordered, seconds, profile.forward_seconds, whole_parameters(parameters))
    if topology is None or topology.per_host == 1:
        # Horovod sends what waits at the same time as one
        return workload, profile.cost(sparsifier, size, fuse_sparse=True)
    of_hosts = with_levels(profile_at(profile, size), topology.per_host)
    return workload, of_hosts.cost(sparsifier, levels="host")


def probe_of(current: Plan, topology: Topology | None = None) -> Plan | None:
    """A plan of many buckets, to be measured beside the one in use: one for every sparse parameter.

    Example:
        >>> probe_of(Plan((tuple("abcdefghijklmnopqrstuvwxyz"),))).buckets[:2]
        (('a',), ('b',))
    """
    num_names = sum(map(len, current.buckets))
    share = 1.0
    if topology is not None and topology.per_host > 1:
        share = min(1.0, _PIECES_ON_HOSTS / max(1, num_names))
    buckets: list[tuple[str, ...]] = []
    for bucket in current.buckets:
        pieces = max(1, round(share * len(bucket)))
        cuts = [len(bucket) * piece // pieces for piece in range(pieces + 1)]
        buckets += [bucket[start:stop] for start, stop in itertools.pairwise(cuts)]
    if len(buckets) - len(current.buckets) < _FEWEST_MORE:
        return None
    return Plan(tuple(buckets), current.dense, current.density)


def corrected(
    profile: Profile,
    times: BackwardTimes,
    current: Plan,
    parameters: Sequence[ParameterFacts],
    sparsifier: Sparsifier,
    size: int,
    selection_too: bool = True,
    topology: Topology | None = None,
) -> Profile:
    """A profile by which the measured iterations come out as long as they were.

    What the prediction for the plan in use is short of (ranks that wait for each other, threads of the
    network that take the cores) is added to forward: to all plans alike, so that it favours none. And
    what a bucket costs beside its selection when many are under way (their bookkeeping, processors that
    ranks share) is added to the fixed time of selection: as much as makes `probe_of` come out right.
    What the prediction is too long by (operations are timed one by one, while all ranks do the same) is taken
    off what buckets and dense parameters cost, all in the same proportion; times that were given are kept, as
    are those of forward and backward, which come from the iterations themselves. So what is kept of
    collectives then says what they take within a step, not what the network can do.
    """

    def seconds(made: Profile, plan: Plan) -> float:
        workload, cost = measured_step(made, parameters, sparsifier, size, topology)
        return predict(workload, plan, cost).iteration_seconds

    def slower(extra: float) -> Profile:
        name = sparsifier.name
        fit = profile.selection[name]
        note = f"{extra * 1e6:.3g} us of {name}'s fixed time come from whole iterations"
        fit = dataclasses.replace(fit, fixed_seconds=fit.fixed_seconds + extra, notes=(*fit.notes, note))
        return dataclasses.replace(profile, selection={**profile.selection, name: fit})

    def fitting(made: Profile) -> Profile:
        short = times.iteration_seconds - seconds(made, current)
        if short >= -_CLOSE * times.iteration_seconds or not selection_too:
            return dataclasses.replace(made, forward_seconds=made.forward_seconds + max(0.0, short))
        return _scaled(
            made,
            _crossing(
                _LEAST_SCALE,
                1.0,
                lambda scale: seconds(_scaled(made, scale), current),
                times.iteration_seconds,
            ),
        )

    if not times.iteration_seconds:
        return profile
    found, probe = fitting(profile), probe_of(current, topology)
    missing = times.probe_seconds - (0.0 if probe is None else seconds(found, probe))
    if probe is None or not times.probe_seconds or not selection_too or missing <= 0.0:
        return found
    # with that much for each bucket the prediction would surely be too long, if it were not scaled
    low, high = 0.0, 2.0 * missing / (len(probe.buckets) - len(current.buckets))
    for _ in range(_DOUBLINGS):
        if seconds(fitting(slower(high)), probe) >= times.probe_seconds:
            break
        low, high = high, 2.0 * high
    extra = _crossing(low, high, lambda each: seconds(fitting(slower(each)), probe), times.probe_seconds)
    return fitting(slower(extra))


def _crossing(low: float, high: float, of: Callable[[float], float], wanted: float) -> float:
    """Where a growing function reaches a value, by halving the interval; its nearer end where it does not."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle) < wanted else (low, middle)
    return (low + high) / 2


def _scaled(profile: Profile, factor: float) -> Profile:
    """Less for all that buckets and dense parameters cost."""

    def fits(found: Mapping[str, Fit]) -> dict[str, Fit]:
        return {
            name: dataclasses.replace(
                fit,
                fixed_seconds=factor * fit.fixed_seconds,
                seconds_per_unit=factor * fit.seconds_per_unit,
                seconds_per_selected=factor * fit.seconds_per_selected,
                notes=(*fit.notes, f"times {factor:.3g}, so that whole iterations come out as they were"),
            )
            for name, fit in found.items()
        }

    return dataclasses.replace(
        profile,
        collectives=fits(profile.collectives),
        selection=fits(profile.selection),
        decoding=fits(profile.decoding),
        levels={level: fits(found) for level, found in profile.levels.items()},
    )
