"""Score over seconds of dense and sparse training at 1 and 10 Gbit/s, and of PyTorch's PowerSGD.

How a score grows with steps does not depend on the network: every method trains a CNN on digits once per
seed, on two real ranks of this machine. How long an iteration takes does: all methods take turns in one
launch on two hosts of scripts/cluster, per rate. Seconds at a step are its number times the median iteration.
"""

from __future__ import annotations

import json
import statistics

from benchmarks.common.hosts import cluster_command, cluster_for, machine_facts
from benchmarks.studies.study import Result, Study, horovodrun, launched, markdown

SIZE, SEEDS, RATES, REPEAT = 2, (0, 1, 2), ("1gbit", "10gbit"), 15
RANK = "benchmarks.studies.time_to_accuracy_rank"
DENSE, DDP, DENSITY = "dense", "dense, DDP", 0.01
#: method -> what `Compression.parse` reads, or a way of DistributedDataParallel
METHODS = {DENSE: "none", DDP: "ddp", "fp16": "fp16"}
METHODS |= {name: f"{name}:density={DENSITY}" for name in ("topk", "exdyna", "spardl", "dragonn", "dgc")}
METHODS |= {"PowerSGD": "powersgd 4"}
#: by which the accuracies to reach are worse than dense training's last
MARGINS = (0.05, 0.01)
Curve = list[tuple[float, float]]


def measure(run: str) -> Result:
    """Launches a training."""
    command = [*horovodrun(SIZE), "-m", RANK, "--training", run]
    return launched(command, HOROVOD_SPARSE_TENSOR_SELECTION="all")  # whether it can win or not


def time_iterations(result: Result) -> None:
    """Times all methods in one launch per rate; what TCP gets through between the hosts comes first."""
    for rate in RATES:
        if rate in result.setdefault("timings", {}):
            continue
        with cluster_for(SIZE, rate) as hosts:
            told = json.loads(cluster_command("measure", "--name", hosts.name, "--json"))
            reached = {item["pattern"]: round(item["slowest_bits_per_second"]) for item in told}
            result.setdefault("reached", {})[rate] = reached
            before = machine_facts()
            found = hosts.run(RANK, {"methods": METHODS, "repeat": REPEAT}, num_ranks=SIZE)
        result["timings"][rate] = {"machine": before, "repeat": REPEAT, **found}


def _runs(result: Result, method: str) -> list[Result]:
    """Runs of all seeds; steps of DistributedDataParallel's allreduce are those of dense training."""
    prefix = f"{DENSE if method == DDP else method}/seed "
    return [run for name, run in result["runs"].items() if name.startswith(prefix)]


def mean_curve(result: Result, method: str) -> Curve:
    """Accuracy by step, the mean over seeds, which were tested at the same steps."""
    curves = [run["curve"] for run in _runs(result, method)]
    return [
        (points[0][0], statistics.fmean(score for _, score in points)) for points in zip(*curves, strict=True)
    ]


def reached(curve: Curve, target: float) -> float | None:
    """Where a curve is first as good as the target, on straight lines between its points; None: nowhere.

    Example:
        >>> reached([(0, 0.0), (10, 0.5), (20, 1.0)], 0.75)
        15.0
        >>> reached([(0, 0.0), (10, 0.5)], 0.6) is None
        True
    """
    before = curve[0]
    for place, score in curve[1:]:
        if score >= target:
            share = (target - before[1]) / (score - before[1])
            return float(before[0] + share * (place - before[0]))
        before = (place, score)
    return None


def targets_of(result: Result) -> list[float]:
    """The accuracies that methods are timed to."""
    return [mean_curve(result, DENSE)[-1][1] - margin for margin in MARGINS]


def over_seconds(result: Result, rate: str, method: str) -> Curve:
    """The mean curve by seconds: a step's number times the median iteration."""
    median = result["timings"][rate]["methods"][method]["median"]
    return [(step * median, score) for step, score in mean_curve(result, method)]


def gigabits(rate: str) -> str:
    """A rate as it is read.

    Example:
        >>> gigabits("10gbit")
        '10 Gbit/s'
    """
    return f"{rate.removesuffix('gbit')} Gbit/s"


def table(result: Result) -> str:
    """Seconds to either target, how many times sooner than dense that is, and what they are made of."""
    rows, targets = [], targets_of(result)
    for method in METHODS:
        cells = []
        for rate in RATES:
            for target in targets:
                own, dense = (reached(over_seconds(result, rate, name), target) for name in (method, DENSE))
                assert dense is not None
                cells.append("not reached" if own is None else f"{own:.1f} ({dense / own:.2g}x)")
        sent = statistics.fmean(run["bytes_per_step"] for run in _runs(result, method))
        timed = [1000 * result["timings"][rate]["methods"][method]["median"] for rate in RATES]
        score = f"{mean_curve(result, method)[-1][1]:.1%} ({len(_runs(result, method))})"
        rows.append([method, *cells, score, f"{sent / 1000:,.1f}", *(f"{value:.0f}" for value in timed)])
    head = [f"s to {target:.1%}, {gigabits(rate)}" for rate in RATES for target in targets]
    head += ["accuracy (seeds)", "kB per step", *(f"ms, {gigabits(rate)}" for rate in RATES)]
    return markdown(["", *head], rows)


STUDY = Study(
    "time_to_accuracy",
    lambda: [f"{name}/seed {seed}" for seed in SEEDS for name in METHODS if name != DDP],
    measure,
    table,
    facts={"size": SIZE, "density": DENSITY},
    complete=time_iterations,
)
