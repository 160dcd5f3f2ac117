"""Writes docs/measurements/merging.json, and the tables of docs/merging.md between their marks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from . import measure

ROOT = Path(__file__).resolve().parents[2]
JSON, PAGE = ROOT / "docs" / "measurements" / "merging.json", ROOT / "docs" / "merging.md"
SIZES = (2, 4, 8, 16)
#: by the mark in a page: files beside JSON, and the page
HOSTS = {
    "hosts": ("merging_hosts.json", PAGE),
    "names": ("merging_names.json", PAGE),
    "plans": ("levels_merging.json", PAGE.with_name("levels.md")),
}


def random_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| layers | inputs | greedy worse | by more than 1 % | median loss where worse | largest |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['layers']} | {row['inputs']} | {row['worse']} | {row['worse_by_1_percent']} "
        f"| {row['median_loss_where_worse']:.1%} | {row['largest_loss']:.1%} |"
        for row in rows
    ]
    return "\n".join(lines)


def paper_table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| model | strategy | buckets | paper, Table V | predicted s | paper, Table VI, measured s |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        if result["size"] != 16:
            continue
        paper = measure.PAPER[result["model"]]
        for name, row in result["strategies"].items():
            buckets = f"{row['buckets']}" + (f", {row['dense']} dense" if row.get("dense") else "")
            lines.append(
                f"| {result['model']} | {name} | {buckets} | {paper['layers'].get(name, '')} "
                f"| {row['seconds']:.3f} | {paper['seconds'].get(name, '')} |"
            )
    return "\n".join(lines)


def loss_table(results: list[dict[str, Any]]) -> str:
    lines = ["| model | " + " | ".join(f"P = {size}" for size in SIZES) + " |", "|---" * 5 + "|"]
    for model in measure.PAPER:
        cells = []
        for size in SIZES:
            (result,) = (r for r in results if (r["model"], r["size"]) == (model, size))
            rows = result["strategies"]
            loss = rows["omgs"]["seconds"] / rows["optimal"]["seconds"] - 1
            cells.append(f"{loss:.1%} ({rows['omgs']['buckets']} : {rows['optimal']['buckets']})")
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def scaling_table(curves: list[dict[str, Any]]) -> str:
    sizes = [point["size"] for point in curves[0]["points"]]
    lines = [
        "| algorithm | " + " | ".join(f"P = {size}" for size in sizes) + " | dense wins from |",
        "|---" * (len(sizes) + 2) + "|",
    ]
    for curve in curves:
        cells = [f"{point['sparse_seconds']:.3f}" for point in curve["points"]]
        crossing = ", ".join(f"P = {size:.0f}" for size in curve["crossings"]) or "never here"
        lines.append(f"| {curve['algorithm']} | " + " | ".join(cells) + f" | {crossing} |")
    cells = [f"{point['dense_seconds']:.3f}" for point in curves[0]["points"]]
    lines.append("| dense | " + " | ".join(cells) + " | |")
    return "\n".join(lines)


def hosts_table(result: dict[str, Any]) -> str:
    """Predicted and measured iterations, as `scripts/bench merging` found them."""
    lines = [
        "| plan | buckets | dense | predicted ms | measured ms | quartiles | prediction off by |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        seconds = row["seconds"]
        lines.append(
            f"| {row['method']} | {row['buckets']} | {row['dense']} | {1e3 * row['predicted_seconds']:.1f} "
            f"| {1e3 * seconds['median']:.1f} | {1e3 * seconds['low']:.1f} to {1e3 * seconds['high']:.1f} "
            f"| {row['error']:+.1%} |"
        )
    lines += ["", "| goal | allowed | found | |", "|---|---|---|---|"]
    for name, goal in result["goals"].items():
        end = "met" if goal["met"] else "**missed**"
        lines.append(f"| {name} | {goal['allowed']:.0%} | {goal['found']:+.1%} | {end} |")
    return "\n".join(lines)


def put(page: str, mark: str, text: str) -> str:
    pattern = re.compile(rf"(<!-- {mark} -->\n).*?(\n<!-- end -->)", re.DOTALL)
    changed, count = pattern.subn(lambda match: match[1] + text + match[2], page)
    if count != 1:
        raise SystemExit(f"the page has {count} places marked {mark!r}, not one")
    return changed


def put_hosts() -> None:
    """The tables of what was measured on hosts, from the files of `scripts/bench merging --json`."""
    for mark, (name, page) in HOSTS.items():
        found = json.loads((JSON.parent / name).read_text(encoding="utf-8"))
        page.write_text(put(page.read_text(encoding="utf-8"), mark, hosts_table(found)), encoding="utf-8")


def main() -> None:
    put_hosts()
    if "--hosts" in sys.argv[1:]:
        return
    random = [measure.random_inputs(300, layers) for layers in (8, 14, 30)]
    tables = [measure.table(model, size) for model in measure.PAPER for size in SIZES]
    curves = [
        measure.scaling("resnet50", algorithm, 0.01, [2, 8, 32, 128, 512, 4096])
        for algorithm in ("topk", "dragonn", "micro")
    ]
    report = {"random": random, "tables": tables, "scaling": curves}
    JSON.parent.mkdir(parents=True, exist_ok=True)
    JSON.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    page = put(page, "random", random_table(random))
    page = put(page, "paper", paper_table(tables))
    page = put(page, "loss", loss_table(tables))
    page = put(page, "scaling", scaling_table(curves))
    PAGE.write_text(page, encoding="utf-8")
