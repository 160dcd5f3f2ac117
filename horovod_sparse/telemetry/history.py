"""The last step and running means over steps."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from horovod_sparse.telemetry.report import StepReport

__all__ = ["Telemetry"]

_NUMBERS = tuple(item.name for item in fields(StepReport) if item.name != "buckets")


@dataclass
class Telemetry:
    """What an optimizer tells about its steps; costs O(buckets) per step.

    Attributes:
        last: the last completed step, None before the first. Steps that were given up (a gradient was
            not finite) do not count.
        num_steps: steps in the mean.
        transport: how messages between two ranks travel, and why so; empty where there are none.

    Example:
        >>> telemetry = Telemetry()
        >>> telemetry.summary()
        'no step yet'
    """

    last: StepReport | None = None
    num_steps: int = 0
    transport: str = ""
    _sums: StepReport | None = None

    def add(self, report: StepReport) -> None:
        """A completed step."""
        self.last = report
        self.num_steps += 1
        if self._sums is None:
            self._sums = replace(report, buckets=())
        else:
            added = {name: getattr(self._sums, name) + getattr(report, name) for name in _NUMBERS}
            self._sums = replace(self._sums, **added)

    @property
    def mean(self) -> StepReport | None:
        """Means over all steps since the start or the last `reset`; None before the first step."""
        if self._sums is None:
            return None
        means = {name: getattr(self._sums, name) / self.num_steps for name in _NUMBERS}
        return replace(self._sums, **{**means, "step": self.num_steps})

    def reset(self) -> None:
        """Forgets the means (after a warm-up, say), and keeps the last step."""
        self.num_steps, self._sums = 0, None

    def summary(self) -> str:
        """The means in one line.

        Example:
            >>> from horovod_sparse.telemetry import BucketReport
            >>> from horovod_sparse.feedback import BucketStep
            >>> telemetry = Telemetry(transport="MPI")
            >>> telemetry.add(StepReport.of(1, [BucketReport(BucketStep("b", 100), 1, 400)], 0.0))
            >>> telemetry.summary().endswith("; pairs of ranks by MPI")
            True
        """
        mean = self.mean
        if mean is None:
            return "no step yet"
        pairs = f"; pairs of ranks by {self.transport}" if self.transport else ""
        return f"mean of {self.num_steps} steps: {mean.summary()}{pairs}"
