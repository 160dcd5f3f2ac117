"""What whole steps say: backward times from the stamps of hooks, and what single operations do not show."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod_sparse.checks import check_count
from horovod_sparse.collectives import Synchronization, shared_lines
from horovod_sparse.errors import ProfileMismatchError
from horovod_sparse.planning.cost_model import CostModel, Fit
from horovod_sparse.planning.formulas import profile_at, with_levels
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.timeline import predict
from horovod_sparse.planning.workload import Workload, whole_parameters
from horovod_sparse.plans.plan import ParameterFacts, Plan
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.topology import Topology


@dataclass(frozen=True)
class BackwardTimes:
    """Medians over steps."""

    #: by parameter, in the order in which gradients came; 0 for those that never came
    backward_seconds: Mapping[str, float]
    #: from the end of one step to the first gradient of the next
    forward_seconds: float
    #: that were measured
    num_steps: int
    #: forward and backward of each of them, where that is known
    step_seconds: tuple[float, ...] = ()
    #: from the end of one step to the end of the next; 0 where that is not known
    iteration_seconds: float = 0.0
    #: the same under a plan of many buckets, see `probe_of`
    probe_seconds: float = 0.0
    #: of each iteration its seconds, and those in which collectives were waited for, where that is known
    waits: tuple[tuple[float, float], ...] = ()
    #: of an iteration, that a faster network would take away; NaN where that is not known
    network_seconds: float = math.nan


class BackwardRecorder:
    """Takes the stamps of a few steps, and makes medians of them.

    A stamp is what tells a time: seconds of a clock, or an event of a device. Between two gradients lies
    the time from where the work for the one ended to where that for the other begins: so folding and
    selecting are not counted as backward, but what a hook costs that starts nothing is.

    Example:
        >>> recorder = BackwardRecorder(["a", "b"], num_warmup=0, num_steps=1)
        >>> recorder.begin(10.0)
        >>> recorder.arrived("b", 13.0, 14.0)  # one second of which passes in the hook
        >>> recorder.arrived("a", 16.0, 16.0)
        >>> recorder.end()
        >>> recorder.times()
        BackwardTimes(backward_seconds={'b': 0.0, 'a': 2.0}, forward_seconds=3.0, num_steps=1,
                      step_seconds=(5.0,), iteration_seconds=0.0, probe_seconds=0.0, waits=(),
                      network_seconds=nan)
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        num_warmup: int = 1,
        num_steps: int = 5,
        seconds_between: Callable[[Any, Any], float] | None = None,
    ) -> None:
        check_count("num_warmup", num_warmup, low=0)
        check_count("num_steps", num_steps)
        self._names, self._to_skip, self._num_steps = tuple(names), num_warmup, num_steps
        self._between = seconds_between or (lambda start, stop: operator.sub(stop, start))
        self._begun: Any = None
        self._stamps: list[tuple[str, Any, Any]] = []
        self._forward: list[float] = []
        self._totals: list[float] = []
        self._iterations: list[float] = []
        self._waits: list[tuple[float, float]] = []
        self._backward: dict[str, list[float]] = {name: [] for name in self._names}
        self._places: dict[str, list[int]] = {name: [] for name in self._names}

    @property
    def done(self) -> bool:
        """Whether all steps that count have been taken."""
        return len(self._forward) >= self._num_steps

    @property
    def num_measured(self) -> int:
        """Steps that count so far."""
        return len(self._forward)

    def begin(self, stamp: Any) -> None:
        """A step begins: the one before it has ended, and forward is next."""
        self._begun, self._stamps = stamp, []

    def arrived(self, name: str, entered: Any, left: Any) -> None:
        self._stamps.append((name, entered, left))

    def end(self, stamp: Any = None, waited: float = math.nan) -> None:
        """All gradients of the step have come; what did not come will not. The stamps are read.

        `waited` are seconds in which this rank had nothing to do but wait for collectives.
        """
        begun, stamps = self._begun, self._stamps
        self._begun, self._stamps = None, []
        if begun is None or not stamps or self.done:
            return  # the first step has no beginning
        if self._to_skip > 0:
            self._to_skip -= 1
            return
        before, total = begun, 0.0
        for place, (name, entered, left) in enumerate(stamps):
            seconds = max(0.0, float(self._between(before, entered)))
            total += seconds
            if place == 0:
                # where forward ends nobody tells; nothing can be sent before, so nothing hangs on it
                self._forward.append(seconds)
                seconds = 0.0
            self._backward[name].append(seconds)
            self._places[name].append(place)
            before = left
        self._totals.append(total)
        if stamp is not None:
            self._iterations.append(max(0.0, float(self._between(begun, stamp))))
            if not math.isnan(waited):
                self._waits.append((self._iterations[-1], waited))

    def forget(self) -> None:
        """The step was given up: its stamps do not count."""
        self._begun, self._stamps = None, []

    def times(self) -> BackwardTimes:
        """Medians of the steps so far.

        What delays another gradient in every step (a rank that had to leave its core to others) is in no
        gradient's median; so all are scaled by the same factor to the median of whole steps.
        """
        if not self._forward:
            raise ProfileMismatchError("no step has been measured yet: train a few steps first")
        last = len(self._names)
        place = {name: statistics.median(self._places[name] or [last]) for name in self._names}
        # parameters without a gradient are started in the end, as the model's first
        order = sorted(range(last), key=lambda i: (place[self._names[i]], -i))
        seconds = {name: statistics.median(self._backward[name] or [0.0]) for name in self._names}
        forward = statistics.median(self._forward)
        found = forward + sum(seconds.values())
        scale = statistics.median(self._totals) / found if found else 1.0
        return BackwardTimes(
            {self._names[i]: scale * seconds[self._names[i]] for i in order},
            scale * forward,
            len(self._forward),
            tuple(self._totals),
            statistics.median(self._iterations or [0.0]),
            waits=tuple(self._waits),
        )


def mean_times(own: BackwardTimes | None) -> Synchronization[BackwardTimes]:
    """Times of a step as all ranks have it together: the same on every rank.

    Means over the ranks that have measured something; and, as a collective waits for the slowest rank, all
    of them times ``median over steps of (max over ranks / mean over ranks)`` of a whole step.
    """
    line = None
    if own is not None:
        by_name = list(own.backward_seconds.items())
        whole = [own.iteration_seconds, own.probe_seconds]
        line = [own.num_steps, own.forward_seconds, by_name, own.step_seconds, whole, own.waits]
    everyone = yield from shared_lines(line)
    measured = [item for item in everyone if item is not None]
    if not measured:
        raise ProfileMismatchError("no rank has measured a step yet: train a few steps first")
    steps, forward, rows, totals, iterations, waits = zip(*measured, strict=True)
    ratios = [max(step) / statistics.fmean(step) for step in zip(*totals, strict=False) if any(step)]
    slowest = statistics.median(ratios or [1.0])
    seconds: dict[str, list[float]] = {}
    places: dict[str, list[int]] = {}
    for row in rows:
        for place, (name, value) in enumerate(row):
            seconds.setdefault(name, []).append(value)
            places.setdefault(name, []).append(place)
    order = sorted(seconds, key=lambda name: statistics.fmean(places[name]))
    return BackwardTimes(
        {name: slowest * statistics.fmean(seconds[name]) for name in order},
        slowest * statistics.fmean(forward),
        min(steps),
        (),
        iteration_seconds=statistics.fmean(whole for whole, _ in iterations),
        probe_seconds=statistics.fmean(probe for _, probe in iterations),
        network_seconds=_network_seconds(waits),
    )


def _network_seconds(waits: Sequence[Sequence[tuple[float, float]]]) -> float:
    """What is left of an iteration once the slowest rank has done its work, by rank and step; a trimmed mean.

    A rank that waits for a slower one waits for no network; and its next step begins the later, so seconds of
    an iteration are means over ranks.
    """
    left = []
    for ranks in zip(*waits, strict=False):
        busy = max(whole - waited for whole, waited in ranks)
        left.append(statistics.fmean(whole for whole, _ in ranks) - busy)
    trimmed = sorted(left)[len(left) // 5 : len(left) - len(left) // 5]
    return max(0.0, statistics.fmean(trimmed)) if trimmed else math.nan


#: buckets that a probe must have more than the plan in use: from fewer nothing can be told
_FEWEST_MORE = 16
#: about so many buckets share the parameters of a large model in a probe of two levels
_PIECES_ON_HOSTS = 32
#: costs are not made less than this share of what was measured, however short iterations were
_LEAST_SCALE = 0.25
#: a link is taken to have become so many times faster, or slower, at most at a time
_LINK_SCALES = 1 / 8, 32.0
#: a prediction that is off by less is right
_CLOSE = 1e-6
#: halvings of the interval in which a scale, or time per bucket, is looked for
_HALVINGS = 12
#: of that interval, before
_DOUBLINGS = 6


def step_of(profile: Profile, parameters: Sequence[ParameterFacts]) -> Workload:
    """A step of the model that a profile was measured on: gradients came in the profile's order."""
    facts = {parameter.name: parameter for parameter in parameters}
    profile.backward_of(list(facts))  # refuses a profile that lacks some
    ordered = [name for name in profile.backward_seconds if name in facts]
    times, dense = profile.backward_of(ordered), whole_parameters(parameters)
    # measured from the end of a step to that of the next: the update is in it
    return Workload(tuple(facts[name] for name in ordered), times, profile.forward_seconds, dense)


def measured_step(
    profile: Profile,
    parameters: Sequence[ParameterFacts],
    sparsifier: Sparsifier,
    size: int,
    topology: Topology | None = None,
) -> tuple[Workload, CostModel]:
    """A step of the model, and what its buckets cost, as a complete profile says."""
    workload = step_of(profile, parameters)
    if topology is None or topology.per_host == 1:
        # Horovod sends what waits at the same time as one
        return workload, profile.cost(sparsifier, size, fuse_sparse=True)
    of_hosts = with_levels(profile_at(profile, size), topology.per_host)
    return workload, of_hosts.cost(sparsifier, levels="host")


def probe_of(current: Plan, topology: Topology | None = None) -> Plan | None:
    """A plan of many buckets, to be measured beside the one in use: one for every sparse parameter."""
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

    What the prediction for the plan in use is short of is added to forward: to all plans alike. What a bucket
    costs beside its selection when many are under way is added to the fixed time of selection, so that
    `probe_of` comes out right. What it is too long by is taken off all that buckets and dense parameters
    cost, in the same proportion; times that were given are kept. So collectives say what they take within a
    step.
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
        wanted = times.iteration_seconds
        scale = _crossing(_LEAST_SCALE, 1.0, lambda scale: seconds(_scaled(made, scale), current), wanted)
        return _scaled(made, scale)

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


def linked(
    profile: Profile,
    times: BackwardTimes,
    current: Plan,
    parameters: Sequence[ParameterFacts],
    sparsifier: Sparsifier,
    size: int,
    topology: Topology | None = None,
) -> Profile:
    """A profile by which the network's seconds come out as measured: its collectives, times one factor.

    Where nobody knows those, an iteration does. So a link is followed that has become slower or faster, and
    nobody measures a collective anew. Messages that are hidden behind computing tell nothing but that it may
    be fast, which is then tried.
    """
    backward = dict(reversed(list(times.backward_seconds.items())))
    made = dataclasses.replace(profile, backward_seconds=backward, forward_seconds=times.forward_seconds)

    unknown = math.isnan(times.network_seconds)

    def seconds(exponent: float) -> float:
        tried = _scaled(made, math.exp(exponent), among=("collectives", "levels"))
        workload, cost = measured_step(tried, parameters, sparsifier, size, topology)
        step = predict(workload, current, cost)
        return step.iteration_seconds if unknown else step.visible_seconds

    if not times.iteration_seconds or size == 1:
        return made
    wanted = times.iteration_seconds if unknown else times.network_seconds
    least, most = map(math.log, _LINK_SCALES)
    exponent = _crossing(least, most, seconds, wanted)
    return _scaled(made, math.exp(exponent), among=("collectives", "levels"))


def _crossing(low: float, high: float, of: Callable[[float], float], wanted: float) -> float:
    """Where a growing function reaches a value, by halving the interval; its nearer end where it does not."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle) < wanted else (low, middle)
    return (low + high) / 2


def _scaled(
    profile: Profile,
    factor: float,
    among: Collection[str] = ("collectives", "selection", "decoding", "levels"),
) -> Profile:
    """Another time for all that buckets and dense parameters cost, or for a part of it."""
    note = f"times {factor:.3g}, so that whole iterations come out as they were"

    def fits(found: Mapping[str, Fit]) -> dict[str, Fit]:
        return {name: fit.scaled(factor, note) for name, fit in found.items()}

    changed: dict[str, Any] = {name: fits(getattr(profile, name)) for name in among if name != "levels"}
    if "levels" in among:
        changed["levels"] = {level: fits(found) for level, found in profile.levels.items()}
    return dataclasses.replace(profile, **changed)
