"""What scripts/bench measures: it runs, without PyTorch too, and writes what it measured."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import density
from benchmarks.allreduce.rank import recorded, replayed
from benchmarks.common.samples import summarize
from benchmarks.common.timing import Timing, Work, measure
from benchmarks.common.wire import Round, wire_bytes
from benchmarks.local import device, works
from benchmarks.local.main import main
from benchmarks.predictions import main as predictions
from benchmarks.rounds.account import PARTS, Stamps, account
from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.collectives import AllToAll, Exchange, Request
from horovod_sparse.cost import AlphaBeta, Fit, assumed_profile
from horovod_sparse.feedback import Bucket, parse_recipe
from horovod_sparse.simulation import Recorder, run_lockstep
from horovod_sparse.sparsifiers import ALGORITHMS, BucketInfo


@pytest.mark.parametrize("with_torch", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_it_runs(tmp_path, monkeypatch, capsys, with_torch):
    if not with_torch:
        monkeypatch.setattr(works, "_torch", lambda: None)
    file = tmp_path / "result.json"
    assert main(["--elements", "20003", "--density", "0.01", "--repeat", "2", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    names = [timing["name"] for timing in result["timings"]]
    assert names[0] in ("copy_", "np.copyto")
    assert {"fold", "k largest", "step: exact top-k, P=8", "step: exdyna or micro, P=8"} <= set(names)
    steps = {name.split(",")[0].split(" ")[0] for name in names if name.endswith("P=8")}
    pairwise = {name for name, made in ALGORITHMS.items() if {Exchange, AllToAll} & {*made().rounds(8)}}
    assert set(ALGORITHMS) - steps == pairwise, "what other ranks send depends on what they get"
    assert all(timing["ratio"] > 0 for timing in result["timings"])
    assert "memory beyond" in capsys.readouterr().out


def test_only_what_is_asked_for(capsys):
    assert main(["--elements", "999", "--repeat", "1", "--json", "--only", "qsgd,densely"]) == 0
    names = [timing["name"] for timing in json.loads(capsys.readouterr().out)["timings"][1:]]
    assert names == ["qsgd, P=8", *(f"decode {count} messages densely" for count in (2, 4, 8, 16))]


@pytest.mark.parametrize("wrong", [["--density", "0"], ["--elements", "0"], ["--repeat", "x"]])
def test_wrong_arguments(wrong, capsys):
    with pytest.raises(SystemExit):
        main(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_a_budget_is_checked():
    slow, fast = Work("slow", lambda: np.ones(300_000).sum(), budget=1e-6), Work("fast", lambda: None)
    timings = measure(fast, [slow], 3)
    assert [timing.fits for timing in timings] == [True, False]
    assert Timing("x", 1.0, (1.0, 1.0), 5.0, None).fits


def collective(process, name, taken, begun, done, *, fast):
    """A collective as Horovod writes it, in microseconds."""
    told = [] if fast else [{"ph": "X", "name": "1", "ts": begun - 20, "pid": process, "dur": 0}]
    return [
        {"ph": "B", "name": "NEGOTIATE_ALLGATHER", "ts": taken, "pid": process},
        *told,
        {"ph": "E", "ts": begun - 10, "pid": process},
        {"ph": "B", "name": "ALLGATHER", "ts": begun, "pid": process},
        {"ph": "B", "name": "GLOO_ALLGATHER", "ts": begun + 1, "pid": process},
        {"ph": "E", "ts": done - 1, "pid": process},
        {"ph": "E", "ts": done, "pid": process},
    ]


def test_every_millisecond_of_a_round_is_accounted_for(tmp_path):
    """Two steps of one variant; the timeline began at 100 s of the ranks' clock."""
    name = {"ph": "M", "pid": 7, "name": "process_name", "args": {"name": "allgather.v.0.0"}}
    warm = collective(7, "v", 100, 200, 300, fast=False)
    first = collective(7, "v", 1500, 4000, 4500, fast=False)
    second = collective(7, "v", 11_000, 11_100, 11_500, fast=True)
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps([name, *warm, *first, *second]))
    stamps = [
        Stamps({"v.0": 100.0010}, {"v.0": 100.0050}),
        Stamps({"v.0": 100.0110}, {"v.0": 100.0115}),  # no gap: found and noticed at once
    ]
    starts = [{"v": [dict(step.started) for step in stamps]}, {"v": [{"v.0": 100.0030}, {"v.0": 100.0109}]}]
    parts = account(str(path), {"v": stamps}, starts)["v"]
    assert parts["uncertain"] == pytest.approx(0.0, abs=1e-9)
    # medians over the two steps
    means = {"cycle": (0.5, 0.0), "others": (1.5, 0.0), "negotiation": (1.0, 0.1), "transfer": (0.5, 0.4)}
    for part, (one, other) in {**means, "wake-up": (0.5, 0.0), "round": (4.0, 0.5)}.items():
        assert parts[part] == pytest.approx((one + other) / 2 * 1e-3, abs=1e-9), part
    assert sum(parts[part] for part in PARTS) == pytest.approx(parts["round"])
    assert parts["fast"] == 0.5


def test_it_runs_with_tensors_too(tmp_path):
    pytest.importorskip("torch")
    file = tmp_path / "result.json"
    sizes = ["--elements", "20000", "--density", "0.01", "--repeat", "1"]
    assert device.main([*sizes, "--device", "cpu", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    names = [timing["name"] for timing in result["timings"]]
    assert result["selection_right"] is True and names[0] == result["baseline"] == "copy"
    assert sum(name.startswith("step: ") for name in names) == 3
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


def test_methods_sum_up_the_gradient_of_the_step_alone() -> None:
    """Without a residual every repetition is like the first."""
    recipe = parse_recipe("spardl:density=0.1,feedback=none")
    bucket = Bucket(BucketInfo("b", 100), recipe, HostAccumulator(100))
    gradient = np.arange(100, dtype=np.float32)
    sums = [run_lockstep([bucket.step(gradient.copy())])[0] for _ in range(2)]
    assert sums[0].values.tolist() == sums[1].values.tolist() == list(range(90, 100))


_DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_no_measurement_names_a_machine_or_a_path():
    for path in (_DOCS / "measurements").glob("*.json"):
        assert "/" not in json.dumps(json.loads(path.read_text()).get("machine", ""))


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
