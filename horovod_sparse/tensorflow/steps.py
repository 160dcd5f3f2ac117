"""The end of a synchronization on the host, and the count of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from horovod_sparse.frontend.collective_errors import has_bad_gradient, worst
from horovod_sparse.telemetry import StepReport, Telemetry
from horovod_sparse.tensorflow.parts import Part, SparseBucket
from horovod_sparse.tensorflow.task import idle_seconds

__all__ = ["Steps"]


class Steps:
    """Ends steps: dense gradients out of what the coroutines have returned, or the error of the step.

    Attributes:
        telemetry: what happened in the last step, and on average.
        number: steps done, those that were given up not counted.
        last_error: what the last step raised, None if it ended well.
    """

    def __init__(self) -> None:
        self.telemetry = Telemetry()
        self.number = 0
        self.last_error: BaseException | None = None
        self._lock = threading.Lock()

    def finish(self, parts: Sequence[Part], scale: float) -> list[np.ndarray]:
        """When all coroutines have ended.

        Args:
            parts: that were started together.
            scale: of the sums.

        Returns:
            One gradient per variable, one part behind the other.

        Raises:
            NonFiniteGradientError: or what else ended a coroutine; the step is taken back.
        """
        for part in parts:
            part.task.wait()
        now = time.perf_counter()
        with self._lock:
            errors = [part.task.error for part in parts if part.task.error is not None]
            if errors:
                for part in parts:
                    rank = part.bucket.info.rank if isinstance(part, SparseBucket) else -1
                    part.abandon(drop=has_bad_gradient(errors, rank))
                self.last_error = worst(errors)
                raise self.last_error
            self.last_error = None
            applied = [part.apply(scale) for part in parts]
            self.number += 1
            transports = {part.task.transport for part in parts} - {""}
            self.telemetry.transport = "; ".join(sorted(transports))
            waited = idle_seconds([part.task for part in parts], now)
            self.telemetry.add(StepReport.of(self.number, [report for _, report in applied], waited))
            return [array for arrays, _ in applied for array in arrays]
