"""Backward times of a training's first steps, and the plan that rank 0 makes by them for all ranks."""

from __future__ import annotations

import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from horovod_sparse.checks import check_count
from horovod_sparse.collectives import Synchronization, shared_lines
from horovod_sparse.errors import ProfileMismatchError
from horovod_sparse.planning.calibration import QUICK, BucketMemory, Extent, calibration
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.request import Decision, PlanRequest
from horovod_sparse.plans import ParameterFacts, Plan
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.topology import ClusterFacts
from horovod_sparse.training.agreement import compared
from horovod_sparse.training.collective_errors import raise_together

_log = logging.getLogger("horovod_sparse")
#: steps whose backward is measured, after the first one, which has no beginning, and one to warm up
_NUM_WARMUP, _NUM_STEPS = 1, 5


@dataclass(frozen=True)
class BackwardTimes:
    """Seconds of backward for each parameter, since the gradient before it; medians over steps."""

    #: by parameter, in the order in which gradients came; 0 for those that never came
    backward_seconds: Mapping[str, float]
    #: from the end of one step to the first gradient of the next
    forward_seconds: float
    #: forward and backward of each step, where that is known
    step_seconds: tuple[float, ...] = ()


class BackwardRecorder:
    """Records when gradients are computed in a few steps, and returns median times.

    A stamp is what tells a time: seconds of a clock, or an event of a device. Between two gradients lies
    the time from where the work for the one ended to where that for the other begins: so folding and
    selecting are not counted as backward, but what a hook costs that starts nothing is.
    """

    def __init__(self, names: Sequence[str], num_warmup: int, between: Callable[[Any, Any], float]) -> None:
        self._to_skip, self._between = num_warmup, between
        self._begun: Any = None
        self._stamps: list[tuple[str, Any, Any]] = []
        #: of every step after the warm-up
        self.forward_seconds: list[float] = []
        self._totals: list[float] = []
        #: by name: the seconds before its gradient, and its place, in every step
        self._rows: dict[str, list[tuple[float, int]]] = {name: [] for name in names}

    def begin(self, stamp: Any) -> None:
        """Begins to record a step, before its forward pass."""
        self._begun, self._stamps = stamp, []

    def arrived(self, name: str, entered: Any, left: Any) -> None:
        self._stamps.append((name, entered, left))

    def forget(self) -> None:
        """Discards the times of a step that was cancelled."""
        self._begun, self._stamps = None, []

    def end(self) -> None:
        """Ends a step after its last gradient, and adds its times."""
        before, stamps = self._begun, self._stamps
        self.forget()
        if before is None or not stamps:
            return  # the first step has no beginning
        if self._to_skip > 0:
            self._to_skip -= 1
            return
        total = 0.0
        for place, (name, entered, left) in enumerate(stamps):
            seconds = max(0.0, float(self._between(before, entered)))
            total += seconds
            if place == 0:
                # the end of forward is unknown, but nothing is sent before, so it does not matter
                self.forward_seconds.append(seconds)
            self._rows[name].append((seconds if place else 0.0, place))
            before = left
        self._totals.append(total)

    def times(self) -> BackwardTimes:
        """Returns the medians over the recorded steps.

        What delays another gradient in every step (a rank that had to leave its core to others) is in no
        gradient's median; so all are scaled by the same factor to the median of whole steps.
        """
        if not self.forward_seconds:
            raise ProfileMismatchError("no backward times are measured yet: train a few steps first")
        never = (0.0, len(self._rows))
        # parameters without a gradient are started in the end, as the model's first
        medians = {
            name: [statistics.median(values) for values in zip(*(row or [never]), strict=True)]
            for name, row in reversed(self._rows.items())
        }
        order = sorted(medians, key=lambda name: medians[name][1])
        forward = statistics.median(self.forward_seconds)
        found = forward + sum(seconds for seconds, _ in medians.values())
        scale = statistics.median(self._totals) / found if found else 1.0
        backward = {name: scale * medians[name][0] for name in order}
        return BackwardTimes(backward, scale * forward, tuple(self._totals))


def mean_times(own: BackwardTimes | None) -> Synchronization[BackwardTimes]:
    """Returns the means over ranks of backward times, equal on all ranks.

    Means over the ranks that have measured something; and, as a collective waits for the slowest rank, all
    of them times ``median over steps of (max over ranks / mean over ranks)`` of a whole step.
    """
    line = own and [own.forward_seconds, list(own.backward_seconds.items()), own.step_seconds]
    measured = [item for item in (yield from shared_lines(line)) if item is not None]
    if not measured:
        raise ProfileMismatchError("no rank has measured backward times yet: train a few steps first")
    forward, rows, totals = zip(*measured, strict=True)
    ratios = [max(step) / statistics.fmean(step) for step in zip(*totals, strict=False) if any(step)]
    slowest = statistics.median(ratios or [1.0])
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for place, (name, value) in enumerate(row):
            found.setdefault(name, []).append((place, value))
    means = {name: list(map(statistics.fmean, zip(*rows, strict=True))) for name, rows in found.items()}
    order = sorted(means, key=lambda name: means[name][0])
    backward = {name: slowest * means[name][1] for name in order}
    return BackwardTimes(backward, slowest * statistics.fmean(forward))


def with_times(profile: Profile, times: BackwardTimes | None) -> Synchronization[Profile]:
    """Returns the profile with the backward times' means over ranks."""
    measured = yield from mean_times(times)
    backward = dict(reversed(list(measured.backward_seconds.items())))
    return dataclasses.replace(profile, backward_seconds=backward, forward_seconds=measured.forward_seconds)


def decide(
    request: PlanRequest,
    where: ClusterFacts,
    parameters: Sequence[ParameterFacts],
    sparsifier: Sparsifier,
    times: BackwardTimes | None,
    *,
    memory: BucketMemory | None = None,
    extent: Extent = QUICK,
    dtype: str = "float32",
    starting_seconds: Callable[[], float] = lambda: 0.0,
) -> Synchronization[Decision]:
    """Averages times over ranks, measures missing ones, and returns rank 0's plan on all ranks.

    A coroutine that all ranks run together, between two steps. Every rank enters every collective in it: an
    error of one rank alone is told to the others, and all raise.
    """
    yield from compared(request.describe())
    if request.failure is not None:
        raise request.failure
    if request.profile is None:
        more: dict[str, Any] = {"memory": memory, "dtype": dtype, "starting_seconds": starting_seconds}
        profile = yield from calibration(where, [sparsifier], extent=extent, topology=where.topology, **more)
    else:
        profile = request.profile
        profile.check(where)  # refuses what cannot be applied
    if not profile.backward_seconds:
        profile = yield from with_times(profile, times)
    told, failure = None, None
    if where.rank == 0:
        try:
            decision = request.decided(where, parameters, sparsifier, profile)
            told = [decision.plan.to_dict(), dict(decision.predicted_seconds)]
        except Exception as error:
            failure = error
    yield from raise_together(failure)
    (plan, predicted), *_ = yield from shared_lines(told)
    decision = Decision(Plan.from_dict(plan), request.asked, predicted, profile)
    if where.rank == 0:
        _log.info("%s", decision)
    return decision


#: makes the coroutine `decide` of facts of the cluster, and of `memory`, `dtype` and `starting_seconds`
Decide: TypeAlias = Callable[..., Synchronization[Decision]]


class HostStamps:
    """Takes times from the host's clock, which is right for gradients computed on the CPU."""

    def now(self) -> Any:
        return time.perf_counter()

    def seconds_between(self, start: Any, stop: Any) -> float:
        return float(stop - start)


class WarmUp:
    """Measures backward times in a training's first steps, then makes the plan by them.

    Ranks count synchronizations, which are the same on all of them; so all decide after the same one,
    whatever each has measured. In elastic training, where a worker that joins counts anew, all ranks call
    `decide_now` together.
    """

    def __init__(
        self,
        request: PlanRequest,
        parameters: Sequence[ParameterFacts],
        sparsifier: Sparsifier,
        carry_out: Callable[[Decide], Decision],
        stamps: HostStamps,
        decision: Decision | None = None,
    ) -> None:
        self.request, self.decision, self.stamp = request, decision, stamps.now
        self._parameters, self._sparsifier, self._carry_out = list(parameters), sparsifier, carry_out
        self._recorder: BackwardRecorder | None = None
        self._own: BackwardTimes | None = None
        self._between, self._left = stamps.seconds_between, 0
        #: True while hooks have to record times
        self.recording = False
        #: True from the step on, the same on all ranks, after which `decide_now` may be called
        self.is_measured = False
        self._decides = os.environ.get("HOROVOD_ELASTIC") != "1"
        if request.measures and decision is None:
            if not self._decides:
                _log.warning(
                    "in elastic training the plan stays the default one until all ranks call "
                    "optimizer.replan(): workers that join have not measured what the others have"
                )
            self._record(1 + _NUM_WARMUP + _NUM_STEPS, _NUM_WARMUP)

    @property
    def position(self) -> str:
        """The number of steps until the plan is made, as text that ranks compare."""
        return str(self._left if self._decides else 0)

    def arrived(self, name: str, entered: Any, left: Any) -> None:
        """Records a gradient, whose hook began at `entered` and ended at `left`."""
        if self._recorder is not None:
            self._recorder.arrived(name, entered, left)

    def measure(self, num_steps: int) -> None:
        """Begins to measure `num_steps` further steps; all ranks call it in the same step."""
        check_count("measure_steps", num_steps, "a whole number of steps, or leave it out")
        self._record(num_steps, 0).begin(self.stamp())
        self._decides = True

    def restart_measuring(self, parameters: Sequence[ParameterFacts]) -> None:
        """Measures anew after parameters were added on all ranks, unless the plan has been made."""
        self._parameters, self._own = list(parameters), None
        if self._recorder is not None or self.is_measured:
            self._record(1 + _NUM_WARMUP + _NUM_STEPS, _NUM_WARMUP)

    def after_step(self) -> Plan | None:
        """Ends the record of a step; returns the new plan after the last measured step, else None."""
        if self._recorder is None:
            return None
        self._recorder.end()
        self._left -= 1
        if self._left > 0:
            self._recorder.begin(self.stamp())
            return None
        self._finish_recording()
        self.is_measured = True
        if self._decides:
            return self.decide_now().plan
        _log.info("backward times are measured: call replan() to make the plan (%s)", self.request.asked)
        return None

    def stop_measuring(self) -> None:
        """Stops measuring on all ranks: a rank joined late, and has not measured the same steps."""
        if self._recorder is not None:
            _log.warning(
                "the plan stays what it is, since workers have come that have not measured what the others "
                "have: call replan() on all ranks to plan anew"
            )
        self.is_measured = False
        self._finish_recording()

    def stop(self) -> None:
        """Stops measuring, and discards a decision, because the user gave a plan."""
        self.decision, self.is_measured = None, False
        self._finish_recording()

    def forget_step(self) -> None:
        """Discards the times of a step that was cancelled on all ranks."""
        if self._recorder is not None:
            self._recorder.forget()

    def decide_now(self) -> Decision:
        """Makes the plan by the times measured so far; all ranks call it together, between two steps."""
        self._finish_recording()

        def made(cluster: ClusterFacts, **arguments: Any) -> Synchronization[Decision]:
            return decide(self.request, cluster, self._parameters, self._sparsifier, self._own, **arguments)

        self.decision, self.is_measured = self._carry_out(made), False
        return self.decision

    def _record(self, num_steps: int, num_warmup: int) -> BackwardRecorder:
        names = [parameter.name for parameter in self._parameters]
        self._recorder, self._left = BackwardRecorder(names, num_warmup, self._between), num_steps
        self.is_measured, self.recording = False, True
        return self._recorder

    def _finish_recording(self) -> None:
        """Stops recording, and keeps the medians for the decision."""
        if self._recorder is not None and self._recorder.forward_seconds:
            self._own = self._recorder.times()
        self._recorder, self._left, self.recording = None, 0, False
