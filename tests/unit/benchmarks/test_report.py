"""docs/performance.md and the measurements that it is made from."""

import copy
import json
from pathlib import Path

import pytest

from benchmarks.report.budgets import budget_table
from benchmarks.report.main import fill, main, read, tables
from benchmarks.report.pictures import draw

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


def test_the_page_is_in_step_with_the_measurements():
    assert main(["--check"]) == 0, "run scripts/report and commit docs/performance.md"


def test_every_measurement_is_shown():
    text = "".join((_DOCS / name).read_text() for name in ("performance.md", "merging.md"))
    shown = {line.split()[2] for line in text.splitlines() if line.startswith("<!-- table: ")}
    assert set(read(_DOCS / "measurements")) <= shown


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


def test_the_best_dense_of_all_networks_is_what_counts(sync):
    other = copy.deepcopy(sync["launches"][0])
    other["network"], other["results"][0] = "mpi", _item("dense", 8.0)
    sync["launches"].append(other)
    table = budget_table({"sync": sync})
    assert _row(table, "mpi: exdyna against dense mpi")[2] == "80.0"
    assert _row(table, "mpi: exdyna against the best dense (gloo)")[2] == "40.0"


def test_other_sizes_than_the_budgets_speak_of_do_not_count(sync):
    sync["launches"][0]["ranks"] = 4
    assert "exdyna" not in budget_table({"sync": sync})


def test_growing_costs_miss_the_budget(sync):
    launches = []
    for ranks, own in ((2, 0.010), (4, 0.010), (8, 0.013)):
        launch = copy.deepcopy(sync["launches"][0])
        launch["ranks"] = ranks
        launch["results"][2]["own_cpu_seconds"]["median"] = own
        launches.append(launch)
    grown = {**sync, "launches": launches}
    assert _row(budget_table({"growth": grown}), "exdyna: CPU")[3] == "**missed**"
    launches[2]["results"][2]["own_cpu_seconds"]["median"] = 0.009
    assert _row(budget_table({"growth": grown}), "exdyna: CPU")[3] == "met"


def test_a_table_shows_its_launch(sync):
    made = tables({"sync_gloo": sync})
    assert _row(made["sync_gloo"], "exdyna")[-2:] == ["40.0", "20.0"]
    assert "2 cores, 24 GiB" in made["sync_gloo"]
    page = (
        "<!-- table: sync_gloo -->\n<!-- end of table -->\n<!-- table: none -->\nx\n<!-- end of table -->\n"
    )
    filled = fill(page, made)
    assert "| exdyna |" in filled
    assert "Not measured yet." in filled
    assert fill(filled, made) == filled


def test_what_the_tape_adds_is_a_budget():
    spread = {"median": 5.0, "low": 4.0, "high": 6.0}
    added = {"median": 2.25, "low": 1.0, "high": 3.0}
    tape = {
        "variables": 20,
        "elements": 1000,
        "sparsifier": "exdyna",
        "ranks": 2,
        "rounds": 3,
        "machine": "a machine",
        "budget_ms": 2.0,
        "ms": {"plain": spread, "tape": spread, "requests": spread, "added": added},
    }
    made = tables({"tape": tape})
    assert _row(made["tape"], "what is left")[1:] == ["2.25", "1.00 to 3.00"]
    assert _row(made["budgets"], "added by TensorFlow's tape")[1:] == ["≤ 2", "2.25", "**missed**"]
    added["median"] = 1.5
    assert _row(budget_table({"tape": tape}), "added by TensorFlow's tape")[-1] == "met"


def test_tensorflow_beside_pytorch_is_a_budget():
    times = [{"name": "topk, PyTorch", "ratio": 1.0, "budget": None}]
    times += [{"name": "topk, TensorFlow", "ratio": 1.6, "budget": 1.5}]
    [row] = budget_table({"frameworks": {"timings": times}}).splitlines()[2:]
    assert [cell.strip() for cell in row.strip("|").split("|")][1:] == ["≤ 1.5", "1.60", "**missed**"]


def _train(rate, dense, sparse):
    items = [_item("dense", dense), _item("exdyna", sparse)]
    names = {"exdyna": "exdyna:density=0.001"}
    return {"rate": rate, "ranks": 4, "load_before": 1.0, "results": items, "sparsifiers": names}


def test_speed_up_over_bandwidth_is_measured_and_predicted(tmp_path):
    launches = [_train("100mbit", 8.0, 0.5), _train("100gbit", 0.3, 0.3)]
    machine = {"cores": 2, "memory_gib": 24}
    result = {"command": "c", "model": "resnet50", "machine": machine, "launches": launches}
    made = tables({"bandwidth": result})
    slow, fast = (_row(made["bandwidth"], rate) for rate in ("100mbit", "100gbit"))
    assert (slow[3], fast[3]) == ("16.0", "1.0")
    assert float(slow[6]) > 20 > 1.1 > float(fast[6]), "the model says so, too"
    assert not draw({"bandwidth": result}, made, tmp_path, check=True)
    draw({"bandwidth": result}, made, tmp_path, check=False)
    assert (tmp_path / "bandwidth.png").stat().st_size > 10_000
    assert draw({"bandwidth": result}, made, tmp_path, check=True)
    launches[0]["results"][1] = _item("exdyna", 0.25)
    changed = tables({"bandwidth": result})
    assert not draw({"bandwidth": result}, changed, tmp_path, check=True), "a picture of older numbers"


def test_a_picture_of_synchronizations_has_every_method(sync, tmp_path):
    made = tables({"sync_gloo": sync})
    draw({"sync_gloo": sync}, made, tmp_path, check=False)
    assert (tmp_path / "sync_gloo.png").stat().st_size > 10_000
