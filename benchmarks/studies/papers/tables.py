"""Tables of docs/appendix/papers.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.studies.study import markdown


def ranks(result: dict[str, Any]) -> str:
    """Returns a table for ExDyna's Fig. 8: scores on the way, and the union."""
    setting, rows = result["setting"], []
    for name, run in result["runs"].items():
        label = "dense" if name == "dense" else f"P = {name.partition('/')[2]}"
        places = [len(run["scores"]) // 3, 2 * len(run["scores"]) // 3, -1]
        scores = [f"{run['scores'][place]:.1%}" for place in places]
        rows.append([label, *scores, "-" if name == "dense" else f"{run['union'] / setting['density']:.3f}"])
    steps = next(iter(result["runs"].values()))["steps"]
    shown = [f"step {steps[place]}" for place in (len(steps) // 3, 2 * len(steps) // 3, -1)]
    return markdown(["ExDyna", *shown, "union / asked"], rows)


def residuals(result: dict[str, Any]) -> str:
    """SparDL's Fig. 17: score at the end and loss of the last steps, mean and range over the seeds."""
    rows = []
    for number, way in ((2, "2 teams, R-SAG"), (7, "7 teams, B-SAG")):
        for mode in result["setting"]["modes"]:
            found = [run for key, run in result["runs"].items() if key.startswith(f"{number}/{mode}/")]
            scores = [run["scores"][-1] for run in found]
            losses = [float(np.mean(run["losses"][-20:])) for run in found]
            rows.append(
                [
                    f"{way}, {mode}",
                    str(len(found)),
                    f"{np.mean(scores):.2%} ({min(scores):.1%} to {max(scores):.1%})",
                    f"{np.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
                ]
            )
    return markdown(["residuals", "seeds", "test accuracy", "loss, last 20 steps"], rows)


def beside_spardl(result: dict[str, Any], fact: str, shown: str) -> str:
    """SparDL's Figs. 12 and 13, measured, or 16: seconds of communication by that fact of a launch."""
    by_fact: dict[float, dict[str, float]] = {}
    for launch in result["launches"]:
        row = by_fact.setdefault(launch[fact], {})
        row |= {item["method"]: item["communication"]["seconds"]["median"] for item in launch["results"]}
    found = dict(sorted(by_fact.items()))
    methods = list(dict.fromkeys(name for row in found.values() for name in row))
    rows = []
    for method in methods:
        seconds = [(row.get(method), row["spardl:teams=1"]) for row in found.values()]
        cells = ["-" if mine is None else f"{1e3 * mine:.1f} ({mine / one:.2f})" for mine, one in seconds]
        rows.append([f"`{method}`", *cells])
    return markdown(["ms (by SparDL's)", *(shown.format(key) for key in found)], rows)


def parts(result: dict[str, Any]) -> str:
    """Returns a table for DRAGONN's Figs. 6 and 10 (b): seconds of an iteration by part."""
    (launch,) = result["launches"]
    seconds = {item["method"]: item["seconds"]["median"] for item in launch["results"]}
    alone, dense = seconds["alone"], ", decoded densely"
    shown = {
        "dense": "dense",
        f"dgc{dense}": "DGC, dense decoding",
        f"dragonn{dense}": "DRAGONN's hash, dense decoding",
        f"dragonn by default{dense}": "and tensors selected",
        "dragonn by default": "and sparse decoding",
        "dragonn": "hash and sparse decoding, all tensors",
        "dgc": "DGC, sparse decoding",
        f"dgc by default{dense}": "DGC, tensors selected, dense decoding",
        "dgc by default": "DGC, tensors selected, sparse decoding",
    }
    first = seconds[f"dgc{dense}"]
    rows = [
        [
            text,
            f"{1e3 * seconds[name]:.0f}",
            f"{1e3 * (seconds[name] - alone):.0f}",
            f"{(first - alone) / (seconds[name] - alone):.2f}",
        ]
        for name, text in shown.items()
    ]
    return markdown(["", "ms of an iteration", "above computing", "of that, DGC's by this"], rows)
