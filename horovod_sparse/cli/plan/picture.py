"""A step as a picture: computation above communication over time, one colour per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from horovod_sparse.cli.plan.measured import MeasuredStep, stacked
from horovod_sparse.cli.plan.report import Predicted
from horovod_sparse.planning.timeline import UPDATE

#: told apart without colour vision, and for more buckets a run from dark to light
_FEW = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#7A4FB5")
_FORWARD, _DENSE, _INK = "#D9D9D9", "#8C8C8C", "#333333"
_HEIGHT = 0.36
#: where the two queues stand in a panel
_COMPUTATION, _COMMUNICATION = 0.5, 0.0
#: a bar narrower than this share of the picture carries no number
_NARROW = 0.016


def draw_queues(panels: Sequence[Predicted], measured: MeasuredStep | None = None) -> Any:
    """One panel for every plan, over the same time, as Fig. 1 of OMGS-SGD."""
    count = len(panels) + (measured is not None)
    figure, axes = plt.subplots(
        count, 1, figsize=(10.5, 0.9 + 1.55 * count), sharex=True, squeeze=False, layout="constrained"
    )
    ends = [one.seconds for one in panels]
    shift = _first_message(panels[0])
    if measured is not None:
        ends.append(shift + measured.seconds)
    limit = 1e3 * max(ends)
    for axis, one in zip(axes[:, 0], panels, strict=False):
        _predicted(axis, one, limit)
    if measured is not None:
        _measured(axes[-1, 0], measured, shift, len(panels[0].plan.buckets), limit)
    for axis in axes[:, 0]:
        axis.set_xlim(0, limit * 1.01)
        axis.set_ylim(-0.3, 0.92)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False, labelsize=9)
        axis.spines["bottom"].set_color("#BBBBBB")
    axes[-1, 0].set_xlabel("milliseconds from the beginning of the step", fontsize=9)
    figure.legend(handles=_legend(panels), loc="outside upper right", ncols=6, fontsize=8, frameon=False)
    return figure


def save(figure: Any, path: str) -> None:
    """Writes the picture; the ending of the path says the format."""
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _first_message(one: Predicted) -> float:
    """When the prediction asks for the first collective: a measured step begins there."""
    ready = [span.end for span in one.timeline.computation if span.kind == "selection"]
    dense = [span.start for span in one.timeline.communication if span.kind == "dense"]
    return min([*ready, *dense], default=0.0)


def _colors(num_buckets: int) -> list[Any]:
    if num_buckets <= len(_FEW):
        return list(_FEW[:num_buckets])
    colors = matplotlib.colormaps["turbo"]
    return [colors(0.06 + 0.88 * number / (num_buckets - 1)) for number in range(num_buckets)]


def _predicted(axis: Any, one: Predicted, limit: float) -> None:
    colors = _colors(len(one.plan.buckets))
    backward: list[tuple[float, float, int | None]] = []
    for span in one.timeline.computation:
        start, end = 1e3 * span.start, 1e3 * span.end
        if span.kind in ("forward", UPDATE):
            _bar(axis, _COMPUTATION, start, end, span.kind, None, _FORWARD, limit, label=span.kind)
        elif span.kind == "selection":
            bucket = span.buckets[0]
            _bar(axis, _COMPUTATION, start, end, "selection", bucket, colors[bucket], limit, hatch="////")
        else:  # neighbours of one bucket are one bar
            bucket_ = span.buckets[0] if span.buckets else None
            if backward and backward[-1][2] == bucket_ and abs(backward[-1][1] - start) < 1e-9 * limit:
                backward[-1] = (backward[-1][0], end, bucket_)
            else:
                backward.append((start, end, bucket_))
    for start, end, number in backward:
        color = _DENSE if number is None else colors[number]
        _bar(axis, _COMPUTATION, start, end, "backward", number, color, limit, alpha=0.4, label=number)
    for span in one.timeline.communication:
        start, end = 1e3 * span.start, 1e3 * span.end
        if span.kind == "dense":
            _bar(axis, _COMMUNICATION, start, end, "dense", None, _DENSE, limit)
            continue
        share = (end - start) / len(span.buckets)  # fused ones stand side by side
        for place, bucket in enumerate(span.buckets):
            begin = start + place * share
            _bar(
                axis,
                _COMMUNICATION,
                begin,
                begin + share,
                "sparse",
                bucket,
                colors[bucket],
                limit,
                label=bucket,
            )
    _marks(axis, one, limit)
    axis.set_yticks([_COMPUTATION, _COMMUNICATION], ["computation", "communication"])
    plan = one.plan
    what = f"{len(plan.buckets)} bucket{'' if len(plan.buckets) == 1 else 's'}"
    what += f", {len(plan.dense)} dense" if plan.dense else ""
    axis.set_title(f"{one.name}   {what}, predicted {1e3 * one.seconds:.1f} ms", fontsize=10, loc="left")


def _marks(axis: Any, one: Predicted, limit: float) -> None:
    """The end of computation, and what communication adds to it."""
    end, seen = 1e3 * one.timeline.computation_end, 1e3 * one.timeline.visible_seconds
    axis.plot([end, end], [-0.24, 0.78], color=_INK, linewidth=0.9, linestyle=(0, (3, 2)))
    text = f"computation ends; communication adds {seen:.1f} ms"
    room = end > 0.55 * limit
    axis.annotate(
        text,
        (end, 0.79),
        xytext=(-3 if room else 3, 0),
        textcoords="offset points",
        fontsize=7.5,
        color=_INK,
        va="center",
        ha="right" if room else "left",
    )


def _measured(axis: Any, step: MeasuredStep, shift: float, num_buckets: int, limit: float) -> None:
    colors = _colors(num_buckets)
    for row, kind, alpha in ((_COMPUTATION, "asked", 0.4), (_COMMUNICATION, "measured", 1.0)):
        ends = [
            (span.asked, span.start) if kind == "asked" else (span.start, span.end) for span in step.spans
        ]
        for span, (start, end), (offset, height) in zip(step.spans, ends, stacked(ends), strict=True):
            _bar(
                axis,
                row + offset * _HEIGHT,
                1e3 * (shift + start),
                1e3 * (shift + end),
                kind,
                span.bucket,
                _DENSE if span.bucket is None else colors[span.bucket],
                limit,
                alpha=alpha,
                height=height * _HEIGHT,
                label=span.bucket if height > 0.45 else None,
            )
    axis.set_yticks([_COMPUTATION, _COMMUNICATION], ["waiting for others", "communication"])
    words = f"measured   {1e3 * step.seconds:.1f} ms from the first message on"
    axis.set_title(f"{words} (median of {step.num_steps} steps)", fontsize=10, loc="left")


def _bar(
    axis: Any,
    row: float,
    start: float,
    end: float,
    kind: str,
    bucket: int | None,
    color: Any,
    limit: float,
    *,
    alpha: float = 1.0,
    hatch: str | None = None,
    label: object = None,
    height: float = _HEIGHT,
) -> None:
    width = end - start
    gap = min(0.2 * width, 0.0012 * limit)  # between neighbours
    rgba = matplotlib.colors.to_rgba(color, alpha)
    axis.barh(
        row,
        width - gap,
        left=start,
        height=height,
        color=rgba,
        hatch=hatch,
        edgecolor="white",
        linewidth=0.0,
        gid=kind if bucket is None else f"{kind} {bucket}",
    )
    if label is not None and width > _NARROW * limit * max(1.0, 0.5 * len(str(label))):
        red, green, blue, _ = rgba
        light = alpha < 0.6 or 0.3 * red + 0.59 * green + 0.11 * blue > 0.55
        ink = _INK if light else "white"
        axis.text(start + width / 2, row, str(label), ha="center", va="center", fontsize=8, color=ink)


def _legend(panels: Sequence[Predicted]) -> list[Patch]:
    color = _FEW[0]
    pale = matplotlib.colors.to_rgba(color, 0.4)
    handles = [
        Patch(facecolor=_FORWARD, label="forward"),
        Patch(facecolor=pale, label="backward"),
        Patch(facecolor=color, hatch="////", edgecolor="white", label="selection"),
        Patch(facecolor=color, label="communication"),
    ]
    if any(one.plan.dense for one in panels):
        handles.append(Patch(facecolor=_DENSE, label="dense"))
    return handles
