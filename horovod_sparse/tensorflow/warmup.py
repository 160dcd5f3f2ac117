"""Backward times of the first steps, as a graph tells them, and the plan that is made of them.

Python sees nothing of a graph's steps but what the graph calls. So while times are wanted, a function is
traced in a measuring form: every gradient is given to a host function that takes the time, as soon as it is
there, and synchronization begins only when all of them are. So what is measured is backward alone, with
nothing under way beside it. The plan changes when all ranks call `replan`; functions have to be traced
again then, since a graph's buckets are fixed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.checks import check_count
from horovod_sparse.frontend.calibration.backward_times import BackwardRecorder, BackwardTimes
from horovod_sparse.frontend.decision import Decision, decide
from horovod_sparse.frontend.plan_request import PlanRequest
from horovod_sparse.merging import ParameterFacts
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.tensorflow.calibration import carry_out_together, where_of
from horovod_sparse.tensorflow.graph import HOST, HostFunctions

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
    ) -> None:
        self.request = request
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
        coroutine = decide(
            self.request,
            where_of(self._process_set),
            self._parameters,
            self._sparsifier,
            self._own,
            dtype=largest.dtype,
        )
        # called by all ranks, and so together in elastic training, too
        with tf.device(HOST):
            decision: Decision = carry_out_together(coroutine, self._process_set, f"{self._name}.planning")
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
