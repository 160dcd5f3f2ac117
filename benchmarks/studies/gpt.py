"""examples/gpt_text.py in full on two real ranks, dense and sparse: bits per byte of text it has not seen."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.studies.study import PICTURES, Result, Study, horovodrun, launched, markdown

STEPS, SIZE = 1000, 2
_ADAM = "feedback=adam(clip_norm=1.0)"
#: rows of the table -> compression, learning rate
ROWS = {
    "none": ("none", 0.001),
    "none, three times the rate": ("none", 0.003),
    "exdyna:density=0.05": ("exdyna:density=0.05", 0.001),
    "exdyna:density=0.05, three times the rate": ("exdyna:density=0.05", 0.003),
    "exdyna:density=0.01": ("exdyna:density=0.01", 0.001),
    "exdyna:density=0.01, three times the rate": ("exdyna:density=0.01", 0.003),
    "topk:density=0.01": ("topk:density=0.01", 0.001),
    "topk 1 %, adam, three times the rate": (f"topk:density=0.01,{_ADAM}", 0.003),
    "topk 0.3 %, adam, 2 bits, three times the rate": (
        f"topk:density=0.003,values=2bit,indices=gaps,{_ADAM}",
        0.003,
    ),
}


def measure(row: str) -> Result:
    """Launches a training."""
    compression, rate = ROWS[row]
    given = ["--steps", str(STEPS), "--compression", compression, "--learning-rate", str(rate)]
    return launched([*horovodrun(SIZE, "gpt_text"), *given])


def table(result: Result) -> str:
    """A row per training. A step of dense training is the same work at any rate: the better one counts."""
    runs = {name: result["runs"][name] for name in ROWS if name in result["runs"]}
    dense = min(
        (run for name, run in runs.items() if name[:4] == "none"), key=lambda run: float(run["bits_per_byte"])
    )
    rows = [
        [
            name,
            f"{run['bits_per_byte']:.3f}",
            f"{run['bits_per_byte'] - dense['bits_per_byte']:+.3f}",
            f"{run['bytes_per_step'] / 1000:,.0f}",
            f"{dense['bytes_per_step'] / run['bytes_per_step']:.0f}x",
            f"{run.get('density_union', 1.0):.2%}",
        ]
        for name, run in runs.items()
    ]
    return markdown(["compression", "bits per byte", "to dense", "kB per step", "saving", "union"], rows)


def draw(result: Result) -> None:
    """Training loss over the steps, smoothed over five points of the curve."""
    figure, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
    for name in ROWS:
        if name in result["runs"]:
            steps, bits = zip(*result["runs"][name]["curve"], strict=True)
            smooth = [np.mean(bits[max(0, place - 4) : place + 1]) for place in range(len(bits))]
            axes.plot(steps, smooth, label=name)
    axes.set(xlabel="step", ylabel="bits per byte, training")
    axes.set_ylim(top=6)
    axes.grid(True, linewidth=0.3)
    axes.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(PICTURES / "gpt.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


STUDY = Study("gpt", lambda: list(ROWS), measure, table, facts={"size": SIZE, "steps": STEPS}, draw=draw)
