"""Tables and pictures of docs/appendix/performance.md, of measurements made up."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import density
from benchmarks.common.samples import summarize
from benchmarks.common.wire import Round, wire_bytes
from benchmarks.predictions import main as predictions
from benchmarks.report.budgets import budget_table
from horovod_sparse.cost import AlphaBeta, Fit, assumed_profile

_DOCS = Path(__file__).resolve().parents[3] / "docs"


def _item(method, seconds, sent=1000.0):
    return {
        "method": method,
        "seconds": {"median": seconds, "low": seconds, "high": seconds},
        "parts": {"select": 0.01, "exchange": 0.02, "other": 0.0},
        "cpu_seconds": {"median": 0.02},
        "own_cpu_seconds": {"median": 0.01},
        "bytes_sent": sent,
        "bytes": {"wire_bytes": 900.0, "negotiation_bytes": 100.0},
        "facts": {"density_union": 0.001},
    }


@pytest.fixture
def sync():
    own = {"idle_bytes_per_second": 1e5, "idle_cpu_share": 0.1}
    items = [_item("dense", 4.0), _item("naive", 2.0), _item("exdyna", 0.1), _item("topk", 0.1)]
    launch = {
        "ranks": 8,
        "rate": "1gbit",
        "network": "gloo",
        "cycle_time_ms": None,
        "load_before": 1.0,
        "horovod_own": own,
        "results": items,
    }
    machine = {"cores": 2, "memory_gib": 24}
    return {
        "command": "scripts/bench sync",
        "elements": 25_600_000,
        "density": 0.001,
        "machine": machine,
        "launches": [launch],
    }


def _row(table, beginning):
    [row] = [line for line in table.splitlines() if line.startswith(f"| {beginning}")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_no_measurement_names_a_machine_or_a_path():
    for path in (_DOCS / "measurements").glob("*.json"):
        assert "/" not in json.dumps(json.loads(path.read_text()).get("machine", ""))


def test_budgets_are_met_or_missed_as_numbers_say(sync):
    table = budget_table({"sync": sync})
    assert _row(table, "gloo: exdyna against dense gloo")[1:] == ["≥ 35", "40.0", "met"]
    assert _row(table, "gloo: exdyna against naive gloo")[1:] == ["≥ 20", "20.0", "met"]
    assert _row(table, "gloo: topk against naive")[1:] == ["≥ 5", "20.0", "met"]
    assert _row(table, "gloo: topk, bytes")[1:] == ["± 10 %", "+0.0%", "met"]
    sync["launches"][0]["results"][2] = _item("exdyna", 0.2, sent=1200.0)
    table = budget_table({"sync": sync})
    assert _row(table, "gloo: exdyna against dense")[1:] == ["≥ 35", "20.0", "**missed**"]
    assert _row(table, "gloo: exdyna, bytes")[1:] == ["± 10 %", "+20.0%", "**missed**"]


def _sample(started, ended, **changes):
    numbers = {"cpu": 0.5, "own": 0.25, "sent": 100, "received": 100, "interval": 1.0}
    return {**numbers, "started": started, "ended": ended, "parts": {"fold": 0.1}, "facts": {}, **changes}


def test_a_repetition_lasts_from_the_first_start_to_the_last_end():
    ranks = [[_sample(10.0, 11.0)], [_sample(10.5, 12.0)]]
    found = summarize(ranks)
    assert found["seconds"]["median"] == 2.0
    assert found["slowest_seconds"]["median"] == 1.5


def test_medians_are_over_repetitions_of_means_over_ranks():
    first = [_sample(0.0, 1.0, sent=100), _sample(0.0, 1.0, sent=1000), _sample(0.0, 1.0, sent=10)]
    second = [_sample(0.0, 3.0, sent=300), _sample(0.0, 1.0, sent=3000), _sample(0.0, 2.0, sent=30)]
    found = summarize([first, second])
    assert found["bytes_sent"] == 200
    assert found["seconds"] == {"median": 2.0, "low": 1.5, "high": 2.5}
    assert found["repetitions"] == 3
    # ranks had 2.0, 1.0 and 1.5 seconds on average, and 0.1 of them folded
    assert found["parts"]["other"] == pytest.approx(1.4)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_bytes_sent_by_all_are_bytes_received_by_all(size):
    messages = [100 * (rank + 1) for rank in range(size)]
    received = [AlphaBeta.allgather(messages, rank).bytes_received for rank in range(size)]
    mean = [Round("AllGather", round(sum(messages) / size))]
    assert wire_bytes(mean, size) == pytest.approx(sum(received) / size, abs=size)
    assert wire_bytes([Round("AllReduce", 800)], size) == AlphaBeta.allreduce(800, size).bytes_received
    assert wire_bytes([Round("AllToAll", 700), Round("Exchange", 50)], size) == 750


ALONE = {"slowest_parts": {"forward": 0.07, "backward": 0.13, "exchange": 0.0, "step": 0.1}}


def profile(**training):
    made = assumed_profile(AlphaBeta(50e-6, 8e-9), 4)
    return dataclasses.replace(made, training=training)


def test_the_update_and_the_fused_sums_lengthen_predictions():
    recipes = {"topk": "topk:density=0.001"}
    plain = predictions.predicted(predictions.workload_of("resnet50", profile(), ALONE), profile(), recipes)
    known = profile(update=Fit(0.0, 4e-9), allreduce=Fit(1e-3, 3e-8), start=Fit(1e-4, 0.0))
    more = predictions.predicted(predictions.workload_of("resnet50", known, ALONE), known, recipes)
    assert more["topk"] - plain["topk"] == pytest.approx(4e-9 * 25_557_032)
    assert more["dense"] > 4 * 25_557_032 * 3e-8 > plain["dense"]


def test_the_best_density_is_the_largest_that_costs_nothing():
    seconds = {"0.001": 1.0, "0.01": 1.049, "0.1": 1.06, "auto": 1.11}
    found = density.judged([0.001, 0.01, 0.1], seconds)
    assert (found["best"], found["met"]) == (0.01, False)
    assert density.judged([0.001, 0.01, 0.1], {**seconds, "auto": 1.1})["met"]
