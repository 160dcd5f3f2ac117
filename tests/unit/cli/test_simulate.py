"""`horovod-sparse simulate`: against hand calculations of time, bytes and crossings."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("matplotlib")

from matplotlib import pyplot as plt

from horovod_sparse.cli.main import main
from horovod_sparse.cli.simulate.picture import _label_values, draw_studies
from horovod_sparse.cli.simulate.study import (
    Question,
    bandwidth_text,
    crossing_words,
    simulated_sizes,
    study_of,
)
from horovod_sparse.cost import AffineTime, AlphaBeta
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.merging import ParameterFacts, Workload, single
from horovod_sparse.simulation import break_even, bucket_traffic

N, BACKWARD = 1_000_000, 0.01
WORKLOAD = Workload((ParameterFacts("all", N),), (BACKWARD,))


def asked(network: AlphaBeta, sizes: tuple[int, ...] = (2, 8, 32, 128, 512), at: int = 8) -> Question:
    nothing = AffineTime()
    return Question(WORKLOAD, single, network, sizes, at, lambda recipe, size, per_host: nothing)


def test_top_k_crosses_where_its_bytes_exceed_those_of_dense():
    """One bucket: (P - 1) (16 + 8 d n) bytes against 2 (P - 1) / P * 4 n."""
    network = AlphaBeta(1e-12, 8e-9)
    study = study_of(asked(network), parse_recipe("topk:density=0.01"))
    size_of_header = 16
    expected = 8 * N / (size_of_header + 8 * 0.01 * N)
    assert study.ranks is not None
    assert study.density is not None
    # between two simulated P the curve is interpolated
    assert study.ranks.sparse_first
    assert study.ranks.values == pytest.approx((expected,), rel=0.1)
    expected = 1 / 8 - size_of_header / (8 * N)
    assert study.density.values == pytest.approx((expected,), rel=0.01)
    assert study.bandwidth.values == ()  # without latency and selection bytes alone decide
    point = study.points[1]
    assert point.bytes_per_rank == pytest.approx(size_of_header + 8 * 0.01 * N)
    received = 7 * (size_of_header + 8 * 0.01 * N)
    assert point.sparse_seconds == pytest.approx(BACKWARD + received * network.beta_seconds, rel=1e-6)


def test_bandwidth_crosses_where_selection_costs_what_bytes_save():
    latency, size = 1e-4, 8
    question = asked(AlphaBeta(latency, 8e-9), sizes=(8,))
    slow = AffineTime(0.002, 0.0)
    question = Question(
        WORKLOAD,
        single,
        question.network,
        (8,),
        size,
        lambda recipe, size, per_host: slow,
        num_elements=(1000, 4000),
    )
    study = study_of(question, parse_recipe("topk:density=0.01"))
    # selection - 3 latencies (of 6) = (dense bytes - sparse bytes) beta
    saved = 2 * 7 / 8 * 4 * N - 7 * (16 + 8 * 0.01 * N)
    beta = (0.002 - 3 * latency) / saved
    assert study.bandwidth.sparse_first
    assert study.bandwidth.values == pytest.approx((8 / beta,), rel=0.01)
    assert study.ranks is None  # one size has no curve


def test_counts_hold_on_any_network():
    one, other = AlphaBeta(1e-3, 1e-9), AlphaBeta(1e-6, 1e-6)
    for text in ("micro:density=0.1", "cltk:density=0.1", "gtopk:density=0.1"):
        traffic = bucket_traffic(parse_recipe(text), 500, 5, one)
        again = bucket_traffic(parse_recipe(text), 500, 5, other)
        assert traffic.seconds_on(one) == pytest.approx(traffic.seconds)
        assert traffic.seconds_on(other) == pytest.approx(again.seconds)


def test_break_even_finds_every_change():
    assert break_even(lambda x: (x - 3) * (x - 40) + 1, 1, 100, precision=1e-4) == pytest.approx(
        [3, 40], rel=1e-3
    )
    assert break_even(lambda x: 0.5, 1, 2) == []


def test_words_of_crossings():
    study = study_of(asked(AlphaBeta(1e-12, 8e-9), (2, 4)), parse_recipe("topk:density=0.01"))
    words = crossing_words(study.ranks, lambda size: f"P = {size:.0f}")
    assert words == "sparse wins from P = 2 to P = 4"
    assert bandwidth_text(999_999_999.9) == "1 Gbit/s"
    assert simulated_sizes(8, 1.0) == (512, 2048)


def test_what_cannot_be_simulated_is_left_out_and_said():
    question = asked(AlphaBeta(), (2, 1024), at=2)
    study = study_of(question, parse_recipe("oktopk:density=0.01"))
    assert [point.size for point in study.points] == [2]
    assert "1024" in study.notes[0]
    fixed = study_of(asked(AlphaBeta(), (2,), at=2), parse_recipe("hard_threshold:threshold=3.0"))
    assert fixed.density is None  # density does not steer it


def test_the_command_prints_writes_and_draws(tmp_path, capsys):
    model, target = tmp_path / "model.json", tmp_path / "numbers.json"
    model.write_text(json.dumps({"parameters": [["all", N, BACKWARD]]}))
    picture = tmp_path / "curves.png"
    arguments = ["--model", str(model), "--sparsifier", "topk", "--sparsifier", "micro", "--density", "0.01"]
    arguments += ["--ranks", "2,64", "--elements", "800,3200", "--json", str(target), "--plot", str(picture)]
    assert main(["simulate", *arguments]) == 0
    numbers = json.loads(target.read_text())
    text = capsys.readouterr().out
    assert [study["sparsifier"] for study in numbers["studies"]] == [
        "topk:density=0.01",
        "micro:density=0.01",
    ]
    for study in numbers["studies"]:
        for point in study["points"]:
            assert f"{point['sparse_seconds'] * 1e3:,.1f}" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_curves_have_a_line_for_each_sparsifier_and_dots_where_dense_wins():
    question = asked(AlphaBeta(1e-12, 8e-9), (2, 8))
    studies = [study_of(question, parse_recipe(f"{name}:density=0.01")) for name in ("topk", "cltk")]
    figure = draw_studies(question, studies)
    lines = [line.get_gid() for axis in figure.axes for line in axis.lines]
    assert lines.count("topk:density=0.01") == lines.count("cltk:density=0.01") == 4
    assert lines.count("dense") == 2
    found = sum(len(study.density.values) + len(study.bandwidth.values) for study in studies)
    assert lines.count("crossing") == found > 0


def test_every_logarithmic_axis_has_labels_within_its_range():
    def labels(low, high):
        figure, axis = plt.subplots()
        axis.set_yscale("log")
        axis.set_ylim(low, high)
        _label_values(axis)
        figure.canvas.draw()
        shown = [tick for tick in axis.get_yticks() if low <= tick <= high]
        texts = [text.get_text() for text in axis.get_yticklabels()]
        plt.close(figure)
        return len(shown) if all(texts) else 0

    for low, high in [(3.1, 4.4), (0.9, 1.3), (2.1, 4.9), (11, 40), (1, 100), (1e2, 1e9), (9.6, 10.5)]:
        assert 2 <= labels(low, high) <= 24, (low, high)


@pytest.mark.parametrize("arguments", [["simulate", "--plot"], ["plan", "--picture"]])
def test_a_picture_without_matplotlib_is_refused_in_words(arguments, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*arguments, "x.png", "--model", "resnet50"]) == 2
    assert "pip install 'horovod_sparse[plot]'" in " ".join(capsys.readouterr().err.split())


def test_hosts_of_several_ranks_have_two_levels_beside_one():
    """One bucket of top-k on 4 x 2: dense within hosts, then shards of 4 ranks, two at a time by one card."""
    network, inside, nothing = AlphaBeta(1e-12, 8e-9), AlphaBeta(1e-12, 1e-10), AffineTime()
    asked_ = Question(
        WORKLOAD, single, network, (8,), 8, lambda recipe, size, shared: nothing, None, 0, 2, inside
    )
    (point,) = study_of(asked_, parse_recipe("topk:density=0.01")).points
    selected = 0.01 * N / 2
    assert point.bytes_per_rank == pytest.approx(16 + 8 * selected, rel=0.01)
    between = 2 * 3 * (16 + 8 * selected) * network.beta_seconds
    within = (4 * N / 2 + 8 * 4 * selected) * inside.beta_seconds
    assert point.sparse_seconds == pytest.approx(BACKWARD + between + within, rel=0.01)
    flat = 7 * (16 + 8 * 0.01 * N) * network.beta_seconds
    assert point.flat_seconds == pytest.approx(BACKWARD + flat, rel=0.01)
    # the union is that of 4 ranks, not of 8
    assert point.union_density == pytest.approx(0.04, rel=0.1)


def test_the_command_takes_hosts(tmp_path, capsys):
    model = tmp_path / "model.json"
    model.write_text(json.dumps({"parameters": [["all", N, BACKWARD]]}))
    arguments = [
        "simulate",
        "--model",
        str(model),
        "--sparsifier",
        "topk",
        "--density",
        "0.01",
        "--json",
        "-",
    ]
    assert main([*arguments, "--ranks", "8,16", "--per-host", "4", "--at", "8"]) == 0
    told = capsys.readouterr()
    assert "4 x 4" in told.err and "flat ms" in told.err
    numbers = json.loads(told.out)
    assert numbers["per_host"] == 4 and numbers["studies"][0]["points"][1]["flat_seconds"] > 0
    assert main([*arguments, "--ranks", "8,10", "--per-host", "4"]) == 2
    assert "--per-host=4" in capsys.readouterr().err
