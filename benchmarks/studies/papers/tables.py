"""Tables of docs/appendix/papers.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.studies.study import MEASUREMENTS, load, markdown


def ranks(result: dict[str, Any]) -> str:
    """ExDyna's Fig. 8: scores on the way, and the union."""
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


def launches_by(result: dict[str, Any], fact: str) -> dict[float, dict[str, float]]:
    """By that fact of a launch, seconds of communication by method: of `scripts/bench allreduce`."""
    found: dict[float, dict[str, float]] = {}
    for launch in result["launches"]:
        row = found.setdefault(launch[fact], {})
        row |= {item["method"]: item["communication"]["seconds"]["median"] for item in launch["results"]}
    return dict(sorted(found.items()))


def _beside_spardl(found: dict[float, dict[str, float]], shown: str) -> str:
    methods = list(dict.fromkeys(name for row in found.values() for name in row))
    rows = []
    for method in methods:
        seconds = [(row.get(method), row["spardl:teams=1"]) for row in found.values()]
        cells = ["-" if mine is None else f"{1e3 * mine:.1f} ({mine / one:.2f})" for mine, one in seconds]
        rows.append([f"`{method}`", *cells])
    return markdown(["ms (by SparDL's)", *(shown.format(key) for key in found)], rows)


def workers_on_hosts(result: dict[str, Any]) -> str:
    """SparDL's Fig. 12, measured, and the teams of its Fig. 13."""
    return _beside_spardl(launches_by(result, "ranks"), "P = {:g}")


def densities(result: dict[str, Any]) -> str:
    """SparDL's Fig. 16: communication by density."""
    return _beside_spardl(launches_by(result, "density"), "density {:g}")


def plans_on_hosts(found: dict[str, Any]) -> str:
    """OMGS's Table VI beside what was predicted and measured here."""
    rows = []
    for name in ("vgg16_cifar", "inception_v4", "lstm_ptb"):
        result = found if name == "vgg16_cifar" else load(MEASUREMENTS / f"merging_{name}.json")
        for item in result["results"]:
            seconds = item["seconds"]["median"]
            times = [
                f"{1e3 * item['predicted_seconds']:.0f}",
                f"{1e3 * seconds:.0f}",
                f"{item['error']:+.1%}",
            ]
            rows.append([name, item["method"], str(item["buckets"]), *times])
    return markdown(["model", "plan", "buckets", "predicted ms", "measured ms", "off by"], rows)


def parts(result: dict[str, Any]) -> str:
    """DRAGONN's Figs. 6 and 10 (b): iterations with one part after the other."""
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
