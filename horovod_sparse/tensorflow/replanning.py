"""Changing the buckets of a training: by hand, or by backward times of its first steps.

Python sees nothing of a graph's steps but what the graph calls. So while times are wanted, a function is
traced in a measuring form: every gradient is given to a host function that takes the time, as soon as it is
there, and synchronization begins only when all of them are. So what is measured is backward alone, with
nothing under way beside it. The plan changes when all ranks call `replan`; functions have to be traced
again then, since a graph's buckets are fixed.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.frontend.calibration.backward_times import BackwardRecorder, BackwardTimes
from horovod_sparse.frontend.decision import Decision, decide
from horovod_sparse.frontend.plan_request import PlanRequest
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.tensorflow.bucketing import Bucketing
from horovod_sparse.tensorflow.calibration import carry_out_together, where_of
from horovod_sparse.tensorflow.graph import HOST, HostFunctions
from horovod_sparse.topology import Topology

_log = logging.getLogger("horovod_sparse")

#: steps whose backward is measured, after the first one, which has no beginning, and one to warm up
_NUM_WARMUP, _NUM_STEPS = 1, 5


class WarmUp:
    """Measures backward in a training's first steps, and decides about the plan when it is asked to.

    Args:
        request: what the arguments of the tape or optimizer ask for.
        parameters: the variables, in the order in which the model uses them.
        sparsifier: that the buckets have.
        process_set: the ranks.
        name: of collectives.
        topology: tells which ranks share a host, where their gradients are summed first.

    Attributes:
        recording: whether functions shall be traced in their measuring form.
    """

    def __init__(
        self,
        request: PlanRequest,
        parameters: Sequence[ParameterFacts],
        sparsifier: Sparsifier,
        process_set: Any,
        name: str,
        topology: Callable[[], Topology | None] = lambda: None,
    ) -> None:
        self.request, self._topology = request, topology
        self._parameters, self._sparsifier = list(parameters), sparsifier
        self._process_set, self._name = process_set, name
        self._lock = threading.Lock()
        self._own: BackwardTimes | None = None
        self._record(_NUM_WARMUP, _NUM_STEPS)

    @property
    def is_measured(self) -> bool:
        """Whether enough steps have been taken: after the same one on all ranks."""
        return self._left == 0

    def measure(self, num_steps: int) -> None:
        """Measures so many further steps, in functions that are traced from now on.

        Raises:
            ArgumentError: if it is no number of steps.
        """
        check_count("measure_steps", num_steps, "a whole number of steps, or leave it out")
        self._record(0, num_steps)

    def stop(self) -> None:
        """Measures nothing more by itself."""
        with self._lock:
            self._left, self.recording = 0, False

    def stamped(
        self, gradients: Sequence[tf.Tensor], names: Sequence[str], host: HostFunctions
    ) -> list[tf.Tensor]:
        """The gradients, given on when all of them are there; each one's time is taken before.

        Args:
            gradients: of the variables, in a graph.
            names: of the variables.
            host: keeps the host functions.
        """

        def stamp(name: str) -> Any:
            def arrived(_gradient: Any) -> list[Any]:
                self._arrived(name)
                return [0]

            return arrived

        with tf.device(HOST):
            tokens = [
                host.run(stamp(name), [gradient], [tf.int64])[0]
                for gradient, name in zip(gradients, names, strict=True)
            ]
        with tf.control_dependencies(tokens):
            return [tf.identity(gradient) for gradient in gradients]

    def after_step(self) -> None:
        """A synchronization has ended on all ranks."""
        with self._lock:
            if self._left == 0:
                return
            self._recorder.end()
            self._left -= 1
            self._recorder.begin(time.perf_counter())
            if self._left == 0:
                self.recording = False
                if self._recorder.num_measured > 0:
                    self._own = self._recorder.times()
                _log.info(
                    "backward is measured: replan() makes the plan, for functions traced after it (%s)",
                    self.request.describe(),
                )

    def given_up(self) -> None:
        """A step has been given up, on all ranks."""
        with self._lock:
            self._recorder.forget()

    def decide(self) -> Decision:
        """Plans by what has been measured; all ranks together, between two steps.

        Raises:
            ProfileMismatchError: on every rank alike; see `horovod_sparse.frontend.decide`.
        """
        largest = max(self._parameters, key=lambda parameter: parameter.num_elements)
        topology = self._topology()
        coroutine = decide(
            self.request,
            dataclasses.replace(where_of(self._process_set), topology=topology),
            self._parameters,
            self._sparsifier,
            self._own,
            dtype=largest.dtype,
        )
        # called by all ranks, and so together in elastic training, too
        with tf.device(HOST):
            decision: Decision = carry_out_together(
                coroutine, self._process_set, f"{self._name}.planning", topology=topology
            )
        if self._process_set.rank() == 0:
            _log.info("%s", decision)
        return decision

    def _arrived(self, name: str) -> None:
        now = time.perf_counter()
        with self._lock:
            if self._left:
                self._recorder.arrived(name, now, now)

    def _record(self, num_warmup: int, num_steps: int) -> None:
        names = [parameter.name for parameter in self._parameters]
        self._recorder = BackwardRecorder(names, num_warmup=num_warmup, num_steps=num_steps)
        self._left, self.recording = 1 + num_warmup + num_steps, True


class Replanning:
    """What a synchronizer does about its plan.

    Args:
        bucketing: of the synchronizer.
        sparsifier: that they have.
        process_set: the ranks.
    """

    def __init__(self, bucketing: Bucketing, sparsifier: Sparsifier, process_set: Any) -> None:
        self._bucketing, self._sparsifier = bucketing, sparsifier
        self._process_set = process_set
        self._warmup: WarmUp | None = None

    @property
    def is_measured(self) -> bool:
        """Whether backward times wait for `replan`: from the same step on, on all ranks."""
        return self._warmup is not None and self._warmup.is_measured and self._bucketing.decision is None

    def planned(self) -> None:
        """Variables have got their first buckets: measures, where times decide and no profile has them."""
        request = self._bucketing.request
        if request is not None and request.measures:
            self._warmup = WarmUp(
                request,
                self._bucketing.parameters,
                self._sparsifier,
                self._process_set,
                self._bucketing.label,
                lambda: self._bucketing.topology,
            )
            if self._bucketing.decision is not None:
                self._warmup.stop()

    def stamped(self, gradients: Sequence[Any], by_name: Mapping[str, int], host: HostFunctions) -> list[Any]:
        """The gradients, their times taken if that is wanted.

        Args:
            gradients: None where there is none.
            by_name: positions of those that have buckets, by the names of their variables.
            host: keeps the host functions.
        """
        given = list(gradients)
        if self._warmup is not None and self._warmup.recording:
            present = {name: i for name, i in by_name.items() if given[i] is not None}
            stamped = self._warmup.stamped([given[i] for i in present.values()], list(present), host)
            for i, gradient in zip(present.values(), stamped, strict=True):
                given[i] = gradient
        return given

    def after_step(self, went_well: bool) -> None:
        """A synchronization has ended, or was given up, on all ranks."""
        if self._warmup is not None:
            (self._warmup.after_step if went_well else self._warmup.given_up)()

    def stop(self) -> None:
        """Measures nothing more by itself: ranks have come or gone, which count their steps otherwise."""
        if self._warmup is not None and self._bucketing.decision is None:
            self._warmup.stop()
            _log.info("the plan stays as it is until all ranks call replan(measure_steps=...)")

    def refuse(self, where: str) -> None:
        """Refuses to need times where none can be measured.

        Args:
            where: that is, in words.

        Raises:
            UnsupportedError: if times are needed, and not known yet.
        """
        request = self._bucketing.request
        if (
            request is None
            or not request.measures
            or request.complete
            or self._bucketing.decision is not None
        ):
            return
        raise UnsupportedError(
            f"{request.describe()} needs backward times, and with {where} none can be taken of a single "
            "gradient: give a profile that has them, as decision.profile.save(path) writes it after a run "
            "in a tf.function without"
        )

    def replan(self, plan: Plan | None, measure_steps: int | None) -> None:
        """See `GradientSynchronizer.replan`."""
        if any(part.task.under_way for part in self._bucketing.parts):
            raise UnsupportedError("plans change between steps: a step is under way, or was interrupted")
        if plan is not None:
            if measure_steps is not None:
                raise ArgumentError("measure_steps", measure_steps, "either it or a plan")
            if self._warmup is not None:
                self._warmup.stop()
            self._bucketing.replan(plan)
        elif self._warmup is None:
            raise ArgumentError("plan", plan, "a plan, or merging='optimal' beside the compression")
        elif measure_steps is not None:
            self._warmup.measure(measure_steps)
            self._bucketing.replan(self._bucketing.plan)
        else:
            decision = self._warmup.decide()
            self._bucketing.replan(decision.plan, decision)
