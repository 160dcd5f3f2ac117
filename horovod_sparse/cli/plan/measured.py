"""A measured step: what Horovod's own timeline says of the buckets of a plan."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from horovod_sparse.errors import ArgumentError
from horovod_sparse.plans.plan import Plan

_NEGOTIATE = "NEGOTIATE_"
#: ``allgather.bucket3.conv.weight.0``: kind, number of the bucket, its first parameter, round
_BUCKET = re.compile(r"^(?:\w+\.)?bucket(\d+)\.(.+)\.(\d+)$")


@dataclass(frozen=True)
class MeasuredSpan:
    """A collective: when a rank asked for it first, when all had, and when it was done; None for dense ones.

    Seconds are from the step's first collective that was asked for.
    """

    asked: float
    start: float
    end: float
    bucket: int | None


@dataclass(frozen=True)
class MeasuredStep:
    """The step of median length: its collectives by their start, and of how many steps it is one."""

    spans: tuple[MeasuredSpan, ...]
    num_steps: int

    @property
    def seconds(self) -> float:
        """From the first collective that was asked for to the end of the last one."""
        return max(span.end for span in self.spans)


def measured_step(path: str, plan: Plan) -> MeasuredStep:
    """The step of median length in a file that HOROVOD_TIMELINE names."""
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for name, times in _collectives(read_events(path)):
        if _owner(name, plan) != "no":
            found[name].append(times)
    if not found:
        raise ArgumentError(
            "--timeline",
            path,
            f"one of a run with this plan: it holds no collective of {len(plan.buckets)} buckets that begin "
            f"with {', '.join(bucket[0] for bucket in plan.buckets[:3])}, ...",
        )
    # what was done in only some of the steps (agreements in the first one) is in no step as a whole
    num_steps = round(median(len(times) for times in found.values()))
    steps = []
    for number in range(num_steps):
        whole = {name: times[number - num_steps] for name, times in found.items() if len(times) >= num_steps}
        origin = min(asked for asked, _, _ in whole.values())
        spans = []
        for name, (asked, start, end) in whole.items():
            owner = _owner(name, plan)
            bucket = owner if isinstance(owner, int) else None
            spans.append(MeasuredSpan(asked - origin, start - origin, end - origin, bucket))
        steps.append(sorted(spans, key=lambda span: (span.start, span.asked)))
    steps.sort(key=lambda spans: max(span.end for span in spans))
    return MeasuredStep(tuple(steps[len(steps) // 2]), num_steps)


def _owner(name: str, plan: Plan) -> int | str:
    """Number of the bucket; "dense", or "no" for what belongs to neither."""
    if match := _BUCKET.match(name):
        number = int(match[1])
        fits = number < len(plan.buckets) and plan.buckets[number][0] == match[2]
        return number if fits else "no"
    bare = re.sub(r"\.\d+$", "", name.partition(".")[2])
    return "dense" if bare in plan.dense or bare.removeprefix("dense.") in plan.dense else "no"


def read_events(path: str) -> list[Mapping[str, Any]]:
    """The events of a trace."""
    text = Path(path).read_text(encoding="utf-8").strip()
    # a process that did not shut down leaves the list open
    for ending in ("", "]", "}]"):
        try:
            events = json.loads(text.rstrip(",") + ending)
        except ValueError:
            continue
        if isinstance(events, list) and any(isinstance(event, dict) and "ph" in event for event in events):
            return [event for event in events if isinstance(event, dict) and event]
    cut = text.rfind("},")
    if text.startswith("[") and cut > 0:
        try:
            return [event for event in json.loads(text[: cut + 1] + "]") if event]
        except ValueError:
            pass
    raise ArgumentError("--timeline", path, "a file that Horovod wrote (HOROVOD_TIMELINE)")


def _collectives(
    events: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """Name, and seconds at which it was asked for, begun and done, of every collective."""
    names = {
        event["pid"]: str(event["args"]["name"])
        for event in events
        if event.get("name") == "process_name" and "name" in event.get("args", {})
    }
    open_: dict[Any, list[tuple[str, float]]] = defaultdict(list)
    asked: dict[Any, float] = {}
    for event in events:
        process, phase = event.get("pid"), event.get("ph")
        if process not in names or phase not in ("B", "E"):
            continue
        now = float(event["ts"]) * 1e-6
        if phase == "B":
            open_[process].append((str(event.get("name", "")), now))
        elif open_[process]:
            activity, begun = open_[process].pop()
            if activity.startswith(_NEGOTIATE):
                asked[process] = begun
            elif not open_[process] and process in asked:
                yield names[process], (asked.pop(process), begun, now)


def stacked(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Offset from the middle, and height, of bars in a row of height 1, so that none hides another.

    Intervals that overlap, directly or through others, share the height.

    Example:
        >>> stacked([(0.0, 2.0), (1.0, 3.0), (4.0, 5.0)])
        [(0.25, 0.5), (-0.25, 0.5), (0.0, 1.0)]
    """
    order = sorted(range(len(intervals)), key=lambda place: intervals[place])
    placed = [(0.0, 1.0)] * len(intervals)
    cluster: list[int] = []
    until = float("-inf")
    for place in [*order, None]:
        if cluster and (place is None or intervals[place][0] >= until):
            lanes: list[float] = []
            lane_of = {}
            for member in cluster:
                start, end = intervals[member]
                free = next((number for number, busy in enumerate(lanes) if busy <= start), len(lanes))
                lanes[free:] = [end, *lanes[free + 1 :]]
                lane_of[member] = free
            height = 1.0 / len(lanes)
            for member, lane in lane_of.items():
                placed[member] = (0.5 - (lane + 0.5) * height, height)
            cluster, until = [], float("-inf")
        if place is not None:
            cluster.append(place)
            until = max(until, intervals[place][1])
    return placed
