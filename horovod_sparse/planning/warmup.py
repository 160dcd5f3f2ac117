"""From the first steps' backward times to a plan that rank 0 makes and all ranks take at the same step."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from horovod_sparse.checks import check_count
from horovod_sparse.collectives import Synchronization, shared_lines
from horovod_sparse.planning.calibration import QUICK, Extent, calibration
from horovod_sparse.planning.calibration.buckets import BucketMemory
from horovod_sparse.planning.calibration.steps import BackwardRecorder, BackwardTimes, mean_times
from horovod_sparse.planning.first_plan import asked_of
from horovod_sparse.planning.request import Decision, PlanRequest, plan_by_times
from horovod_sparse.plans.dense import ClusterFacts
from horovod_sparse.plans.plan import ParameterFacts, Plan
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.topology import Topology
from horovod_sparse.training.agreement import compared
from horovod_sparse.training.collective_errors import raise_together

_log = logging.getLogger("horovod_sparse")


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
    """Agrees on the measured times, measures what is missing, plans on rank 0, and tells all ranks.

    A coroutine that all ranks run together, between two steps. Every rank enters every collective in it: an
    error of one rank alone is told to the others, and all raise.
    """
    yield from compared(asked_of(request))
    if request.failure is not None:
        raise request.failure
    if request.profile is None:
        profile = yield from calibration(
            where,
            [sparsifier],
            extent=extent,
            memory=memory,
            dtype=dtype,
            starting_seconds=starting_seconds,
            topology=where.topology,
        )
    else:
        profile = request.profile
        profile.check(size=where.size, framework=where.framework)  # refuses what cannot be applied
    if not profile.backward_seconds:
        measured = yield from mean_times(times)
        profile = dataclasses.replace(
            profile,
            backward_seconds=dict(reversed(list(measured.backward_seconds.items()))),
            forward_seconds=measured.forward_seconds,
        )
    decision, failure = None, None
    if where.rank == 0:
        try:
            decision = plan_by_times(request, where, parameters, sparsifier, profile)
        except Exception as error:
            failure = error
    yield from raise_together(failure)
    told = None
    if decision is not None:
        told = [decision.plan.to_dict(), dict(decision.predicted_seconds)]
    everyone = yield from shared_lines(told)
    plan, predicted = everyone[0]
    return Decision(Plan.from_dict(plan), request.describe(), predicted, profile)


Decide: TypeAlias = Callable[..., Synchronization[Decision]]

#: steps whose backward is measured, after the first one, which has no beginning, and one to warm up
_NUM_WARMUP, _NUM_STEPS = 1, 5


class Measuring(Protocol):
    """The clock of a front end, and its way to carry out a coroutine with all ranks."""

    def now(self) -> Any:
        """Returns a stamp without waiting for the device."""

    def seconds_between(self, start: Any, stop: Any) -> float:
        """Returns the seconds from one stamp to another; may wait for the device."""

    def decided(
        self, parameters: Sequence[ParameterFacts], topology: Topology | None, decide: Decide
    ) -> Decision:
        """Carries out, with all ranks, the coroutine that `decide` makes.

        It takes facts of the cluster, and of `planning.warmup.decide` the keyword arguments `memory`,
        `dtype` and `starting_seconds`.
        """

    @property
    def rank(self) -> int:
        """The rank of this process; rank 0 logs the decision."""


class WarmUp:
    """Measures backward in a training's first steps, and then decides about the plan.

    Ranks count synchronizations, which are the same on all of them; so all decide after the same one,
    whatever each has measured. Not in elastic training, where a worker that joins counts anew: there a
    plan is made by times when `decide_now` is called, by all together.
    """

    def __init__(
        self,
        request: Any,
        parameters: Sequence[ParameterFacts],
        sparsifier: Sparsifier,
        measuring: Measuring,
        topology: Callable[[], Topology | None] = lambda: None,
        decision: Decision | None = None,
    ) -> None:
        self.request, self.decision, self._topology = request, decision, topology
        self._parameters, self._sparsifier, self._measuring = list(parameters), sparsifier, measuring
        self._recorder: BackwardRecorder | None = None
        self._own: BackwardTimes | None = None
        self._left = 0
        elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        if not request.measures or decision is not None:
            return
        if elastic:
            _log.warning(
                "in elastic training the plan stays the default one until all ranks call optimizer.replan(): "
                "workers that join have not measured what the others have"
            )
        self._record(_NUM_WARMUP, _NUM_STEPS)
        self._left = 0 if elastic else 1 + _NUM_WARMUP + _NUM_STEPS

    @property
    def recording(self) -> bool:
        """True while hooks have to take stamps."""
        return self._recorder is not None

    def stamp(self) -> Any:
        """Returns a stamp of the present time."""
        return self._measuring.now()

    def arrived(self, name: str, entered: Any, left: Any) -> None:
        """Records that a gradient is complete; its hook ran between the two stamps."""
        if self._recorder is not None:
            self._recorder.arrived(name, entered, left)

    def measure(self, num_steps: int) -> None:
        """Measures `num_steps` further steps and decides after them; all ranks begin together."""
        check_count("measure_steps", num_steps, "a whole number of steps, or leave it out")
        self._record(0, num_steps)
        self._left = num_steps
        self._begin()

    def joined(self, parameters: Sequence[ParameterFacts]) -> None:
        """Measures anew after parameters have joined on all ranks."""
        self._parameters, self._own = list(parameters), None
        if self._recorder is not None:
            counting = self._left > 0
            self._record(_NUM_WARMUP, _NUM_STEPS)
            self._left = 1 + _NUM_WARMUP + _NUM_STEPS if counting else 0

    def after_step(self) -> Plan | None:
        """Records a step that has ended on all ranks; returns another plan if one was decided."""
        if self._recorder is None:
            return None
        self._recorder.end()
        if self._left == 0 and self._recorder.done:
            self._keep()
        if self._left == 1:
            return self.decide_now().plan
        self._left = max(0, self._left - 1)
        self._begin()
        return None

    @property
    def position(self) -> str:
        """The steps left to measure, as text; ranks compare it."""
        return str(self._left)

    def stop_measuring(self) -> None:
        """Stops measuring on all ranks, because some rank has measured other steps."""
        _log.warning(
            "the plan stays what it is, since workers have come that have not measured what the others have: "
            "call optimizer.replan() on all ranks to measure and plan anew"
        )
        self._keep()

    def stop(self) -> None:
        """Stops measuring and drops the decision, because the user has given a plan."""
        self._keep()
        self.decision = None

    def given_up(self) -> None:
        """Drops the stamps of a step that all ranks have cancelled."""
        if self._recorder is not None:
            self._recorder.forget()

    def decide_now(self) -> Decision:
        """Plans by the measured times; all ranks together, between two steps."""
        self._keep()

        def coroutine(cluster: ClusterFacts, **arguments: Any) -> Synchronization[Decision]:
            return decide(self.request, cluster, self._parameters, self._sparsifier, self._own, **arguments)

        self.decision = self._measuring.decided(self._parameters, self._topology(), coroutine)
        self.tell()
        return self.decision

    def tell(self) -> None:
        """Logs the decision on rank 0."""
        if self.decision is not None and self._measuring.rank == 0:
            _log.info("%s", self.decision)

    def _record(self, num_warmup: int, num_steps: int) -> None:
        names = [parameter.name for parameter in self._parameters]
        self._recorder = BackwardRecorder(
            names, num_warmup=num_warmup, num_steps=num_steps, seconds_between=self._measuring.seconds_between
        )

    def _begin(self) -> None:
        if self._recorder is not None:
            self._recorder.begin(self._measuring.now())

    def _keep(self) -> None:
        """Takes the medians and stops recording."""
        if self._recorder is not None and self._recorder.num_measured > 0:
            self._own = self._recorder.times()
        self._recorder, self._left = None, 0
