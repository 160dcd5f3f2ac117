"""`horovod-sparse worth-it`: against hand calculations, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from horovod_sparse.cli import worth_it
from horovod_sparse.cli.main import main
from horovod_sparse.cost import AlphaBeta, Fit, Profile, assumed_profile
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.merging import ParameterFacts, Workload, layer_table

ARGUMENTS = ["worth-it", "--params", "100e6", "--step-ms", "100", "--nodes", "4"]


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


def test_free_selection_and_free_networks_are_the_ends_of_the_crossing():
    never = worth_it.Verdict(parse_recipe("topk"), 2.0, 1.0, 0.5, math.nan)
    always = worth_it.Verdict(parse_recipe("topk"), 1.0, 2.0, 0.5, math.nan)
    assert worth_it.crossing(lambda bandwidth: never) == math.inf
    assert worth_it.crossing(lambda bandwidth: always) == 0.0
    border = worth_it.crossing(lambda bandwidth: never if bandwidth < 3e9 else always)
    assert border == pytest.approx(3e9, rel=0.03)


def test_the_denser_of_two_that_take_about_equally_long_is_advised():
    workload = Workload((ParameterFacts("all", 1_000_000),), (1.0,))
    recipes = [parse_recipe("topk:density=0.01"), parse_recipe("topk:density=0.001")]
    fast = worth_it.verdict_of(workload, assumed_profile(AlphaBeta(1e-6, 8e-11), 4), recipes)
    slow = worth_it.verdict_of(workload, assumed_profile(AlphaBeta(1e-6, 8e-6), 4), recipes)
    assert (fast.recipe, slow.recipe) == tuple(recipes)


def test_workers_of_a_host_are_ranks(capsys):
    assert numbers(capsys, "--per-node", "2")["ranks"] == 8


def test_a_table_is_scaled_to_the_step(capsys):
    words = ["worth-it", "--model", "resnet50", "--nodes", "2", "--json", "--step-ms", "50"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["computing_seconds"] == pytest.approx(0.05)


def test_a_device_and_a_time_scale_any_table(capsys):
    words = ["worth-it", "--model", "gpt2_small", "--nodes", "2"]
    assert main([*words, "--json", "--gpu", "h100"]) == 0
    h100 = json.loads(capsys.readouterr().out)["computing_seconds"]
    assert h100 == pytest.approx(layer_table("gpt2_small").steps["h100"].seconds)
    for command in ("plan", "simulate"):
        model = ["--model", "resnet50", "--sparsifier", "topk", "--density", "0.01", "--step-seconds", "50ms"]
        more = ["--ranks", "2", "--elements", "1000,2000"] if command == "simulate" else ["--ranks", "2"]
        assert main([command, *model, *more]) == 0, capsys.readouterr().err
        capsys.readouterr()
    assert main([*words, "--gpu", "a100"]) == 0
    assert "a100, 32 samples (MosaicML" in capsys.readouterr().out
    for wrong in (
        ["--gpu", "v100"],
        ["--gpu", "a100", "--step-ms", "5"],
        ["--step-ms", "5", "--step-seconds", "5"],
    ):
        assert main([*words, *wrong]) == 2
        assert wrong[0] in capsys.readouterr().err
    assert main([*ARGUMENTS, "--gpu", "a100"]) == 2
    assert "--model too" in capsys.readouterr().err


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


def test_a_profile_is_used_where_there_is_one(capsys, tmp_path):
    formulas = assumed_profile(AlphaBeta(1e-3, 8e-9), 4)
    Profile(4, "torch", "mpi", 0.001, formulas.collectives, formulas.selection).save(tmp_path / "p.json")
    assert main([*ARGUMENTS, "--profile", str(tmp_path / "p.json")]) == 0
    out = capsys.readouterr().out
    assert "measured" in out and "leave --profile out" in out


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
    ],
)
def test_what_is_wrong_is_named(arguments, word, capsys):
    assert main([*ARGUMENTS, *arguments]) == 2
    assert word in capsys.readouterr().err


def test_hosts_of_several_workers_are_advised_to_sum_within_them_first(capsys):
    for workers, advised in ((1, False), (2, True)):
        assert main([*ARGUMENTS, "--bandwidth", "1gbit", "--per-node", str(workers)]) == 0
        assert ('levels="auto"' in capsys.readouterr().out.splitlines()[2]) is advised


def test_params_need_a_time(capsys):
    assert main(["worth-it", "--params", "1e6", "--nodes", "2"]) == 2
    assert "--step-ms" in capsys.readouterr().err


def test_the_update_lengthens_every_iteration(capsys):
    before, after = numbers(capsys), numbers(capsys, "--update", "50ms")
    for name in ("computing_seconds", "sparse_seconds", "dense_seconds"):
        assert after[name] - before[name] == pytest.approx(0.05), name


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


def test_plan_takes_dense_as_horovods_own_optimizer_does_it(capsys, tmp_path):
    made = assumed_profile(AlphaBeta(50e-6, 8e-9), 4)
    training = {"update": Fit(0.0, 1e-9), "allreduce": Fit(1e-3, 3e-8), "start": Fit(1e-4, 0.0)}
    path = tmp_path / "profile.json"
    dataclasses.replace(made, training=training).save(path)
    words = ["plan", "--model", "resnet50", "--sparsifier", "topk", "--profile", str(path), "--json"]
    assert main(words) == 0
    compared = {one["name"]: one for one in json.loads(capsys.readouterr().out)["compared"]}
    # nearly all of 102 MB is sent after backward
    assert 3.06 < compared["dense"]["iteration_seconds"] < 3.06 + 0.18 + 0.05


def test_one_host_communicates_by_the_network_within_it(capsys):
    """It was planned at 1 Gbit/s, and `plan --per-host` said otherwise."""
    alone = ["worth-it", "--params", "100e6", "--step-ms", "100", "--nodes", "1", "--per-node", "4", "--json"]
    assert main(alone) == 0
    inside = json.loads(capsys.readouterr().out)
    fast = numbers(capsys, "--bandwidth", "32gbit", "--latency", "20us")
    assert inside["dense_seconds"] == pytest.approx(fast["dense_seconds"])
    assert main([*alone, "--bandwidth", "1gbit", "--latency", "20us"]) == 0
    assert json.loads(capsys.readouterr().out)["dense_seconds"] > 2 * fast["dense_seconds"]


def test_how_sure_it_is_depends_on_what_was_tried(capsys, tmp_path):
    path = tmp_path / "p.json"
    assumed_profile(AlphaBeta(1e-3, 8e-9), 4).save(path)
    said = {}
    for name, more in {
        "same": [],
        "float32": ["--gradient-dtype", "float32"],
        "more": ["--nodes", "8"],
    }.items():
        assert main([*ARGUMENTS, "--profile", str(path), *more]) == 0
        said[name] = capsys.readouterr().out.splitlines()[-1]
    assert "15 %" in said["float32"] and "float16" not in said["float32"]
    assert "15 %" in said["same"] and "float16" in said["same"]
    assert "15 %" not in said["more"] and "converted" in said["more"]


def test_a_profile_s_backward_times_are_those_of_a_file_without_any(capsys, tmp_path):
    """It asked for "a profile with backward times", which it had been given."""
    facts = {"parameters": [["a", 10_000_000], ["b", 90_000_000]]}
    (tmp_path / "net.json").write_text(json.dumps(facts))
    made = assumed_profile(AlphaBeta(1e-3, 8e-9), 4)
    times = {"backward_seconds": {"b": 0.05, "a": 0.02}, "forward_seconds": 0.03}
    dataclasses.replace(made, **times).save(tmp_path / "p.json")
    words = ["worth-it", "--model", str(tmp_path / "net.json"), "--nodes", "4", "--json"]
    assert main([*words, "--profile", str(tmp_path / "p.json")]) == 0
    assert json.loads(capsys.readouterr().out)["computing_seconds"] == pytest.approx(0.1)


def test_models_of_any_size_are_cut_into_buckets_that_may_be(capsys):
    found = numbers(capsys, "--params", "175e9")
    assert 0 < found["sparse_seconds"] < found["dense_seconds"]
    with pytest.raises(SystemExit):
        main([*ARGUMENTS, "--bandwidth", "1e400"])
    assert "above 0" in capsys.readouterr().err
