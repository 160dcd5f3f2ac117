"""Scores over seconds, from scores by step and seconds of an iteration, and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.studies.study import MEASUREMENTS, markdown

FILE = MEASUREMENTS / "time_to_accuracy.json"
Curve = list[tuple[float, float]]


class Score(NamedTuple):
    """How a model's score is read.

    Attributes:
        words: of the model, for tables and pictures.
        name: of the score.
        higher: is better?
        margins: by which the scores to reach are worse than dense training's last, the nearest one last.
        shown: how a score is written.
        factor: of the score on an axis.
    """

    words: str
    name: str
    higher: bool
    margins: tuple[float, float]
    shown: str
    factor: float = 1.0


SCORES = {
    "digits": Score("CNN on digits, 4.3 M", "test accuracy, %", True, (0.05, 0.01), "{:.1%}", 100.0),
    "resnet20": Score("ResNet-20 on images, 0.27 M", "test accuracy, %", True, (0.05, 0.01), "{:.1%}", 100.0),
    "gpt": Score("GPT on source text, 0.83 M", "bits per byte", False, (0.5, 0.1), "{:.2f}"),
}
DENSE = "dense"
#: methods whose steps are those of another: the same sums by other means, so only iterations are measured
SAME_STEPS = {"dense, DDP": DENSE}


def seeds_of(result: dict[str, Any], model: str, method: str) -> list[Curve]:
    """Curves of all seeds that did not diverge, by step."""
    prefix = f"{model}/{SAME_STEPS.get(method, method)}/seed "
    return [
        [(step, score) for step, score in run["curve"]]
        for name, run in result.get("runs", {}).items()
        if name.startswith(prefix) and not run["diverged"]
    ]


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean over seeds, which were tested at the same steps.

    Example:
        >>> mean_curve([[(0, 0.0), (10, 0.5)], [(0, 0.5), (10, 1.0)]])
        [(0, 0.25), (10, 0.75)]
    """
    return [
        (points[0][0], statistics.fmean(score for _, score in points)) for points in zip(*curves, strict=True)
    ]


def reached(curve: Curve, target: float, higher: bool = True) -> float | None:
    """Where a curve is first as good as the target, on straight lines between its points; None: nowhere.

    Example:
        >>> reached([(0, 0.0), (10, 0.5), (20, 1.0)], 0.75)
        15.0
        >>> reached([(0, 8.0), (10, 4.0)], 5.0, higher=False)
        7.5
        >>> reached([(0, 0.0), (10, 0.5)], 0.6) is None
        True
    """
    sign = 1.0 if higher else -1.0
    before: tuple[float, float] | None = None
    for place, score in curve:
        if sign * score >= sign * target:
            if before is None:
                return float(place)
            share = (target - before[1]) / (score - before[1])
            return float(before[0] + share * (place - before[0]))
        before = (place, score)
    return None


def targets_of(result: dict[str, Any], model: str) -> list[float]:
    """The scores that methods are timed to: dense training's last, less the margins; none: not trained."""
    curves, score = seeds_of(result, model, DENSE), SCORES[model]
    if not curves:
        return []
    last = mean_curve(curves)[-1][1]
    return [last - margin if score.higher else last + margin for margin in score.margins]


def iteration(result: dict[str, Any], model: str, rate: str, method: str) -> dict[str, float] | None:
    """Median and quartiles of a method's iteration, in seconds; None: not measured."""
    timed = result.get("timings", {}).get(f"{model}/{rate}")
    return None if timed is None else timed["methods"].get(method)


def over_seconds(result: dict[str, Any], model: str, rate: str, method: str) -> Curve | None:
    """The mean curve by seconds: a step's number times the median iteration. None: not all is measured."""
    curves, timed = seeds_of(result, model, method), iteration(result, model, rate, method)
    if not curves or timed is None:
        return None
    return [(step * timed["median"], score) for step, score in mean_curve(curves)]


def seconds_to(result: dict[str, Any], model: str, rate: str, method: str, target: float) -> float | None:
    """Seconds until a score is reached; None: never, or not measured."""
    curve = over_seconds(result, model, rate, method)
    return None if curve is None else reached(curve, target, SCORES[model].higher)


def gigabits(rate: str) -> str:
    """A rate as it is read.

    Example:
        >>> gigabits("10gbit")
        '10 Gbit/s'
    """
    return f"{rate[:-4]} Gbit/s" if rate.endswith("gbit") else rate


def table(result: dict[str, Any]) -> str:
    """Seconds to either target, and how many times faster than dense that is; then what they are made of."""
    models = [model for model in SCORES if targets_of(result, model)]
    # without any time there are only scores to tell
    rates, methods = result["rates"] if result.get("timings") else [], list(result["methods"])
    written = []
    for number in range(2 if rates else 0):
        head = ["seconds to"]
        for model in models:
            target = SCORES[model].shown.format(targets_of(result, model)[number])
            head += [f"{_short(model)}, {target}: {gigabits(rate)}" for rate in rates]
        rows = [
            [method, *(_cell(result, model, rate, method, number) for model in models for rate in rates)]
            for method in methods
        ]
        written.append(markdown(head, rows))
    parts_head = [""]
    for model in models:
        columns = ["score (seeds)", "kB per step", *(f"ms at {gigabits(rate)}" for rate in rates)]
        parts_head += [f"{_short(model)}: {columns[0]}", *columns[1:]]
    parts = [
        [method, *(cell for model in models for cell in _parts(result, model, method, rates))]
        for method in methods
    ]
    return "\n\n".join([*written, markdown(parts_head, parts)])


def _short(model: str) -> str:
    return SCORES[model].words.partition(" on ")[0]


def _cell(result: dict[str, Any], model: str, rate: str, method: str, number: int) -> str:
    target = targets_of(result, model)[number]
    if over_seconds(result, model, rate, method) is None:
        return "-"
    seconds, dense = (seconds_to(result, model, rate, name, target) for name in (method, DENSE))
    if seconds is None:
        return "not reached"
    return f"{seconds:.1f}" + (f" ({dense / seconds:.2g}x)" if dense else "")


def _parts(result: dict[str, Any], model: str, method: str, rates: Sequence[str]) -> list[str]:
    curves, score = seeds_of(result, model, method), SCORES[model]
    prefix = f"{model}/{SAME_STEPS.get(method, method)}/seed "
    runs = [run for name, run in result["runs"].items() if name.startswith(prefix)]
    found = "-"
    if runs:
        found = (
            score.shown.format(statistics.fmean(curve[-1][1] for curve in curves)) if curves else "diverged"
        )
        found += f" ({len(runs)})" if len(curves) == len(runs) else f" ({len(curves)} of {len(runs)})"
    bytes_ = f"{statistics.fmean(run['bytes_per_step'] for run in runs) / 1000:,.1f}" if runs else "-"
    timed = [iteration(result, model, rate, method) for rate in rates]
    return [found, bytes_, *(f"{1000 * item['median']:.0f}" if item else "-" for item in timed)]
