"""Compares a sparse run of an example with a dense one, from the JSON files that both wrote.

python examples/compare.py sparse.json dense.json --min-accuracy 0.93 --min-saving 20
python examples/compare.py sparse.json dense.json --network "two hosts at 1 Gbit/s" --picture demo.png
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from horovod_sparse.cost import AlphaBeta, Profile, assumed_profile
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.merging import ParameterFacts, Plan, Workload, predict

Run = dict[str, Any]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sparse", type=Path)
    parser.add_argument("dense", type=Path)
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="least accuracy of the sparse run")
    parser.add_argument("--min-saving", type=float, default=0.0, help="least factor by which bytes shrink")
    parser.add_argument(
        "--network", metavar="WORDS", help="between the ranks; left out, they shared a machine"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="test accuracy over seconds, both runs")
    return parser.parse_args()


def milliseconds(name: str) -> Callable[[Run], str]:
    """A mean time per step, where the run measured it."""
    return lambda run: f"{run[name] * 1e3:.2f} ms" if run.get(name) is not None else "-"


def fraction(name: str) -> Callable[[Run], str]:
    """A density, where the run has one."""
    return lambda run: f"{run[name]:.4%}" if run.get(name) is not None else "-"


def training_seconds(run: Run) -> str:
    """Of all steps, without tests, where the run has them."""
    return f"{run['curve'][-1][0]:.1f} s" if run.get("curve") else "-"


ROWS: list[tuple[str, Callable[[Run], str]]] = [
    ("test accuracy", lambda run: f"{run['accuracy']:.1%}"),
    ("ranks, steps, parameters", lambda run: f"{run['size']}, {run['steps']}, {run['num_parameters']:,}"),
    ("gradient bytes per step and rank", lambda run: f"{run['bytes_per_step']:,.0f}"),
    ("gradient bytes in total", lambda run: f"{run['bytes_per_step'] * run['steps']:,.0f}"),
    ("density asked", fraction("density_asked")),
    ("density achieved (union of ranks)", fraction("density_union")),
    ("seconds of training", training_seconds),
    ("mean time per step", milliseconds("step_seconds")),
    ("median time per step, second half", milliseconds("settled_seconds")),
    ("    fold (residual += gradient)", milliseconds("fold_seconds")),
    ("    select and pack", milliseconds("select_seconds")),
    ("    wait for the network", milliseconds("wait_seconds")),
    ("    apply", milliseconds("apply_seconds")),
]


def speedups(sparse: Run, bandwidths: list[float], latency: float = 50e-6) -> list[tuple[float, float]]:
    """Predicted iterations on other networks: sparse and dense seconds, with all else as it was measured.

    Args:
        sparse: a run that has decided about its plan by times.
        bandwidths: in bit/s.
        latency: of a message, in seconds.
    """
    known = sparse["predicted"]
    profile, plan = Profile.from_json(known["profile"]), Plan.from_dict(known["plan"])
    names = list(profile.backward_seconds)
    facts = tuple(ParameterFacts(name, known["sizes"][name]) for name in names)
    step = Workload(facts, profile.backward_of(names), profile.forward_seconds)
    sparsifier, whole = parse_recipe(known["sparsifier"]).sparsifier, Plan((), tuple(reversed(names)))
    found = []
    for bandwidth in bandwidths:
        network = assumed_profile(AlphaBeta(latency, 8.0 / bandwidth), profile.size).collectives
        cost = dataclasses.replace(profile, collectives=network).cost(sparsifier, fuse_sparse=True)
        found.append(tuple(predict(step, one, cost).iteration_seconds for one in (plan, whole)))
    return found


def verdict(sparse: Run, dense: Run, network: str | None) -> list[str]:
    """What time the sparse run saves, or would save: lines for the terminal."""
    if not dense.get("settled_seconds") or not sparse.get("settled_seconds"):
        return []
    factor = dense["settled_seconds"] / sparse["settled_seconds"]
    words = f"a step takes {sparse['settled_seconds'] * 1e3:.0f} ms sparse, "
    words += f"{dense['settled_seconds'] * 1e3:.0f} ms dense: "
    words += f"{factor:.1f} times faster" if factor >= 1.0 else f"{1.0 / factor:.1f} times slower"
    known = sparse.get("predicted")
    if network is not None:
        lines = [f"between {network} {words}"]
        if known is not None:
            expected = known["seconds"]["all dense"] / known["seconds"]["taken"]
            text = f"predicted from ten steps: {expected:.1f} times, {abs(expected / factor - 1.0):.0%} off"
            taken, whole = (1e3 * known["seconds"][name] for name in ("taken", "all dense"))
            lines.append(f"{text} ({taken:.0f} ms sparse, {whole:.0f} ms dense)")
        return lines
    lines = [f"here {words}", "but ranks of one machine meet in its memory (loopback), which is no network"]
    if known is not None:
        rates = (1.0, 10.0, 25.0)
        shown = [
            f"{sparse_seconds * 1e3:.0f} ms and {dense_seconds * 1e3:.0f} ms at {rate:g} Gbit/s "
            f"({dense_seconds / sparse_seconds:.1f} times)"
            for rate, (sparse_seconds, dense_seconds) in zip(
                rates, speedups(sparse, [1e9 * rate for rate in rates]), strict=True
            )
        ]
        lines.append(f"predicted for hosts, sparse and dense: {'; '.join(shown)}")
    return lines


def draw(sparse: Run, dense: Run, network: str | None, path: Path) -> None:
    """Test accuracy over seconds of training, and what a step takes.

    Args:
        sparse: the sparse run, with its curve.
        dense: the dense one.
        network: between the ranks, in words.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    for run, color, name in ((dense, "0.45", "dense"), (sparse, "C0", sparse["compression"])):
        seconds, scores = zip(*run["curve"], strict=True)
        curves.plot(seconds, [100 * score for score in scores], "o-", color=color, label=name)
    curves.set(xlabel="seconds of training", ylabel="test accuracy, %")
    curves.set_xlim(left=0)
    curves.grid(alpha=0.3)
    curves.legend()
    rows = [("dense", dense["settled_seconds"], "0.45"), ("sparse", sparse["settled_seconds"], "C0")]
    if (known := sparse.get("predicted")) is not None and network is not None:
        rows.insert(1, ("dense, predicted", known["seconds"]["all dense"], "0.8"))
        rows.append(("sparse, predicted", known["seconds"]["taken"], "lightskyblue"))
    drawn = bars.barh([name for name, _, _ in rows], [1e3 * value for _, value, _ in rows],
                      color=[color for _, _, color in rows])  # fmt: skip
    bars.bar_label(drawn, fmt="%.0f", padding=3)
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.set(xlabel="time of a step, ms")
    figure.suptitle(
        f"{dense['size']} ranks, {dense['num_parameters']:,} parameters, {network or 'one machine'}"
    )
    figure.savefig(path, dpi=130)


def main() -> int:
    """Prints the table; 0 if the sparse run is good enough."""
    args = arguments()
    sparse, dense = (json.loads(path.read_text()) for path in (args.sparse, args.dense))
    saving = dense["bytes_per_step"] / sparse["bytes_per_step"]
    table = Table("", sparse["compression"], f"dense ({dense['compression']})")
    for name, show in ROWS:
        if (show(sparse), show(dense)) != ("-", "-"):
            table.add_row(name, show(sparse), show(dense))
    console = Console(highlight=False)
    console.print(table)
    for line in verdict(sparse, dense, args.network):
        console.print(line)
    if args.picture and sparse.get("curve") and dense.get("curve"):
        if importlib.util.find_spec("matplotlib") is None:
            console.print("no picture: matplotlib is not installed")
        else:
            draw(sparse, dense, args.network, args.picture)
            console.print(f"picture: {args.picture}")
    failures = []
    if sparse["accuracy"] < args.min_accuracy:
        failures.append(f"accuracy {sparse['accuracy']:.1%} is below {args.min_accuracy:.1%}")
    if saving < args.min_saving:
        failures.append(f"traffic shrank {saving:.1f} times, not {args.min_saving:g} times")
    if failures:
        console.print(f"[bold red]not good enough:[/] {'; '.join(failures)}")
        return 1
    console.print(f"[bold green]{saving:.1f} times less gradient traffic[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
