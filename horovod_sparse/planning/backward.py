"""Measures each parameter's backward time for plans: medians over steps, means over ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from horovod_sparse.collectives import Synchronization, gather_values
from horovod_sparse.errors import ProfileMismatchError
from horovod_sparse.planning.profile import Profile


@dataclass(frozen=True)
class BackwardTimes:
    """Medians over steps of each parameter's backward time: seconds from the previous gradient to its own."""

    #: by parameter, in the order in which gradients came; 0 for those that never came
    backward_seconds: Mapping[str, float]
    #: from the beginning of a step to its first gradient
    forward_seconds: float
    #: forward and backward of each step, where that is known
    step_seconds: tuple[float, ...] = ()


class BackwardRecorder:
    """Collects time stamps of gradients in a few steps, and computes medians of the seconds between them.

    A stamp is a number of seconds, or an event of a device; `between` returns the seconds between two. The
    first `num_warmup` steps do not count.
    """

    def __init__(self, names: Sequence[str], num_warmup: int, between: Callable[[Any, Any], float]) -> None:
        self._to_skip, self._between = num_warmup, between
        self._before: Any = None
        self._stamps: list[tuple[str, Any]] = []
        #: one entry for every step after the warm-up
        self._forward_seconds: list[float] = []
        self._totals: list[float] = []
        #: by name: the seconds before the gradient, and its number in the order of gradients, for every step
        self._rows: dict[str, list[tuple[float, int]]] = {name: [] for name in names}

    def begin(self, stamp: Any) -> None:
        """Begins recording a step, before its forward pass."""
        self._before, self._stamps = stamp, []

    def arrived(self, name: str, stamp: Any) -> None:
        """Notes a gradient's time stamp; called when it is complete."""
        self._stamps.append((name, stamp))

    def end(self) -> None:
        """Ends a step after its last gradient: stores the seconds between its stamps."""
        before, stamps = self._before, self._stamps
        if not stamps:
            return
        if self._to_skip > 0:
            self._to_skip -= 1
            return
        total = 0.0
        for place, (name, stamp) in enumerate(stamps):
            seconds = max(0.0, float(self._between(before, stamp)))
            total += seconds
            if place == 0:
                # where forward ends is unknown; nothing can be sent before, so it does not matter
                self._forward_seconds.append(seconds)
            self._rows[name].append((seconds if place else 0.0, place))
            before = stamp
        self._totals.append(total)

    def times(self) -> BackwardTimes | None:
        """Returns medians over the recorded steps; None without any gradient.

        A delay that hits another gradient in every step (the rank lost its core for a moment) is in no
        gradient's median; so all are scaled by the same factor to the median of whole steps.
        """
        if not self._forward_seconds:
            return None
        never = (0.0, len(self._rows))
        # parameters without a gradient are started in the end, as the model's first
        medians = {
            name: [statistics.median(values) for values in zip(*(row or [never]), strict=True)]
            for name, row in reversed(self._rows.items())
        }
        order = sorted(medians, key=lambda name: medians[name][1])
        forward = statistics.median(self._forward_seconds)
        found = forward + sum(seconds for seconds, _ in medians.values())
        scale = statistics.median(self._totals) / found if found else 1.0
        backward = {name: scale * medians[name][0] for name in order}
        return BackwardTimes(backward, scale * forward, tuple(self._totals))


def mean_times(own: BackwardTimes | None) -> Synchronization[BackwardTimes]:
    """Returns the means over ranks of the times that each rank measured, the same on every rank.

    Ranks that measured nothing do not count. Since a collective waits for the slowest rank, all means are
    multiplied by ``median over steps of (max over ranks / mean over ranks)`` of a whole step.
    """
    line = own and [own.forward_seconds, list(own.backward_seconds.items()), own.step_seconds]
    measured = [item for item in (yield from gather_values(line)) if item is not None]
    if not measured:
        raise ProfileMismatchError("no rank has had a gradient: the loss depends on none of the parameters")
    forward, rows, totals = zip(*measured, strict=True)
    ratios = [max(step) / statistics.fmean(step) for step in zip(*totals, strict=False) if any(step)]
    slowest = statistics.median(ratios or [1.0])
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for place, (name, value) in enumerate(row):
            found.setdefault(name, []).append((place, value))
    means = {name: list(map(statistics.fmean, zip(*rows, strict=True))) for name, rows in found.items()}
    order = sorted(means, key=lambda name: means[name][0])
    backward = {name: slowest * means[name][1] for name in order}
    return BackwardTimes(backward, slowest * statistics.fmean(forward))


def with_times(profile: Profile, times: BackwardTimes | None) -> Synchronization[Profile]:
    """Returns a copy of a profile with the `mean_times` of all ranks, in the model's order."""
    measured = yield from mean_times(times)
    backward = dict(reversed(list(measured.backward_seconds.items())))
    return replace(profile, backward_seconds=backward, forward_seconds=measured.forward_seconds)
