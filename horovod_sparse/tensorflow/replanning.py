"""Changing the buckets of a training: by hand, or by backward times of its first steps.

While times are wanted, a function is traced in a measuring form: a host function takes the time of every
gradient, and synchronization begins when all are there. The plan changes when all ranks call `replan`;
functions have to be traced again then, since a graph's buckets are fixed.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.plans.dense import ClusterFacts
from horovod_sparse.plans.plan import Plan
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.collectives import carry_out_together
from horovod_sparse.tensorflow.graph import HOST, HostFunctions
from horovod_sparse.tensorflow.training import VariablesTraining

if TYPE_CHECKING:
    from horovod_sparse.planning.calibration.steps import BackwardRecorder, BackwardTimes
    from horovod_sparse.planning.request import Decision

_log = logging.getLogger("horovod_sparse")

#: steps whose backward is measured, after the first one, which has no beginning, and one to warm up
_NUM_WARMUP, _NUM_STEPS = 1, 5


class Replanning:
    """What a synchronizer does about its plan: measures backward, and decides when it is asked to."""

    def __init__(self, training: VariablesTraining) -> None:
        self._training, self._lock = training, threading.Lock()
        #: None where no times decide
        self._recorder: BackwardRecorder | None = None
        self._own: BackwardTimes | None = None
        #: steps to measure; while there are any, functions are traced in their measuring form
        self._left = 0

    @property
    def is_measured(self) -> bool:
        """Whether backward times wait for `replan`: from the same step on, on all ranks."""
        return self._recorder is not None and self._left == 0 and self._training.decision is None

    def planned(self) -> None:
        """Variables have got their first buckets: measures, where times decide and no profile has them."""
        request = self._training.request
        if request is not None and request.measures:
            self._own = None
            self._record(_NUM_WARMUP, _NUM_STEPS)
            if self._training.decision is not None:
                self._left = 0

    def stamped(self, gradients: Sequence[Any], by_name: Mapping[str, int], host: HostFunctions) -> list[Any]:
        """The gradients (or None), given on when all are there if times are wanted."""
        given = list(gradients)
        if not self._left:
            return given
        present = {name: i for name, i in by_name.items() if given[i] is not None}

        def stamp(name: str) -> Callable[[Any], list[int]]:
            def arrived(_gradient: Any) -> list[int]:
                now = time.perf_counter()
                with self._lock:
                    if self._left and self._recorder is not None:
                        self._recorder.arrived(name, now, now)
                return [0]

            return arrived

        with tf.device(HOST):
            tokens = [host.run(stamp(name), [given[i]], [tf.int64])[0] for name, i in present.items()]
        with tf.control_dependencies(tokens):
            for i in present.values():
                given[i] = tf.identity(given[i])
        return given

    def after_step(self, went_well: bool) -> None:
        """A synchronization has ended, or was given up, on all ranks."""
        recorder, request = self._recorder, self._training.request
        if recorder is None or request is None:
            return
        with self._lock:
            if not went_well:
                recorder.forget()
            elif self._left:
                recorder.end()
                self._left -= 1
                recorder.begin(time.perf_counter())
                if self._left == 0:
                    if recorder.num_measured > 0:
                        self._own = recorder.times()
                    told = "backward is measured: replan() makes the plan, for functions traced after it (%s)"
                    _log.info(told, request.describe())

    def stop(self) -> None:
        """Measures nothing more by itself: ranks have come or gone, which count their steps otherwise."""
        if self._recorder is not None and self._training.decision is None:
            self._left = 0
            _log.info("the plan stays as it is until all ranks call replan(measure_steps=...)")

    def refuse(self, where: str) -> None:
        """Refuses to need times where none can be measured: with what `where` says."""
        request = self._training.request
        known = request is None or request.complete or self._training.decision is not None
        if request is not None and request.measures and not known:
            raise UnsupportedError(
                f"{request.describe()} needs backward times, and with {where} none can be taken of a single "
                "gradient: give a profile that has them, as decision.profile.save(path) writes it after a "
                "run in a tf.function without"
            )

    def replan(self, plan: Plan | None, measure_steps: int | None) -> None:
        if self._training.under_way:
            raise UnsupportedError("plans change between steps: a step is under way, or was interrupted")
        if plan is not None:
            if not isinstance(plan, Plan):
                raise ArgumentError("plan", plan, "a horovod_sparse.merging.Plan: Plan(buckets, dense)")
            if measure_steps is not None:
                raise ArgumentError("measure_steps", measure_steps, "either it or a plan")
            self._left = 0
            self._training.change_plan(plan)
        elif self._recorder is None:
            raise ArgumentError("plan", plan, "a plan, or merging='optimal' beside the compression")
        elif measure_steps is not None:
            check_count("measure_steps", measure_steps, "a whole number of steps, or leave it out")
            self._record(0, measure_steps)
            self._training.change_plan(self._training.plan)
        else:
            decision = self._decide()
            self._training.change_plan(decision.plan, decision)

    def _decide(self) -> Decision:
        """Plans by what has been measured; all ranks together, between two steps."""
        from horovod_sparse.planning.warmup import decide  # which a training without times needs not

        training: Any = self._training
        request = training.request
        assert request is not None  # there is a recorder
        parameters, topology = training.parameters, training.topology
        cluster = ClusterFacts.of(training.process_set, "tensorflow", hvd)
        where = dataclasses.replace(cluster, topology=topology)
        dtype = max(parameters, key=lambda parameter: parameter.num_elements).dtype
        coroutine = decide(request, where, parameters, training.recipe.sparsifier, self._own, dtype=dtype)
        name = f"{training.engine.label}.planning"
        decision: Decision = carry_out_together(coroutine, training.process_set, name, topology)
        if training.process_set.rank() == 0:
            _log.info("%s", decision)
        return decision

    def _record(self, num_warmup: int, num_steps: int) -> None:
        from horovod_sparse.planning.calibration.steps import BackwardRecorder

        names = [parameter.name for parameter in self._training.parameters]
        with self._lock:
            self._recorder = BackwardRecorder(names, num_warmup=num_warmup, num_steps=num_steps)
            self._left = 1 + num_warmup + num_steps
