"""Sixteen simulated ranks with a drop of the learning rate, and encoding times over size."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.studies.study import Result, Study, markdown, rounded
from benchmarks.studies.tasks import digits_task
from benchmarks.studies.training import train
from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.feedback import Bucket, recipe
from horovod_sparse.sparsifiers import ALGORITHMS, BucketInfo
from horovod_sparse.sparsifiers.schedule import Exponential
from horovod_sparse.training.engine import carry_out

SETTING: dict[str, Any] = {"size": 16, "num_steps": 160, "warmup_steps": 40, "drop_at": 110}
SETTING |= {"density": 0.01, "learning_rate": 0.02}
#: by the names of the lines
VARIANTS: dict[str, dict[str, Any]] = {
    "exdyna": {"name": "exdyna"},
    "exdyna, rebalance=paper": {"name": "exdyna", "rebalance": "paper"},
    "micro (parts stay)": {"name": "micro"},
    "topk": {"name": "topk"},
    "hard_threshold": {"name": "hard_threshold", "threshold": 0.01},
    "exdyna, threshold=paper": {"name": "exdyna", "threshold": "paper"},
    "micro, threshold=paper": {"name": "micro", "threshold": "paper"},
}
ENCODERS = ("torch.topk", "topk", "dgc", "dragonn")
#: of float32
ENCODED_BYTES = tuple(2**power for power in range(16, 29, 2))


def encoding_ms(name: str, num_bytes: int, repeat: int = 5) -> float:
    """Returns the median milliseconds to fold and select 0.1 % of a gradient on one core.

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


def measure(variant: str) -> Result:
    """Trains as in the papers: the density falls, and the rate drops."""
    made = recipe(
        **VARIANTS[variant],
        density=SETTING["density"],
        schedule=Exponential(steps=SETTING["warmup_steps"]),
    )
    rate, drop_at = SETTING["learning_rate"], SETTING["drop_at"]
    trace = train(
        digits_task(),
        made,
        size=SETTING["size"],
        num_steps=SETTING["num_steps"],
        learning_rate_at=lambda step: rate * (0.1 if step >= drop_at else 1.0),
    )
    return {
        "density": rounded(np.array(trace.counts) / trace.num_elements),
        "imbalance": rounded(trace.imbalance),
        "thresholds": rounded(trace.thresholds),
        "global_error": rounded(trace.global_error),
        "score": round(trace.score, 4),
    }


def facts(run: dict[str, Any]) -> dict[str, float]:
    """Means after the warm-up: union by density asked, f(t), and threshold against scaled global error.

    Returns:
        `union` and `balance`; `correlation` of threshold and global error (NaN without a threshold).
    """
    after = slice(int(SETTING["warmup_steps"]), None)
    balance = [value for value in run["imbalance"][after] if value is not None]
    pairs = [
        (threshold, error)
        for threshold, error in zip(run["thresholds"][after], run["global_error"][after], strict=True)
        if threshold is not None and error is not None
    ]
    varies = len(pairs) > 2 and min(np.std(np.array(pairs), axis=0)) > 0.0
    return {
        "union": float(np.mean(run["density"][after])) / SETTING["density"],
        "balance": float(np.mean(balance)) if balance else float("nan"),
        "correlation": float(np.corrcoef(np.array(pairs).T)[0, 1]) if varies else float("nan"),
    }


def tables(result: Result) -> str:
    """Returns the pictures' numbers as tables."""

    def cell(value: float) -> str:
        return "-" if np.isnan(value) else f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"

    rows = [
        [f"`{name}`" if name in ALGORITHMS else name, *map(cell, facts(run).values()), f"{run['score']:.1%}"]
        for name, run in result["runs"].items()
    ]
    first = markdown(
        ["16 ranks, after the warm-up", "union / asked", "f(t)", "threshold by error, r", "accuracy"], rows
    )
    sizes = [f"{num_bytes / 2**20:g} MiB" for num_bytes in result["encoded_bytes"]]
    encoded = [[name, *map(cell, times)] for name, times in result["encoding_ms"].items()]
    return f"{first}\n\n{markdown(['encoding, ms', *sizes], encoded)}"


def _encode(result: Result) -> None:
    if "encoding_ms" not in result:
        result["encoded_bytes"] = list(ENCODED_BYTES)
        result["encoding_ms"] = {
            name: [round(encoding_ms(name, num_bytes), 4) for num_bytes in ENCODED_BYTES] for name in ENCODERS
        }


FACTS = {name: SETTING[name] for name in ("size", "density", "drop_at", "warmup_steps")}
STUDY = Study("papers", lambda: list(VARIANTS), measure, tables, facts=FACTS, complete=_encode)
