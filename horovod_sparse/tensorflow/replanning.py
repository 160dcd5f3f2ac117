"""Changes the buckets of a training: by hand, or by backward times of its first steps.

While times are wanted, a function is traced in a measuring form: a host function takes the time of every
gradient, and synchronization begins when all are there. The plan changes when all ranks call `replan`;
functions have to be traced again then, since a graph's buckets are fixed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.plans import Plan
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.collectives import carry_out_together
from horovod_sparse.tensorflow.graph import HOST, HostFunctions
from horovod_sparse.tensorflow.training import VariablesTraining
from horovod_sparse.topology import ClusterFacts
from horovod_sparse.training.agreement import AgreedStatus

if TYPE_CHECKING:
    from horovod_sparse.planning.request import Decision
    from horovod_sparse.planning.warmup import Decide, WarmUp


class PlannedTraining(VariablesTraining):
    """Measures backward for its plan, and changes the plan when it is asked to."""

    #: None where no times decide
    warmup: WarmUp | None = None

    def measure(self) -> None:
        """Starts to measure, after buckets were made, if the plan needs times that no profile holds."""
        if self.warmup is not None:
            self.warmup.measure_anew(self.parameters)
        elif self.request is not None and self.request.measures:
            from horovod_sparse.planning.warmup import HostStamps, WarmUp

            more: Any = {"decision": self.decision, "automatic": False}
            asked = self.request, self.parameters, self.recipe.sparsifier
            self.warmup = WarmUp(*asked, self._decide_with_all_ranks, HostStamps(), **more)

    def start_anew(self, start: AgreedStatus) -> None:
        super().start_anew(start)
        if self.warmup is not None:  # ranks that have come count their steps otherwise
            self.warmup.stop_measuring()

    def stamped(self, gradients: Mapping[str, Any], host: HostFunctions) -> Mapping[str, Any]:
        """Returns gradients by name; while times are measured, notes when each comes, without None."""
        warmup = self.warmup
        if warmup is None or not warmup.recording:
            return gradients
        present = {name: gradient for name, gradient in gradients.items() if gradient is not None}

        def stamp(name: str) -> Callable[[Any], list[int]]:
            def arrived(_gradient: Any) -> list[int]:
                now = warmup.stamp()
                warmup.arrived(name, now, now)
                return [0]

            return arrived

        with tf.device(HOST):
            tokens = [host.run(stamp(name), [one], [tf.int64])[0] for name, one in present.items()]
        with tf.control_dependencies(tokens):
            return {name: tf.identity(one) for name, one in present.items()}

    def refuse_to_measure(self, where: str) -> None:
        """Raises if times are needed where a step shows none of a single gradient."""
        request = self.request
        if request is not None and request.measures and not request.has_times and self.decision is None:
            raise UnsupportedError(
                f"{request.describe()} needs backward times, and with {where} none can be taken of a single "
                "gradient: give a profile that has them, as decision.profile.save(path) writes it after a "
                "run in a tf.function without"
            )

    def plan_anew(self, plan: Plan | None, measure_steps: int | None) -> None:
        """Takes a plan, or decides for one by what was measured; see `WithState.replan`."""
        if self.under_way:
            raise UnsupportedError("plans change between steps: a step is under way, or was interrupted")
        if plan is not None:
            if not isinstance(plan, Plan):
                raise ArgumentError("plan", plan, "a horovod_sparse.merging.Plan: Plan(buckets, dense)")
            if measure_steps is not None:
                raise ArgumentError("measure_steps", measure_steps, "measure_steps or a plan, not both")
            if self.warmup is not None:
                self.warmup.stop()
            self.change_plan(plan)
        elif self.warmup is None:
            raise ArgumentError("plan", plan, "a plan, or make the tape with merging='optimal'")
        elif measure_steps is not None:
            self.warmup.measure(measure_steps)
            self.change_plan(self.plan)
        else:
            decision = self.warmup.decide_now()
            self.change_plan(decision.plan, decision)

    def _decide_with_all_ranks(self, decide: Decide) -> Decision:
        """Runs the coroutine that `decide` makes, with all ranks."""
        facts = ClusterFacts.of(self.process_set, "tensorflow", hvd)
        cluster = dataclasses.replace(facts, topology=self.topology)
        dtype = max(self.parameters, key=lambda parameter: parameter.num_elements).dtype
        name = f"{self.engine.label}.planning"
        coroutine: Any = decide(cluster, dtype=dtype)
        given = self.process_set, name, self.topology
        decision: Decision = carry_out_together(coroutine, *given, watch=self.engine.watch)
        return decision
