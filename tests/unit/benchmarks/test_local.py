"""What scripts/bench measures: it runs, and writes what it measured."""

import json
from pathlib import Path

from benchmarks.__main__ import main
from horovod_sparse.collectives import AllToAll, Exchange
from horovod_sparse.sparsifiers import ALGORITHMS


def test_the_local_bench_times_every_sparsifier(tmp_path, capsys):
    file = tmp_path / "result.json"
    sizes = ["--elements", "20003", "--density", "0.01", "--repeat", "2"]
    assert main("local", *sizes, "--json", str(file)) == 0
    result = json.loads(file.read_text())
    names = [timing["name"] for timing in result["timings"]]
    exchange = "decode 8 messages of local steps, move by their mean"
    assert {"copy_", "fold", "k largest", "write 8 k", exchange} <= set(names)
    steps = {name.split(",")[0].split(" ")[0] for name in names if name.endswith("P=8")}
    pairwise = {name for name, made in ALGORITHMS.items() if {Exchange, AllToAll} & {*made().rounds(8)}}
    assert set(ALGORITHMS) - steps == pairwise, "what other ranks send depends on what they get"
    assert all(timing["ratio"] > 0 for timing in result["timings"])
    assert "Memory beyond" in capsys.readouterr().out


def test_the_local_bench_runs_on_tensors(tmp_path):
    file = tmp_path / "result.json"
    sizes = ["--elements", "20000", "--density", "0.01", "--repeat", "1"]
    more = ["--device", "cpu:0", "--only", "fold,exdyna,topk,qsgd"]
    assert main("local", *sizes, *more, "--json", str(file)) == 0
    result = json.loads(file.read_text())
    names = [timing["name"].split(",")[0].split(" ")[0] for timing in result["timings"]]
    assert {"copy_", "fold", "exdyna", "topk", "qsgd"} <= set(names) and result["device"] == "cpu:0"
    assert all(timing["median_ms"] > 0 for timing in result["timings"])


_DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_no_measurement_names_a_machine_or_a_path():
    for path in (_DOCS / "measurements").glob("*.json"):
        assert "/" not in json.dumps(json.loads(path.read_text()).get("machine", ""))
