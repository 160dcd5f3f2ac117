"""What scripts/bench measures: it runs, and writes what it measured."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.allreduce import recorded, replayed
from benchmarks.common.samples import summarize
from benchmarks.local.main import main
from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.collectives import AllToAll, Exchange, Request
from horovod_sparse.feedback import Bucket, parse_recipe
from horovod_sparse.simulation import Recorder, run_lockstep
from horovod_sparse.sparsifiers import ALGORITHMS, BucketInfo


def test_the_local_bench_times_every_sparsifier(tmp_path, capsys):
    file = tmp_path / "result.json"
    assert main(["--elements", "20003", "--density", "0.01", "--repeat", "2", "--json", str(file)]) == 0
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
    assert main([*sizes, "--device", "cpu:0", "--only", "fold,exdyna,topk,qsgd", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    names = [timing["name"].split(",")[0].split(" ")[0] for timing in result["timings"]]
    assert {"copy_", "fold", "exdyna", "topk", "qsgd"} <= set(names) and result["device"] == "cpu:0"
    assert all(timing["median_ms"] > 0 for timing in result["timings"])


@pytest.mark.parametrize(
    "text", ["topk:", "gtopk:", "oktopk:", "topk_dsa:", "spardl:", "spardl:teams=2,", "spardl:teams=3,"]
)
def test_the_same_messages_once_more(text: str) -> None:
    size, n = 6, 600
    recipe = parse_recipe(f"{text}density=0.05")
    buckets = [Bucket(BucketInfo("b", n, rank, size), recipe, HostAccumulator(n)) for rank in range(size)]
    requests: list[list[Request]] = [[] for _ in buckets]
    gradients = np.random.default_rng(0).standard_normal((size, n)).astype(np.float32)
    first, second = Recorder(), Recorder()
    run_lockstep(
        [recorded(b.step(g), seen) for b, g, seen in zip(buckets, gradients, requests, strict=True)], first
    )
    run_lockstep([replayed(seen) for seen in requests], second)
    assert second.kinds == first.kinds and second.bytes_sent == first.bytes_sent
    assert sum(map(sum, second.bytes_sent)) > 0


_DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_no_measurement_names_a_machine_or_a_path():
    for path in (_DOCS / "measurements").glob("*.json"):
        assert "/" not in json.dumps(json.loads(path.read_text()).get("machine", ""))


def _sample(started, ended, **changes):
    numbers = {"cpu": 0.5, "own": 0.25, "sent": 100, "interval": 1.0}
    return {**numbers, "started": started, "ended": ended, "parts": {"fold": 0.1}, "facts": {}, **changes}


def test_medians_are_over_repetitions_of_means_over_ranks():
    ranks = [[_sample(10.0, 11.0)], [_sample(10.5, 12.0)]]
    found = summarize(ranks)
    assert found["seconds"]["median"] == 2.0
    first = [_sample(0.0, 1.0, sent=100), _sample(0.0, 1.0, sent=1000), _sample(0.0, 1.0, sent=10)]
    second = [_sample(0.0, 3.0, sent=300), _sample(0.0, 1.0, sent=3000), _sample(0.0, 2.0, sent=30)]
    found = summarize([first, second])
    assert found["bytes_sent"] == 200
    assert found["seconds"] == {"median": 2.0, "low": 1.5, "high": 2.5}
    assert found["repetitions"] == 3
    # ranks had 2.0, 1.0 and 1.5 seconds on average, and 0.1 of them folded
    assert found["parts"]["other"] == pytest.approx(1.4)
