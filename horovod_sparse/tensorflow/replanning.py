"""Changing the buckets of a training: by hand, or by times measured in its first steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.merging import Plan
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.tensorflow.graph import HostFunctions
from horovod_sparse.tensorflow.variable_buckets import VariableBuckets
from horovod_sparse.tensorflow.warmup import WarmUp

_log = logging.getLogger("horovod_sparse")


class Replanning:
    """What a synchronizer does about its plan.

    Args:
        buckets: of the synchronizer.
        sparsifier: that they have.
        process_set: the ranks.
    """

    def __init__(self, buckets: VariableBuckets, sparsifier: Sparsifier, process_set: Any) -> None:
        self._buckets, self._sparsifier = buckets, sparsifier
        self._process_set = process_set
        self._warmup: WarmUp | None = None

    @property
    def is_measured(self) -> bool:
        """Whether backward times wait for `replan`: from the same step on, on all ranks."""
        return self._warmup is not None and self._warmup.is_measured and self._buckets.decision is None

    def planned(self) -> None:
        """Variables have got their first buckets: measures, where times decide and no profile has them."""
        request = self._buckets.request
        if request is not None and request.measures:
            self._warmup = WarmUp(
                request, self._buckets.parameters, self._sparsifier, self._process_set, self._buckets.label
            )
            if self._buckets.decision is not None:
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
        if self._warmup is not None and self._buckets.decision is None:
            self._warmup.stop()
            _log.info("the plan stays as it is until all ranks call replan(measure_steps=...)")

    def refuse(self, where: str) -> None:
        """Refuses to need times where none can be measured.

        Args:
            where: that is, in words.

        Raises:
            UnsupportedError: if times are needed, and not known yet.
        """
        request = self._buckets.request
        if request is None or not request.measures or request.complete or self._buckets.decision is not None:
            return
        raise UnsupportedError(
            f"{request.describe()} needs backward times, and with {where} none can be taken of a single "
            "gradient: give a profile that has them, as decision.profile.save(path) writes it after a run "
            "in a tf.function without"
        )

    def replan(self, plan: Plan | None, measure_steps: int | None) -> None:
        """See `GradientSynchronizer.replan`."""
        if any(part.task.under_way for part in self._buckets.parts):
            raise UnsupportedError("plans change between steps: a step is under way, or was interrupted")
        if plan is not None:
            if measure_steps is not None:
                raise ArgumentError("measure_steps", measure_steps, "either it or a plan")
            if self._warmup is not None:
                self._warmup.stop()
            self._buckets.replan(plan)
        elif self._warmup is None:
            raise ArgumentError("plan", plan, "a plan, or merging='optimal' beside the compression")
        elif measure_steps is not None:
            self._warmup.measure(measure_steps)
            self._buckets.replan(self._buckets.plan)
        else:
            decision = self._warmup.decide()
            self._buckets.replan(decision.plan, decision)
