"""The end of a step on the host: its sums are applied, or all ranks take it back."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from horovod_sparse.tensorflow.parts import Part
from horovod_sparse.tensorflow.replanning import Replanning
from horovod_sparse.tensorflow.task import idle_seconds
from horovod_sparse.tensorflow.tensors import numpy_dtype
from horovod_sparse.tensorflow.training import VariablesTraining
from horovod_sparse.training.outcome import Outcome


class Ending:
    """Takes what the coroutines of a step have returned, when all of them have ended."""

    def __init__(self, training: VariablesTraining, replanning: Replanning, average: bool) -> None:
        self._training, self._replanning, self._average = training, replanning, average
        self._lock = threading.Lock()

    def finish(self, parts: Sequence[Part], scale: float | None = None) -> tuple[list[np.ndarray], Outcome]:
        """Dense gradients, one per variable of the parts, times `scale`; zeros where they are not applied.

        The step's error is raised here and nowhere else: then it is taken back, and the next one may follow.
        """
        if scale is None:
            scale = 1.0 / self._training.size if self._average else 1.0
        try:
            arrays, outcome = self._finished(parts, scale)
        except BaseException:
            self._replanning.after_step(went_well=False)
            raise
        if outcome != Outcome.AGAIN:
            self._replanning.after_step(went_well=outcome == Outcome.APPLIED)
        return arrays, outcome

    def _finished(self, parts: Sequence[Part], scale: float) -> tuple[list[np.ndarray], Outcome]:
        since, overdue = time.perf_counter(), None
        for part in parts:
            overdue = part.task.wait(since, overdue)
        now, training = time.perf_counter(), self._training
        with self._lock:
            errors = [part.task.error for part in parts if part.task.error is not None]
            verdict = training.policy.judge(errors, training.host_ranks, again=True)
            training.last_error = verdict.error
            if verdict.outcome != Outcome.APPLIED:
                for part in parts:
                    part.abandon(drop=verdict.drop, again=verdict.outcome is Outcome.AGAIN)
                if verdict.outcome == Outcome.RAISE and verdict.error is not None:
                    raise verdict.error
                shapes = [(shape, numpy_dtype(part.dtype)) for part in parts for shape in part.shapes]
                return [np.zeros(shape, dtype) for shape, dtype in shapes], verdict.outcome
            applied = [part.apply(scale) for part in parts]
            training.step += 1
            telemetry, decision = training.telemetry, training.decision
            telemetry.transport = "; ".join(sorted({part.task.transport for part in parts} - {""}))
            telemetry.density = "" if decision is None else decision.density
            telemetry.selection = training.selection
            waited = idle_seconds([part.task for part in parts], now)
            telemetry.record(training.step, [report for _, report in applied], waited)
            return [array for arrays, _ in applied for array in arrays], verdict.outcome
