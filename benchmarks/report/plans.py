"""Tables of plans: `scripts/bench plans` predicts them, `scripts/bench merging` measures them on hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.plans import PAPER, SIZES
from benchmarks.report.tables import markdown


def random_table(result: Mapping[str, Any]) -> str:
    """The greedy rule against the exact search on random inputs."""
    rows = [
        [
            *(f"{row[key]}" for key in ("layers", "inputs", "worse", "worse_by_1_percent")),
            f"{row['median_loss_where_worse']:.1%}",
            f"{row['largest_loss']:.1%}",
        ]
        for row in result["random"]
    ]
    header = ["layers", "inputs", "greedy worse", "by more than 1 %", "median loss where worse", "largest"]
    return markdown(header, rows)


def paper_table(result: Mapping[str, Any]) -> str:
    """The models of OMGS-SGD with its constants, beside its tables."""
    rows = []
    for one in result["tables"]:
        if one["size"] != 16:
            continue
        paper = PAPER[one["model"]]
        for name, row in one["strategies"].items():
            buckets = f"{row['buckets']}" + (f", {row['dense']} dense" if row.get("dense") else "")
            theirs = str(paper["layers"].get(name, "")), str(paper["seconds"].get(name, ""))
            rows.append([one["model"], name, buckets, theirs[0], f"{row['seconds']:.3f}", theirs[1]])
    header = ["model", "strategy", "buckets", "paper, Table V", "predicted s", "paper, Table VI, measured s"]
    return markdown(header, rows)


def loss_table(result: Mapping[str, Any]) -> str:
    """How much longer the greedy plan's step is than the best one's, and buckets of both."""
    rows = []
    for model in PAPER:
        cells = []
        for size in SIZES:
            (one,) = (one for one in result["tables"] if (one["model"], one["size"]) == (model, size))
            greedy, best = one["strategies"]["omgs"], one["strategies"]["optimal"]
            loss = greedy["seconds"] / best["seconds"] - 1
            cells.append(f"{loss:.1%} ({greedy['buckets']} : {best['buckets']})")
        rows.append([model, *cells])
    return markdown(["model", *(f"P = {size}" for size in SIZES)], rows)


def hosts_table(result: Mapping[str, Any]) -> str:
    """Predicted and measured iterations, as `scripts/bench merging` found them, and its goals."""
    rows = []
    for row in result["results"]:
        times = row["seconds"]
        rows.append(
            [
                row["method"],
                str(row["buckets"]),
                str(row["dense"]),
                f"{1e3 * row['predicted_seconds']:.1f}",
                f"{1e3 * times['median']:.1f}",
                f"{1e3 * times['low']:.1f} to {1e3 * times['high']:.1f}",
                f"{row['error']:+.1%}",
            ]
        )
    header = ["plan", "buckets", "dense", "predicted ms", "measured ms", "quartiles", "prediction off by"]
    goals = [
        [name, f"{goal['allowed']:.0%}", f"{goal['found']:+.1%}", "met" if goal["met"] else "**missed**"]
        for name, goal in result["goals"].items()
    ]
    return f"{markdown(header, rows)}\n\n{markdown(['goal', 'allowed', 'found', ''], goals)}"
