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

if TYPE_CHECKING:
    from horovod_sparse.planning.request import Decision
    from horovod_sparse.planning.warmup import Decide, WarmUp


class Replanning:
    """Measures backward for a synchronizer's plan, and changes the plan when it is asked to."""

    def __init__(self, training: VariablesTraining) -> None:
        self._training = training
        #: None where no times decide
        self.warmup: WarmUp | None = None

    def planned(self) -> None:
        """Measures once variables have got buckets, where times decide and no profile has them."""
        training = self._training
        if self.warmup is not None:
            self.warmup.joined(training.parameters)
        elif training.request is not None and training.request.measures:
            from horovod_sparse.planning.warmup import HostStamps, WarmUp

            more: Any = {"decision": training.decision, "automatic": False}
            sparsifier, stamps = training.recipe.sparsifier, HostStamps()
            parameters = training.parameters
            self.warmup = WarmUp(training.request, parameters, sparsifier, self._decided, stamps, **more)

    def stamped(self, gradients: Mapping[str, Any], host: HostFunctions) -> Mapping[str, Any]:
        """Returns the gradients, or None, by name; while times are measured, once all have come."""
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
                raise ArgumentError("measure_steps", measure_steps, "measure_steps or a plan, not both")
            if self.warmup is not None:
                self.warmup.stop()
            self._training.change_plan(plan)
        elif self.warmup is None:
            raise ArgumentError("plan", plan, "a plan, or make the tape with merging='optimal'")
        elif measure_steps is not None:
            self.warmup.measure(measure_steps)
            self._training.change_plan(self._training.plan)
        else:
            decision = self.warmup.decide_now()
            self._training.change_plan(decision.plan, decision)

    def _decided(self, decide: Decide) -> Decision:
        """Carries out what makes a plan by times, with all ranks."""
        training: Any = self._training
        topology, process_set = training.topology, training.process_set
        cluster = dataclasses.replace(ClusterFacts.of(process_set, "tensorflow", hvd), topology=topology)
        dtype = max(training.parameters, key=lambda parameter: parameter.num_elements).dtype
        name = f"{training.engine.label}.planning"
        decision: Decision = carry_out_together(decide(cluster, dtype=dtype), process_set, name, topology)
        return decision
