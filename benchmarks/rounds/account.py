"""Where the time of a round goes: a rank's own stamps, beside Horovod's timeline of the first rank."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_sparse.errors import ArgumentError

#: parts of a round in their order
PARTS = ("cycle", "others", "negotiation", "transfer", "wake-up")


def read_events(path: str) -> list[Mapping[str, Any]]:
    """The events of a trace; a process that was killed leaves its list open, and its last event cut."""
    text = Path(path).read_text(encoding="utf-8").strip()
    for whole in (text, text.rstrip(",") + "]", text[: text.rfind("},") + 1] + "]"):
        try:
            events = json.loads(whole)
        except ValueError:
            continue
        if isinstance(events, list) and any(isinstance(event, dict) and "ph" in event for event in events):
            return [event for event in events if isinstance(event, dict) and event]
    raise ArgumentError("timeline", path, "a file that Horovod wrote (HOROVOD_TIMELINE)")


@dataclass(frozen=True)
class Stamps:
    """Of one step on one rank, by the collective's name, in seconds of a clock that all ranks share.

    Attributes:
        started: just before Horovod was asked for it.
        noticed: when its answer was there for whoever had asked.
    """

    started: Mapping[str, float]
    noticed: Mapping[str, float]


@dataclass(frozen=True)
class Passage:
    """A collective in the timeline, in its seconds.

    Attributes:
        taken: when the first rank's cycle found it.
        begun: when all ranks were known to be ready, and it went to the network.
        done: when the answer was complete.
        fast: whether the response cache knew it: no rank told the others of it.
    """

    taken: float
    begun: float
    done: float
    fast: bool


def passages(events: Sequence[Mapping[str, Any]]) -> dict[str, list[Passage]]:
    """All collectives of a timeline, by their names without the kind that stands before them.

    Args:
        events: of HOROVOD_TIMELINE.

    Example:
        >>> name = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "allgather.b.0"}}
        >>> rows = [("B", 5, "NEGOTIATE_ALLGATHER"), ("E", 7, ""), ("B", 8, "ALLGATHER"), ("E", 9, "")]
        >>> passages([name, *({"pid": 1, "ph": p, "ts": t, "name": n} for p, t, n in rows)])
        {'b.0': [Passage(taken=5e-06, begun=8e-06, done=9e-06, fast=True)]}
    """
    names: dict[Any, str] = {}
    found: dict[str, list[Passage]] = defaultdict(list)
    open_: dict[Any, list[tuple[str, float]]] = defaultdict(list)
    taken: dict[Any, tuple[float, bool]] = {}
    for event in events:
        process, phase = event.get("pid"), event.get("ph")
        if event.get("name") == "process_name" and "name" in event.get("args", {}):
            names[process] = str(event["args"]["name"]).partition(".")[2]
        now = float(event.get("ts", 0.0)) / 1e6
        if phase == "B":
            open_[process].append((str(event.get("name", "")), now))
        elif phase == "X" and process in open_ and open_[process]:
            open_[process][-1] = (open_[process][-1][0] + " told", open_[process][-1][1])
        elif phase == "E" and open_[process]:
            activity, begun = open_[process].pop()
            if activity.startswith("NEGOTIATE_"):
                taken[process] = begun, not activity.endswith(" told")
            elif not open_[process] and process in taken:
                first, fast = taken.pop(process)
                found[names[process]].append(Passage(first, begun, now, fast))
    return dict(found)


def account(
    timeline: str, steps: Mapping[str, Sequence[Stamps]], starts: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """Mean seconds of every part of a round on the first rank, by variant.

    The timeline counts from a moment of its own. A round is found after it was asked for and noticed after it
    was done, in all rounds: that leaves a gap for the difference of the two clocks, of which the middle is
    taken; half of the gap is how wrong "cycle" and "wake-up" may be, which is told.

    Args:
        timeline: path of the first rank's.
        steps: its stamps, by variant.
        starts: of every rank, by variant: for every step, when it asked for each collective.

    Returns:
        By variant: the `PARTS`, their sum as "round", the share of rounds that went the fast way as "fast",
        and half of the gap as "uncertain"; medians over steps of means over the collectives of a step.
    """
    found = passages(read_events(timeline))
    rows: dict[str, list[list[tuple[Passage, float, float, float]]]] = {}
    for variant, stamps in steps.items():
        rows[variant] = []
        for number, step in enumerate(stamps):
            row = []
            for name, started in step.started.items():
                passage = found[f"{name}.0"][number - len(stamps)]
                last = max(rank[variant][number][name] for rank in starts)
                row.append((passage, started, last, step.noticed[name]))
            rows[variant].append(row)
    every = [entry for variant in rows.values() for row in variant for entry in row]
    low = max(started - passage.taken for passage, started, _, _ in every)
    high = min(noticed - passage.done for passage, _, _, noticed in every)
    offset = (low + high) / 2
    return {variant: _parts(steps_, offset, abs(high - low) / 2) for variant, steps_ in rows.items()}


def _parts(
    rows: Sequence[Sequence[tuple[Passage, float, float, float]]], offset: float, uncertain: float
) -> dict[str, float]:
    by_part: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        sums: dict[str, list[float]] = defaultdict(list)
        for passage, started, last, noticed in row:
            taken, begun, done = (offset + at for at in (passage.taken, passage.begun, passage.done))
            ready = max(taken, min(last, begun))
            bounds = (started, taken, ready, begun, done, noticed)
            for part, start, stop in zip(PARTS, bounds, bounds[1:], strict=False):
                sums[part].append(stop - start)
            sums["round"].append(noticed - started)
            sums["fast"].append(float(passage.fast))
        for part, values in sums.items():
            by_part[part].append(statistics.fmean(values))
    parts = {part: statistics.median(by_part[part]) for part in (*PARTS, "round")}
    return {**parts, "fast": statistics.fmean(by_part["fast"]), "uncertain": uncertain}
