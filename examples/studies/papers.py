"""Figures of the papers that one process can make: sixteen simulated ranks, and encoding times over size.

scripts/paper_study             measures what is missing, and draws
scripts/paper_study --draw      draws only
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horovod_sparse.arrays.host import HostAccumulator
from horovod_sparse.feedback import Bucket, ErrorFeedback, recipe
from horovod_sparse.frontend.engine import carry_out
from horovod_sparse.sparsifiers import ALGORITHMS, BucketInfo
from horovod_sparse.sparsifiers.schedule import Exponential
from studies import results
from studies.tasks import digits_task
from studies.training import train

__all__ = ["ENCODERS", "VARIANTS", "encoding_ms", "facts", "main", "tables"]

FILE = results.MEASUREMENTS / "papers.json"
DOCUMENT = results.DOCUMENT.with_name("reproduced.md")
SIZE, NUM_STEPS, WARMUP_STEPS, DROP_AT, DENSITY, RATE = 16, 160, 40, 110, 0.01, 0.02
#: by the names of the lines
VARIANTS: dict[str, dict[str, Any]] = {
    "exdyna": {"name": "exdyna"},
    "exdyna, rebalance=paper": {"name": "exdyna", "rebalance": "paper"},
    "micro (parts stay)": {"name": "micro"},
    "topk": {"name": "topk"},
    "hard_threshold": {"name": "hard_threshold", "threshold": 0.01},
}
ENCODERS = ("torch.topk", "topk", "dgc", "dragonn")
#: of float32
ENCODED_BYTES = tuple(2**power for power in range(16, 29, 2))


def encoding_ms(name: str, num_bytes: int, repeat: int = 5) -> float:
    """Median time to fold and select 0.1 % of a gradient, one core.

    Args:
        name: one of `ENCODERS`.
        num_bytes: of the gradient.
        repeat: measurements.
    """
    n, found = num_bytes // 4, []
    generator = np.random.default_rng(0)
    drawn = generator.standard_normal(n, np.float32)
    residual = torch.zeros(n)
    chosen = None if name == "torch.topk" else recipe(name, density=0.001)
    if chosen is not None:
        info = BucketInfo("bucket", n)
        bucket = Bucket(info, chosen, HostAccumulator(n, "float32", density=0.001))
    for _ in range(repeat + 1):
        gradient = drawn.copy()
        if chosen is None:
            started = time.perf_counter()
            residual.add_(torch.from_numpy(gradient))
            places = torch.topk(residual.abs(), max(1, n // 1000)).indices
            residual[places] = 0.0
            found.append(time.perf_counter() - started)
        else:
            carry_out(bucket.step(gradient), lambda request: request.buffer)  # type: ignore[union-attr]
            found.append(bucket.last.fold_seconds + bucket.last.select_seconds)
    return 1e3 * statistics.median(found[1:])


def measure(variant: str) -> dict[str, Any]:
    """A training on sixteen simulated ranks, with a drop of the learning rate."""
    made = recipe(
        **VARIANTS[variant],
        density=DENSITY,
        schedule=Exponential(steps=WARMUP_STEPS),
        feedback=ErrorFeedback(scale_residual=True),
    )
    task = digits_task()

    def rate(step: int) -> float:
        return RATE * (0.1 if step >= DROP_AT else 1.0)

    trace = train(task, made, size=SIZE, num_steps=NUM_STEPS, learning_rate_at=rate)
    short = lambda values: [None if np.isnan(v) else float(f"{v:.4g}") for v in values]  # noqa: E731
    return {
        "density": short(np.array(trace.counts) / trace.num_elements),
        "imbalance": short(trace.imbalance),
        "thresholds": short(trace.thresholds),
        "global_error": short(trace.global_error),
        "score": round(trace.score, 4),
    }


def facts(run: dict[str, Any]) -> dict[str, float]:
    """Means after the warm-up: union by density asked, f(t), and threshold against scaled global error.

    Returns:
        `union` and `balance`; `correlation` of threshold and global error (NaN without a threshold).
    """
    after = slice(WARMUP_STEPS, None)
    balance = [value for value in run["imbalance"][after] if value is not None]
    pairs = [
        (threshold, error)
        for threshold, error in zip(run["thresholds"][after], run["global_error"][after], strict=True)
        if threshold is not None and error is not None
    ]
    varies = len(pairs) > 2 and min(np.std(np.array(pairs), axis=0)) > 0.0
    return {
        "union": float(np.mean(run["density"][after])) / DENSITY,
        "balance": float(np.mean(balance)) if balance else float("nan"),
        "correlation": float(np.corrcoef(np.array(pairs).T)[0, 1]) if varies else float("nan"),
    }


def draw(result: dict[str, Any]) -> None:
    """Density, f(t), threshold over error, and encoding time: docs/pictures/papers.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.4), layout="constrained")
    (density, balance), (errors, encoding) = figure.subplots(2, 2)
    for name, run in result["runs"].items():
        steps = np.arange(1, len(run["density"]) + 1)
        density.plot(steps, run["density"], label=name)
        if any(value is not None for value in run["imbalance"]):
            balance.plot(steps, run["imbalance"], label=name)
    density.axhline(DENSITY, color="black", linewidth=0.6, linestyle=":")
    density.set(yscale="log", ylabel="density of the union", title="ExDyna, Fig. 6")
    balance.set(ylabel="f(t): P times the largest count by all", title="ExDyna, Fig. 9")
    run = result["runs"]["exdyna"]
    after = slice(WARMUP_STEPS, None)
    threshold = np.array(run["thresholds"][after], float)
    error = np.array(run["global_error"][after], float)
    steps = np.arange(WARMUP_STEPS + 1, NUM_STEPS + 1)
    errors.plot(steps, threshold, label="threshold")
    scale = np.nansum(threshold) / np.nansum(error)
    errors.plot(steps, error * scale, label="global error, scaled to the same mean")
    errors.set(ylabel="magnitude", title="ExDyna, Fig. 10")
    for name, times in result["encoding_ms"].items():
        encoding.plot(result["encoded_bytes"], times, "o-", label=name)
    encoding.set(xscale="log", yscale="log", xlabel="bytes of the gradient", ylabel="ms, fold and selection")
    encoding.set_title("DRAGONN, Fig. 5a (one core)")
    for axes in (density, balance, errors):
        axes.axvline(DROP_AT + 1, color="black", linewidth=0.6, linestyle=":")
        axes.set_xlabel(f"step ({SIZE} simulated ranks; the learning rate falls at {DROP_AT})")
    for axes in (density, balance, errors, encoding):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(results.PICTURES / "papers.png", dpi=110, metadata={"Software": None})


def tables(result: dict[str, Any]) -> str:
    """What the pictures show, in numbers."""

    def cell(value: float) -> str:
        return "-" if np.isnan(value) else f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"

    rows = [
        [f"`{name}`" if name in ALGORITHMS else name, *map(cell, facts(run).values()), f"{run['score']:.1%}"]
        for name, run in result["runs"].items()
    ]
    first = results.markdown(
        ["16 ranks, after the warm-up", "union / asked", "f(t)", "threshold by error, r", "accuracy"], rows
    )
    sizes = [f"{num_bytes / 2**20:g} MiB" for num_bytes in result["encoded_bytes"]]
    encoded = [[name, *map(cell, times)] for name, times in result["encoding_ms"].items()]
    return f"{first}\n\n{results.markdown(['encoding, ms', *sizes], encoded)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and draws."""
    parser = argparse.ArgumentParser(
        prog="scripts/paper_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--again", action="store_true", help="measure everything anew")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = {} if options.again else results.load(FILE)
    if not options.draw:
        result |= {"command": "scripts/paper_study", "machine": results.machine()}
        result |= {"size": SIZE, "density": DENSITY, "drop_at": DROP_AT, "warmup_steps": WARMUP_STEPS}
        if "encoding_ms" not in result:
            result["encoded_bytes"] = list(ENCODED_BYTES)
            result["encoding_ms"] = {
                name: [round(encoding_ms(name, num_bytes), 4) for num_bytes in ENCODED_BYTES]
                for name in ENCODERS
            }
            results.save(FILE, result)
        runs = result.setdefault("runs", {})
        for variant in VARIANTS:
            if variant not in runs:
                runs[variant] = measure(variant)
                results.save(FILE, result)
    draw(result)
    text = tables(result)
    print(text)
    DOCUMENT.write_text(results.with_table(DOCUMENT.read_text("utf-8"), "papers", text), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
