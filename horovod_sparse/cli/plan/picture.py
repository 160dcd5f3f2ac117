"""A step as a picture: computation above communication over time, one colour per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from horovod_sparse.cli.plan.report import Predicted
from horovod_sparse.planning.timeline import UPDATE, Span

#: the two queues, and what is in none of the buckets
_COMPUTATION, _COMMUNICATION = 0.5, 0.0
_PLAIN = {
    "forward": "#D9D9D9",
    UPDATE: "#D9D9D9",
    "backward": "#BBBBBB",
    "packing": "#8C8C8C",
    "dense": "#8C8C8C",
}
#: a bar narrower than this share of the picture carries no number
_NARROW = 0.02


def draw_queues(panels: Sequence[Predicted], path: str) -> None:
    """One panel for every plan, over the same time, as Fig. 1 of OMGS-SGD; the path's end is the format."""
    count, limit = len(panels), 1e3 * max(one.seconds for one in panels)
    figure, axes = plt.subplots(
        count, 1, figsize=(10.5, 0.9 + 1.55 * count), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, one in zip(axes[:, 0], panels, strict=True):
        for span in one.timeline.computation:
            _bar(axis, _COMPUTATION, span, len(one.plan.buckets), limit)
        for span in one.timeline.communication:
            _bar(axis, _COMMUNICATION, span, len(one.plan.buckets), limit)
        end, seen = 1e3 * one.timeline.computation_end, 1e3 * one.timeline.visible_seconds
        axis.axvline(end, color="#333333", linewidth=0.9, linestyle=(0, (3, 2)))
        what = f"{one.plan}, predicted {1e3 * one.seconds:.1f} ms, {seen:.1f} ms of it behind computation"
        axis.set_title(f"{one.name}   {what}", fontsize=9, loc="left")
        axis.set_yticks([_COMPUTATION, _COMMUNICATION], ["computation", "communication"])
        axis.set(xlim=(0, limit * 1.01), ylim=(-0.3, 0.8))
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1, 0].set_xlabel("milliseconds from the beginning of the step", fontsize=9)
    legend = [
        Patch(facecolor=_PLAIN["forward"], label="forward, update"),
        Patch(facecolor="C0", alpha=0.4, label="backward"),
        Patch(facecolor="C0", hatch="////", edgecolor="white", label="selection"),
        Patch(facecolor="C0", label="communication"),
        Patch(facecolor=_PLAIN["dense"], label="dense"),
    ]
    figure.legend(handles=legend, loc="outside upper right", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _bar(axis: Any, row: float, span: Span, num_buckets: int, limit: float) -> None:
    """What is fused stands side by side."""
    width = 1e3 * (span.end - span.start) / max(1, len(span.buckets))
    for place, bucket in enumerate(span.buckets or (None,)):
        color: Any = (
            _PLAIN[span.kind] if bucket is None else matplotlib.colormaps["turbo"](bucket / num_buckets)
        )
        left, alpha = 1e3 * span.start + place * width, 0.4 if span.kind == "backward" else 1.0
        hatch = "////" if span.kind == "selection" else None
        bar = {"color": color, "alpha": alpha, "hatch": hatch, "edgecolor": "white", "linewidth": 0.0}
        axis.barh(row, width, left=left, height=0.36, gid=f"{span.kind} {bucket}", **bar)
        if bucket is not None and span.kind == "sparse" and width > _NARROW * limit:
            axis.text(left + width / 2, row, str(bucket), ha="center", va="center", fontsize=8, color="white")
