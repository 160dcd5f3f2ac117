"""From the first steps' backward times to a plan that all ranks take at the same step."""

from __future__ import annotations

import dataclasses
import logging
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from horovod_sparse.checks import check_count
from horovod_sparse.collectives import Synchronization
from horovod_sparse.planning.calibration.backward_times import BackwardRecorder, BackwardTimes
from horovod_sparse.planning.correction import probe_of
from horovod_sparse.planning.decision import decide
from horovod_sparse.planning.request import Decision
from horovod_sparse.plans.dense import ClusterFacts
from horovod_sparse.plans.plan import ParameterFacts, Plan
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.topology import Topology

Decide: TypeAlias = Callable[..., Synchronization[Decision]]

_log = logging.getLogger("horovod_sparse")

#: steps whose backward is measured, after the first one, which has no beginning, and one to warm up
_NUM_WARMUP, _NUM_STEPS = 1, 5
#: then steps under a plan of many buckets, after one that fills their memory
_PROBE_STEPS = 3


class Measuring(Protocol):
    """What a front end gives to be measured by."""

    def now(self) -> Any:
        """A stamp; waits for nothing."""

    def seconds_between(self, start: Any, stop: Any) -> float:
        """Of two stamps; may wait for them."""

    def decided(
        self, parameters: Sequence[ParameterFacts], topology: Topology | None, decide: Decide
    ) -> Decision:
        """Carries out, with all ranks, the coroutine that `decide` makes.

        It takes facts of the cluster, and of `planning.decision.decide` the keyword arguments `memory`,
        `dtype` and `starting_seconds`.
        """

    @property
    def rank(self) -> int:
        """Of this process; the first one tells what was decided."""


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
        self._measured_under: Plan | None = None
        self._left = 0
        #: asked for by a schedule in the recorded steps
        self._densities: list[float] = []
        # end of the last step under the probe, and its iterations so far; None where there is none
        self._probe: tuple[Any, list[float]] | None = None
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
        """Whether hooks shall take stamps."""
        return self._recorder is not None

    def stamp(self) -> Any:
        """The time, here and now."""
        return self._measuring.now()

    def arrived(self, name: str, entered: Any, left: Any) -> None:
        """A gradient is complete; what it set off was done between these stamps."""
        if self._recorder is not None:
            self._recorder.arrived(name, entered, left)

    def measure(self, num_steps: int) -> None:
        """Measures so many further steps, and decides after them; all ranks begin together."""
        check_count("measure_steps", num_steps, "a whole number of steps, or leave it out")
        self._record(0, num_steps)
        self._left = num_steps
        self._begin()

    def joined(self, parameters: Sequence[ParameterFacts]) -> None:
        """Parameters have joined, on all ranks: what was measured without them decides nothing."""
        self._parameters, self._own = list(parameters), None
        if self._recorder is not None or self._probe is not None:
            counting = self._left > 0 or self._probe is not None
            self._probe = None
            self._record(_NUM_WARMUP, _NUM_STEPS)
            self._left = 1 + _NUM_WARMUP + _NUM_STEPS if counting else 0

    def after_step(self, plan: Plan, step: int) -> Plan | None:
        """A synchronization under this plan has ended on all ranks."""
        if self._probe is not None:
            return self._after_probe(*self._probe)
        if self._recorder is None:
            return None
        self._recorder.end(self._measuring.now())
        self._measured_under = plan
        if self._sparsifier.schedule is not None:
            final = self._sparsifier.density if plan.density is None else plan.density
            self._densities.append(self._sparsifier.schedule.density_at(step - 1, final))
        if self._left == 0 and self._recorder.done:
            self._keep()
        if self._left == 1:
            self._keep()
            probe = probe_of(plan, self._topology()) if self.request.profile is None else None
            if probe is None:
                return self.decide_now().plan
            self._probe = None, []
            return probe
        self._left = max(0, self._left - 1)
        self._begin()
        return None

    def _after_probe(self, begun: Any, iterations: list[float]) -> Plan | None:
        """A step under the plan of many buckets has ended."""
        now = self._measuring.now()
        if begun is not None:
            iterations.append(self._measuring.seconds_between(begun, now))
        self._probe = now, iterations
        if len(iterations) < _PROBE_STEPS:
            return None
        if self._own is not None:
            self._own = dataclasses.replace(self._own, probe_seconds=statistics.median(iterations))
        return self.decide_now().plan

    @property
    def position(self) -> str:
        """How far measuring has come; ranks that go on together have come equally far."""
        return f"{self._left} {-1 if self._probe is None else len(self._probe[1])}"

    def stop_measuring(self) -> None:
        """Some rank has not measured what the others have: none goes on, and nothing is decided."""
        _log.warning(
            "the plan stays what it is, since workers have come that have not measured what the others have: "
            "call optimizer.replan() on all ranks to measure and plan anew"
        )
        self._keep()

    def stop(self) -> None:
        """Decides nothing more by itself: the user has given a plan."""
        self._keep()
        self.decision = None

    def given_up(self) -> None:
        """A step has been given up, on all ranks."""
        if self._probe is not None:
            self._probe = None, self._probe[1]
        if self._recorder is not None:
            self._recorder.forget()

    def decide_now(self) -> Decision:
        """Plans by what has been measured; all ranks together, between two steps."""
        self._keep()

        def coroutine(cluster: ClusterFacts, **arguments: Any) -> Synchronization[Decision]:
            return decide(
                self.request,
                cluster,
                self._parameters,
                self._sparsifier,
                self._own,
                current=self._measured_under,
                current_density=statistics.median(self._densities) if self._densities else None,
                **arguments,
            )

        self.decision = self._measuring.decided(self._parameters, self._topology(), coroutine)
        self.tell()
        return self.decision

    def tell(self) -> None:
        """Says once, on the first rank, what plan was taken and why."""
        if self.decision is not None and self._measuring.rank == 0:
            _log.info("%s", self.decision)

    def _record(self, num_warmup: int, num_steps: int) -> None:
        names = [parameter.name for parameter in self._parameters]
        self._densities = []
        self._recorder = BackwardRecorder(
            names,
            num_warmup=num_warmup,
            num_steps=num_steps,
            seconds_between=self._measuring.seconds_between,
        )

    def _begin(self) -> None:
        if self._recorder is not None:
            self._recorder.begin(self._measuring.now())

    def _keep(self) -> None:
        """Takes the medians and stops recording."""
        if self._recorder is not None and self._recorder.num_measured > 0:
            self._own = self._recorder.times()
        self._recorder, self._left, self._probe = None, 0, None
