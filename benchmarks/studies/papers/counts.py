"""Counted, and predicted from that: SparDL on 5 to 14 ranks and in teams (Figs. 12 to 15), and MG-WFBP."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.common.layers import layer_table
from benchmarks.plans import omgs_cost
from benchmarks.studies.papers import tables
from benchmarks.studies.study import Result, Study
from horovod_sparse.feedback import recipe
from horovod_sparse.merging import AffineTime, CostModel, Strategy, layerwise, omgs, predict, single
from horovod_sparse.simulation import AlphaBeta, Recorder, SimulatedCluster
from horovod_sparse.sparsifiers.spardl.teams import is_power_of_two, spardl_cost

#: what is counted on a bucket of `num_elements` is scaled to `scaled_to`: messages are k elements long
SETTING: dict[str, Any] = {
    "num_elements": 320_000,
    "scaled_to": 25_600_000,
    "density": 0.01,
    "steps": 5,
    "alpha_seconds": 50e-6,
    "beta_seconds": 8e-9,
    "sizes": list(range(5, 15)),
    "team_sizes": [14, 12],
}
#: in the order of the paper's Fig. 12
ALGORITHMS = ("topk", "topk_dsa", "gtopk", "oktopk", "spardl")
MODELS = ("vgg16_cifar", "resnet50", "inception_v4", "lstm_ptb")
#: of MG-WFBP and of what it is compared with: nothing is selected, all-reduces are dense
DENSE_PLANS: dict[str, Strategy] = {"wfbp": layerwise, "mgwfbp": omgs, "dense, one bucket": single}


def counted(made: dict[str, Any], size: int, setting: dict[str, Any]) -> dict[str, Any]:
    """What a synchronization puts on the network, and its time by latency and bandwidth.

    Args:
        made: arguments of `recipe` but for the density.
        size: P.
        setting: see `SETTING`.

    Returns:
        `rounds` one behind the other, of the slowest rank; `received`, 4-byte words by k of the rank that
        receives most; `seconds` of a bucket of `scaled_to` elements.
    """
    n, density = setting["num_elements"], setting["density"]
    longer = setting["scaled_to"] / n
    network = AlphaBeta(setting["alpha_seconds"], setting["beta_seconds"] * longer)
    cluster, random = SimulatedCluster(recipe(**made, density=density), n, size), np.random.default_rng(0)
    for _ in range(setting["steps"]):  # the last one counts: thresholds have settled a little
        cluster.recorder = Recorder(network)
        cluster.synchronize([random.laplace(size=n).astype(np.float32) for _ in range(size)])
    totals = [cluster.recorder.total(rank) for rank in range(size)]
    return {
        "rounds": max(total.rounds for total in totals),
        "received": round(max(total.bytes_received for total in totals) / 4 / (density * n), 4),
        "seconds": float(f"{cluster.recorder.seconds:.4g}"),
    }


def by_size(setting: dict[str, Any]) -> dict[str, Any]:
    """Every algorithm on every number of ranks; None for gTop-k where P is no power of two."""
    found: dict[str, Any] = {}
    for name in ALGORITHMS:
        arguments = {"threshold_steps": 1} if name == "oktopk" else {}  # no step has stale thresholds
        for size in setting["sizes"]:
            exists = name != "gtopk" or is_power_of_two(size)
            row = counted({"name": name, **arguments}, size, setting) if exists else None
            found.setdefault(name, []).append(row)
    return found


def by_teams(setting: dict[str, Any]) -> dict[str, Any]:
    """Every number of teams of 14 and of 12 ranks, by R-SAG where it exists, and by B-SAG.

    `least` and `most` are what the paper's formulas let a rank receive, in words by k: two for an element.
    """
    found: dict[str, Any] = {}
    for size in setting["team_sizes"]:
        for teams in (number for number in range(1, size + 1) if size % number == 0):
            ways = ["recursive"] * is_power_of_two(teams) + ["bruck"] * (teams > 1)
            for way in ways:
                made = {"name": "spardl", "teams": teams, "between": way, "gather": "bruck"}
                name = "1" if teams == 1 else f"{'R' if way == 'recursive' else 'B'}{teams}"
                rounds, least, most = spardl_cost(size, teams, way)
                row = {**counted(made, size, setting), "formula_rounds": rounds}
                row |= {"least": round(2 * least, 4), "most": round(2 * most, 4)}
                found.setdefault(str(size), {})[name] = row
    return found


def dense_merging(model: str, size: int = 16) -> dict[str, Any]:
    """MG-WFBP: OMGS's own rule where nothing is selected, and a bucket is an all-reduce of all its elements.

    Args:
        model: of OMGS-SGD's four.
        size: P.

    Returns:
        By the plan's name its buckets and the predicted seconds of an iteration.
    """
    table = layer_table(model)
    of_bytes = omgs_cost(size, table.density).dense
    per_element = 4 * (of_bytes.seconds(1.0) - of_bytes.fixed_seconds)
    cost = CostModel(AffineTime(), AffineTime(of_bytes.fixed_seconds, per_element))
    found = {}
    for name, strategy in DENSE_PLANS.items():
        plan = strategy(table.workload, cost)
        seconds = predict(table.workload, plan, cost).iteration_seconds
        found[name] = {"buckets": len(plan.buckets), "seconds": round(float(seconds), 4)}
    return found


def _count(result: Result) -> None:
    if "merging" not in result:
        result |= {"setting": SETTING, "sizes": by_size(SETTING), "teams": by_teams(SETTING)}
        result["merging"] = {model: dense_merging(model) for model in MODELS}


def _tables(result: Result) -> str:
    return "\n\n".join(make(result) for make in (tables.workers, tables.teams, tables.merging))


STUDY = Study("paper_counts", list, lambda run: {}, _tables, complete=_count)
