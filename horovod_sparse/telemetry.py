"""Reports of a step: density, bytes, residual norm, time per phase; by bucket, and over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np


@dataclass
class BucketStep:
    """Counts and times of one step of one bucket; with two levels the counts are of the whole host.

    Attributes:
        num_target: k, the number of elements that the density asks for.
        bytes_sent: payload bytes that this rank sent; with two levels, between hosts.
        bytes_inside: payload bytes that this rank sent within its host, with two levels.
        residual_norm: L2 norm of this rank's residual after this step: ||e_{i,t+1}|| in ExDyna's
            Algorithm 1. Without error feedback, of the dropped elements.
        global_error: ExDyna, Eq. (1), ``||e_t|| = mean over ranks of ||e_{i,t}||``: of the residuals at the
            step's begin; NaN if messages do not carry norms.
        fold_seconds: seconds of the fold.
        select_seconds: seconds of everything else that this rank computed between collectives.
        facts: the algorithm's own numbers (threshold, imbalance, density_error, ...).
    """

    bucket: str
    num_elements: int
    num_target: int = 0
    num_selected: int = 0
    bytes_sent: int = 0
    bytes_by_round: list[int] = field(default_factory=list)
    bytes_inside: int = 0
    residual_norm: float = 0.0
    global_error: float = math.nan
    fold_seconds: float = 0.0
    select_seconds: float = 0.0
    facts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BucketReport:
    """A `BucketStep` with the facts that only the front end knows, such as waiting times.

    Attributes:
        num_union: number of different elements in the sum: the union of all ranks' selections.
        dense_bytes: bytes that an allreduce would have sent instead.
        norms: float [P], L2 norm of the residual that every rank began the step with, if messages carry it.
        wait_seconds: seconds that this rank waited for the bucket's collectives, and did nothing else.
        apply_seconds: seconds of writing the sum to the gradients.
    """

    step: BucketStep
    num_union: int
    dense_bytes: int
    norms: np.ndarray | None = None
    wait_seconds: float = 0.0
    apply_seconds: float = 0.0


#: fields of `BucketStep` (and of `BucketReport`) that a step's report adds up
_OF_STEPS = "num_elements", "num_target", "num_selected", "bytes_sent", "bytes_inside"
_SPENT = "fold_seconds", "select_seconds"
_OF_REPORTS = "num_union", "dense_bytes", "apply_seconds"


@dataclass(frozen=True)
class StepReport:
    """Counts and times of one step on one rank, summed over buckets.

    Counts are numbers of elements; densities are fractions of all elements that the optimizer
    synchronizes (parameters that stay dense count with density 1).

    Attributes are sums of those of `BucketReport` and `BucketStep`, but for these:

    Attributes:
        step: number of the step, from 1; in a mean, the number of steps.
        global_error: NaN if a bucket's messages do not carry norms.
        wait_seconds: seconds that this rank waited for collectives, and did nothing else.
        buckets: in bucket order; empty in a mean.
    """

    step: float
    num_elements: float
    num_target: float
    num_selected: float
    num_union: float
    bytes_sent: float
    dense_bytes: float
    residual_norm: float
    global_error: float
    fold_seconds: float
    select_seconds: float
    wait_seconds: float
    apply_seconds: float
    buckets: tuple[BucketReport, ...] = ()
    bytes_inside: float = 0

    @classmethod
    def of(cls, step: int, buckets: Sequence[BucketReport], wait_seconds: float) -> StepReport:
        """Makes a step's report by adding up its buckets' reports.

        Buckets that are waited for together each count the same seconds, so theirs do not add up to
        `wait_seconds`, which is the step's.
        """
        steps = [bucket.step for bucket in buckets]
        norms = [bucket.norms for bucket in buckets]
        known = [item for item in norms if item is not None]
        per_rank = np.sqrt(np.sum(np.square(known), axis=0)) if known and len(known) == len(norms) else None
        return cls(
            step=step,
            residual_norm=math.sqrt(sum(item.residual_norm**2 for item in steps)),
            global_error=math.nan if per_rank is None else float(np.mean(per_rank)),
            wait_seconds=wait_seconds,
            buckets=tuple(buckets),
            **{name: sum(getattr(item, name) for item in steps) for name in (*_OF_STEPS, *_SPENT)},
            **{name: sum(getattr(item, name) for item in buckets) for name in _OF_REPORTS},
        )

    @property
    def density_target(self) -> float:
        """The density that the sparsifiers' schedules asked for in this step."""
        return self.num_target / self.num_elements if self.num_elements else 0.0

    @property
    def density_selected(self) -> float:
        """The density that this rank sent: its selected elements divided by all elements."""
        return self.num_selected / self.num_elements if self.num_elements else 0.0

    @property
    def density_union(self) -> float:
        """The density of the synchronized gradient: the union of all ranks' selections."""
        return self.num_union / self.num_elements if self.num_elements else 0.0

    @property
    def saving(self) -> float:
        """The payload bytes of a dense allreduce, divided by the bytes that were sent."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else math.inf

    def summary(self) -> str:
        """Returns one line for a log.

        Example:
            >>> bucket = BucketStep("b", 1000, num_target=10, num_selected=10, bytes_sent=96)
            >>> print(StepReport.of(1, [BucketReport(bucket, 18, 4000)], wait_seconds=0.002).summary())
            density 0.01 asked, 0.01 sent, 0.018 in union; 96 B of 4.0 kB sent (41.7x less); residual 0; \
fold 0.0, select 0.0, wait 2.0, apply 0.0 ms
        """
        milliseconds = ", ".join(
            f"{name} {1e3 * getattr(self, f'{name}_seconds'):.1f}"
            for name in ("fold", "select", "wait", "apply")
        )
        if not self.dense_bytes:
            return f"no gradient for a sparsifier, as of tf.IndexedSlices alone; {milliseconds} ms"
        inside = f", {_format_bytes(self.bytes_inside)} within the host" if self.bytes_inside else ""
        return (
            f"density {self.density_target:.3g} asked, {self.density_selected:.3g} sent, "
            f"{self.density_union:.3g} in union; "
            f"{_format_bytes(self.bytes_sent)} of {_format_bytes(self.dense_bytes)} sent "
            f"({self.saving:.1f}x less{inside}); residual {self.residual_norm:.3g}; {milliseconds} ms"
        )


def _format_bytes(count: float) -> str:
    """Returns bytes as text in decimal units, with two or more digits."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


_NUMBERS = tuple(item.name for item in fields(StepReport) if item.name != "buckets")


@dataclass
class Telemetry:
    """Collects reports about an optimizer's steps; costs O(buckets) per step.

    Attributes:
        last: the last completed step, None before the first. Steps that were cancelled (a gradient was
            not finite) do not count.
        num_steps: number of steps in the mean.
        num_skipped: steps that all ranks skipped because of NaN or Inf, with on_nonfinite="skip".
        transport: how messages between two ranks travel, and the reason; empty if there are none.
        selection: why buckets stay dense by default; empty if none do.
    """

    last: StepReport | None = None
    num_steps: int = 0
    num_skipped: int = 0
    transport: str = ""
    selection: str = ""
    _sums: dict[str, float] = field(default_factory=dict)
    # the first step of all, in which kernels are compiled; None once the means are without it
    _first: StepReport | None = None

    def record(self, step: int, buckets: Sequence[BucketReport], wait_seconds: float) -> None:
        """Adds the report of a completed step."""
        report = StepReport.of(step, buckets, wait_seconds)
        if self.last is None:
            self._first = report
        self.last = report
        self.num_steps += 1
        self._sums = {name: self._sums.get(name, 0.0) + getattr(report, name) for name in _NUMBERS}

    @property
    def mean(self) -> StepReport | None:
        """The means over all steps since the start or the last `reset`; None before the first step.

        Seconds are means without a training's first step, in which kernels are compiled.
        """
        if self.last is None or not self._sums:
            return None
        means = {name: total / self.num_steps for name, total in self._sums.items()}
        if self._first is not None and self.num_steps > 1:
            for name in (one for one in _NUMBERS if one.endswith("_seconds")):
                means[name] = (self._sums[name] - getattr(self._first, name)) / (self.num_steps - 1)
        return replace(self.last, **{**means, "step": self.num_steps}, buckets=())

    def scalars(self, prefix: str = "sparse/") -> dict[str, float]:
        """Returns the last step's report as numbers by name, for TensorBoard and other loggers.

        Densities (fractions), bytes, `saving` (times fewer bytes than dense), norms, milliseconds, the number
        of buckets (a jump is a new plan), and facts of the algorithms (thresholds, ...), as means over
        buckets; only those that are known and finite. Empty before the first step.
        """
        last = self.last
        if last is None:
            return {}
        names = "density_target density_selected density_union bytes_sent saving residual_norm global_error"
        told = {name: getattr(last, name) for name in names.split()}
        told["buckets"] = len(last.buckets)
        if last.bytes_inside:
            told["bytes_inside"] = last.bytes_inside
        for part in ("fold", "select", "wait", "apply"):
            told[f"{part}_ms"] = 1e3 * getattr(last, f"{part}_seconds")
        facts: dict[str, list[float]] = {}
        for bucket in last.buckets:
            for name, value in bucket.step.facts.items():
                facts.setdefault(name, []).append(value)
        told |= {name: float(np.mean(values)) for name, values in facts.items()}
        return {prefix + name: float(value) for name, value in told.items() if math.isfinite(value)}

    def reset(self) -> None:
        """Starts new means (after a warm-up, say); the last step's report stays."""
        self.num_steps, self._sums, self._first = 0, {}, None

    def summary(self) -> str:
        """Returns the means as one line of text."""
        mean = self.mean
        if mean is None:
            return "no step yet"
        pairs = f"; pairs of ranks by {self.transport}" if self.transport else ""
        dense = f"; {self.selection}" if self.selection else ""
        return f"mean of {self.num_steps} steps: {mean.summary()}{pairs}{dense}"
