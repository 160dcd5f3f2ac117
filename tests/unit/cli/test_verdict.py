"""The verdict of `plan`: against hand calculations, and what it refuses."""

import dataclasses
import json

import pytest

from horovod_sparse.cli.main import main
from horovod_sparse.cost import AlphaBeta, Fit, assumed_profile
from horovod_sparse.feedback import parse_recipe

ARGUMENTS = ["plan", "--verdict", "--params", "100e6", "--step-ms", "100", "--nodes", "4"]


def numbers(capsys, *arguments):
    assert main([*ARGUMENTS, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_dense_is_what_a_ring_of_half_types_takes(capsys):
    found = numbers(capsys, "--bandwidth", "1gbit", "--latency", "1ns")
    # 2 (P - 1) / P of 200 MB at 125 MB/s is 2.4 s; what is there before backward ends is sent meanwhile
    assert found["computing_seconds"] == pytest.approx(0.1)
    assert 2.4 <= found["dense_seconds"] <= 2.5
    full = numbers(capsys, "--bandwidth", "1gbit", "--latency", "1ns", "--gradient-dtype", "float32")
    assert 4.8 <= full["dense_seconds"] <= 4.9
    assert full["sparse_seconds"] == found["sparse_seconds"]
    assert found["worth_it"] == "yes" and found["speedup"] == found["dense_seconds"] / found["sparse_seconds"]


def test_the_crossing_is_where_both_take_equally_long(capsys):
    limit = numbers(capsys)["dense_wins_from_bits_per_second"]
    below, above = (numbers(capsys, "--bandwidth", f"{limit * by:.0f}bit") for by in (0.95, 1.05))
    assert below["speedup"] > 1.0 >= above["speedup"]


def test_it_answers_in_five_lines_with_something_to_paste(capsys):
    assert main([*ARGUMENTS, "--bandwidth", "1gbit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "worth it",
        "iteration",
        "paste",
        "dense wins",
        "how sure",
    ]
    text = lines[2].partition("hvd.Compression.")[2].partition("), ")[0]
    name, _, arguments = text.partition("(")
    assert parse_recipe(f"{name}:{arguments}")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--nodes", "1"], "--nodes"),
        (["--nodes", "0"], "--nodes"),
        (["--per-node", "0"], "--per-node"),
        (["--params", "0"], "--params"),
        (["--params", "nan"], "--params"),
        (["--step-ms", "-1"], "--step-ms"),
        (["--step-ms", "inf"], "--step-ms"),
        (["--model", "resnet50"], "--params"),
        (["--ranks", "4"], "--nodes"),
    ],
)
def test_what_is_wrong_is_named(arguments, word, capsys):
    assert main([*ARGUMENTS, *arguments]) == 2
    assert word in capsys.readouterr().err


def test_a_profile_tells_of_the_update_and_of_fused_sums(capsys, tmp_path):
    made = assumed_profile(AlphaBeta(50e-6, 8e-9), 4)
    plain, known = tmp_path / "plain.json", tmp_path / "known.json"
    made.save(plain)
    training = {"update": Fit(0.0, 1e-9), "allreduce": Fit(1e-3, 3e-8), "start": Fit(1e-4, 0.0)}
    dataclasses.replace(made, training=training).save(known)
    before, after = (numbers(capsys, "--profile", str(path)) for path in (plain, known))
    assert after["sparse_seconds"] - before["sparse_seconds"] == pytest.approx(0.1)
    # 200 MB in half types
    assert after["dense_seconds"] == pytest.approx(0.1 + 0.1 / 3 + 6.0, rel=0.02)
    given = numbers(capsys, "--profile", str(known), "--update", "10ms")
    assert after["sparse_seconds"] - given["sparse_seconds"] == pytest.approx(0.09)


def test_models_of_any_size_are_cut_into_buckets_that_may_be(capsys):
    found = numbers(capsys, "--params", "175e9")
    assert 0 < found["sparse_seconds"] < found["dense_seconds"]
    with pytest.raises(SystemExit):
        main([*ARGUMENTS, "--bandwidth", "1e400"])
    assert "above 0" in capsys.readouterr().err


def test_the_names_of_former_releases_say_what_they_are_now(capsys):
    given = ["--params", "100e6", "--step-ms", "100", "--nodes", "4"]
    assert main(["worth-it", *given]) == 0
    before = capsys.readouterr()
    assert main(["plan", "--verdict", *given]) == 0
    assert capsys.readouterr().out == before.out
    assert before.err.splitlines() == [
        "horovod-sparse worth-it will go: it is horovod-sparse plan --verdict now"
    ]
