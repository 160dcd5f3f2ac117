"""Tables of plans: `scripts/bench plans` predicts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common.pages import markdown
from benchmarks.plans import PAPER, SIZES


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
