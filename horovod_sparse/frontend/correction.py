"""What a model of single operations misses, taken from whole iterations that were measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from horovod_sparse.cost import CostModel, Fit, Profile, profile_at, with_levels
from horovod_sparse.frontend.calibration.backward_times import BackwardTimes
from horovod_sparse.frontend.plan_request import whole_parameters
from horovod_sparse.merging import ParameterFacts, Plan, Workload, predict
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.topology import Topology

#: buckets that a probe must have more than the plan in use: from fewer nothing can be told
_FEWEST_MORE = 16
#: parameters of a model are shared out to so many of its buckets with two levels
_MOST_ON_HOSTS = 32
#: halvings of the interval in which time per bucket is looked for
_HALVINGS = 12


def measured_step(
    profile: Profile,
    parameters: Sequence[ParameterFacts],
    sparsifier: Sparsifier,
    size: int,
    topology: Topology | None = None,
) -> tuple[Workload, CostModel]:
    """A step of the model, and what its buckets cost, as a complete profile says.

    Args:
        profile: with backward times.
        parameters: of the model; gradients come in the profile's order, whatever order these stand in.
        sparsifier: that the buckets have.
        size: P, where it is applied.
        topology: which ranks share a host, where gradients are summed within hosts first. What the profile
            does not say of it comes from formulas.

    Returns:
        What `predict` and all strategies take.

    Raises:
        ProfileMismatchError: if the profile lacks something.
    """
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

    Args:
        current: the plan in use.
        topology: which ranks share a host, where gradients are summed within hosts first. Nothing is fused
            there, and every bucket waits for rounds of its own: so a bucket of the probe has several
            parameters of a large model.

    Returns:
        None where it would have hardly more buckets than that.

    Example:
        >>> probe_of(Plan((tuple("abcdefghijklmnopqrstuvwxyz"),))).buckets[:2]
        (('a',), ('b',))
    """
    num_names = sum(map(len, current.buckets))
    each = 1 if topology is None or topology.per_host == 1 else -(-num_names // _MOST_ON_HOSTS)
    buckets = tuple(
        bucket[start : start + each] for bucket in current.buckets for start in range(0, len(bucket), each)
    )
    if len(buckets) - len(current.buckets) < _FEWEST_MORE:
        return None
    return Plan(buckets, current.dense, current.density)


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
    off all times in proportion, so that it favours no plan either; times that were given are kept.

    Args:
        profile: complete.
        times: measured under `current`, and under its probe where `probe_seconds` are known.
        current: the plan in use.
        parameters: of the model.
        sparsifier: that the buckets have.
        size: P, here.
        selection_too: False where times of selection were given, and are not to be changed.
        topology: see `measured_step`.

    Raises:
        ProfileMismatchError: if the profile lacks something.
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
        predicted = seconds(made, current)
        if predicted > times.iteration_seconds and selection_too:
            return _scaled(made, times.iteration_seconds / predicted)
        short = max(0.0, times.iteration_seconds - predicted)
        return dataclasses.replace(made, forward_seconds=made.forward_seconds + short)

    if not times.iteration_seconds:
        return profile
    found, probe = fitting(profile), probe_of(current, topology)
    missing = times.probe_seconds - (0.0 if probe is None else seconds(found, probe))
    if probe is None or not times.probe_seconds or not selection_too or missing <= 0.0:
        return found
    # with that much for each bucket the prediction would surely be too long, also where it is scaled
    low, high = 0.0, 4.0 * missing / (len(probe.buckets) - len(current.buckets))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if seconds(fitting(slower(middle)), probe) < times.probe_seconds:
            low = middle
        else:
            high = middle
    return fitting(slower(low))


def _scaled(profile: Profile, factor: float) -> Profile:
    """All times of a step alike."""

    def fits(found: Mapping[str, Fit]) -> dict[str, Fit]:
        return {
            name: dataclasses.replace(
                fit,
                fixed_seconds=factor * fit.fixed_seconds,
                seconds_per_unit=factor * fit.seconds_per_unit,
                seconds_per_selected=factor * fit.seconds_per_selected,
                notes=(*fit.notes, f"times {factor:.3g}, which whole iterations took of the prediction"),
            )
            for name, fit in found.items()
        }

    return dataclasses.replace(
        profile,
        collectives=fits(profile.collectives),
        selection=fits(profile.selection),
        decoding=fits(profile.decoding),
        levels={level: fits(found) for level, found in profile.levels.items()},
        backward_seconds={name: factor * each for name, each in profile.backward_seconds.items()},
        forward_seconds=factor * profile.forward_seconds,
    )
