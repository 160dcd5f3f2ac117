"""Backward times of whole steps, from the stamps of hooks."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod_sparse.checks import check_count
from horovod_sparse.collectives import Synchronization, shared_lines
from horovod_sparse.errors import ProfileMismatchError
from horovod_sparse.planning.cost_model import CostModel
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.workload import Workload, whole_parameters
from horovod_sparse.plans.plan import ParameterFacts
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
                      step_seconds=(5.0,))
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
        self._backward: dict[str, list[float]] = {name: [] for name in self._names}
        self._places: dict[str, list[int]] = {name: [] for name in self._names}

    @property
    def done(self) -> bool:
        """True once as many steps were recorded as asked for."""
        return len(self._forward) >= self._num_steps

    @property
    def num_measured(self) -> int:
        """The number of steps recorded after the warm-up."""
        return len(self._forward)

    def begin(self, stamp: Any) -> None:
        """Begins a step; forward is next."""
        self._begun, self._stamps = stamp, []

    def arrived(self, name: str, entered: Any, left: Any) -> None:
        self._stamps.append((name, entered, left))

    def end(self) -> None:
        """Reads the stamps of a step, once all its gradients have come."""
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

    def forget(self) -> None:
        """Drops the stamps of a step that was cancelled."""
        self._begun, self._stamps = None, []

    def times(self) -> BackwardTimes:
        """Returns medians over the recorded steps.

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
        )


def mean_times(own: BackwardTimes | None) -> Synchronization[BackwardTimes]:
    """Returns the times of a step over all ranks, the same on every rank.

    Means over the ranks that have measured something; and, as a collective waits for the slowest rank, all
    of them times ``median over steps of (max over ranks / mean over ranks)`` of a whole step.
    """
    line = None
    if own is not None:
        line = [own.num_steps, own.forward_seconds, list(own.backward_seconds.items()), own.step_seconds]
    everyone = yield from shared_lines(line)
    measured = [item for item in everyone if item is not None]
    if not measured:
        raise ProfileMismatchError("no rank has measured a step yet: train a few steps first")
    steps, forward, rows, totals = zip(*measured, strict=True)
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
    )


def measured_step(
    profile: Profile,
    parameters: Sequence[ParameterFacts],
    sparsifier: Sparsifier,
    size: int,
    topology: Topology | None = None,
) -> tuple[Workload, CostModel]:
    """Returns a step of the model and the cost of its buckets, by a profile with backward times."""
    facts = {parameter.name: parameter for parameter in parameters}
    profile.backward_of(list(facts))  # refuses a profile that lacks some
    ordered = [name for name in profile.backward_seconds if name in facts]  # as gradients came, reversed
    times, dense = profile.backward_of(ordered), whole_parameters(parameters)
    workload = Workload(tuple(facts[name] for name in ordered), times, profile.forward_seconds, dense)
    if topology is None or topology.per_host == 1:
        # Horovod sends what waits at the same time as one
        return workload, profile.cost(sparsifier, size, fuse_sparse=True)
    if profile.levels and profile.per_host != topology.per_host:
        raise ProfileMismatchError(
            f"the profile was measured with {profile.per_host} ranks on a host, here are "
            f"{topology.per_host}: run horovod-sparse calibrate with as many"
        )
    return workload, profile.cost(sparsifier, size, levels="host")
