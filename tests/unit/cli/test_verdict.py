"""The verdict of `plan`: against hand calculations, and what it refuses."""

import dataclasses
import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from horovod_sparse.cli.main import main
from horovod_sparse.cost import AlphaBeta, Fit, assumed_profile
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.planning import advice
from horovod_sparse.planning.advice import OPTIMIZERS
from horovod_sparse.plans.dense import ELEMENT_SECONDS

MEASUREMENTS = Path(__file__).parents[3] / "docs/measurements"
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


@pytest.mark.parametrize("hosts", [[], ["--per-node", "2"]])
def test_the_crossing_is_where_both_take_equally_long(hosts, capsys):
    limit = numbers(capsys, *hosts)["dense_wins_from_bits_per_second"]
    below, above = (numbers(capsys, *hosts, "--bandwidth", f"{limit * by:.0f}bit") for by in (0.95, 1.05))
    assert below["speedup"] > 1.0 >= above["speedup"]


def test_it_answers_in_a_few_lines_with_something_to_paste_in_text_and_in_json(capsys):
    assert main([*ARGUMENTS, "--bandwidth", "1gbit"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    names = ("worth it", "accuracy", "iteration", "memory", "paste", "dense wins", "local steps")
    names += ("how sure", "assumed")
    assert tuple(lines) == names
    pasted = eval(f"dict({lines['paste']})")  # what is pasted is Python
    assert pasted["merging"] == "optimal" and parse_recipe(pasted["compression"])
    assert lines["memory"].startswith("400 MB more")  # float32 of 100 million elements
    found = numbers(capsys, "--bandwidth", "1gbit")
    assert all(found[name.replace(" ", "_")] == lines[name] for name in ("paste", "accuracy", "assumed"))
    assert found["memory_bytes"] == 400_000_000
    assert "fp16" in numbers(capsys, "--params", "1000")["paste"]  # where dense wins, too


def test_all_that_is_assumed_is_said(capsys):
    said = numbers(capsys, "--per-node", "2")["assumed"]
    each = 1e9 * ELEMENT_SECONDS
    for word in (f"{each:g} ns an element", "cycle", "within a host", "float16", "update", "equal pieces"):
        assert word in said
    assert "5 ns an element" in numbers(capsys, "--selection-per-element", "5ns")["assumed"]


def test_selection_is_assumed_to_take_what_was_measured():
    """0.3 ns an element stood here, where the committed table had more than twice as much."""
    measured = json.loads((MEASUREMENTS / "local.json").read_text())
    (took,) = [one["median_ms"] for one in measured["timings"] if one["name"] == "topk, P=8"]
    assert pytest.approx(1e-3 * took / measured["elements"], rel=0.1) == ELEMENT_SECONDS


def test_momentum_and_adamw_behind_error_feedback_are_told_what_that_costs(capsys):
    given = {name: numbers(capsys, "--optimizer", name)["accuracy"] for name in OPTIMIZERS}
    assert "kept up" in given["sgd"]
    for name, feedback in (("momentum", "best"), ("adamw", "adam")):
        found = numbers(capsys, "--optimizer", name)
        assert found["recipe"].endswith(f"feedback={feedback}") and "AdamW lost" not in found["accuracy"]
        told = numbers(capsys, "--optimizer", name, "--sparsifier", "topk")["accuracy"]
        assert "lost" in told and f"write feedback='{feedback}'" in told
    parts = numbers(capsys, "--optimizer", "adamw", "--sparsifier", "exdyna:feedback=adam")["accuracy"]
    assert "write topk" in parts and "exdyna" not in numbers(capsys, "--optimizer", "adamw")["recipe"]
    dense_enough = numbers(capsys, "--optimizer", "adamw", "--sparsifier", "topk:density=0.2")["accuracy"]
    corrected = numbers(capsys, "--optimizer", "momentum", "--sparsifier", "topk:feedback=momentum")
    assert "write" not in dense_enough and "write" not in corrected["accuracy"]
    assert "switch off the optimizer's own momentum" in corrected["accuracy"]
    assert corrected["memory_bytes"] == 800_000_000  # the velocity, too
    assert "unknown for large models" in numbers(capsys)["accuracy"]


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


@pytest.mark.parametrize(
    ("bandwidth", "words"),
    [
        ("32gbit", "dense gradients\n"),
        ("5gbit", "dense gradients in float16\n"),
        ("1gbit", "every step sparse at density 0.0"),
        ("1mbit", "LocalSteps(optimizer, model, every="),
    ],
)
def test_a_share_of_the_network_is_answered_with_the_first_that_fits(bandwidth, words, capsys):
    arguments = ["--params", "1e7", "--network-share", "0.2", "--bandwidth", bandwidth, "--latency", "1us"]
    assert main([*ARGUMENTS, *arguments]) == 0
    told = capsys.readouterr().out
    assert f"network_share=0.2: {words}" in told or words in told.partition("network_share=0.2: ")[2]
    assert "network_share=0.2\n" in told.partition("paste: ")[2] or "fp16" in told


def test_the_names_of_former_releases_say_what_they_are_now(capsys):
    assert main(["worth-it", *ARGUMENTS[2:]]) == 0
    before = capsys.readouterr()
    assert main(ARGUMENTS) == 0
    assert capsys.readouterr().out == before.out
    assert before.err.splitlines() == [
        "horovod-sparse worth-it will go: it is horovod-sparse plan --verdict now"
    ]


def test_points_that_are_told_are_those_that_were_measured(capsys):
    runs = json.loads((MEASUREMENTS / "schedules.json").read_text())["runs"]
    points: dict[str, dict[str, list[float]]] = {}
    for name, run in runs.items():
        schedule, optimizer, method, _ = name.split("/")
        points.setdefault(f"{schedule}/{optimizer}", {}).setdefault(method, []).append(100 * run["accuracy"])
    lost: dict[str, list[float]] = {}
    for name, found in points.items():
        schedule, optimizer = name.split("/")
        ended = optimizer == "momentum" and schedule.startswith(("cosine", "one-cycle"))
        for method in ("topk", "exdyna") if "dense" in found else ():
            of = lost.setdefault("momentum to 0" if ended else optimizer, [])
            of.append(fmean(found["dense"]) - fmean(found[method]))
    best = [
        fmean(found["dense"]) - fmean(found["topk, best"])
        for found in points.values()
        if "topk, best" in found
    ]
    assert f"ended {max(best):.1f} points behind to {-min(best):.1f} before" in numbers(capsys)["accuracy"]
    told = numbers(capsys, "--sparsifier", "exdyna:density=0.01")["accuracy"]
    assert f"ended {max(lost['SGD']):.1f} points behind to {-min(lost['SGD']):.1f} before" in told
    ends = "{:.1f} to {:.1f}".format(min(lost["momentum to 0"]), max(lost["momentum to 0"]))
    assert f"momentum lost {ends} points where" in told and f"up to {max(lost['momentum']):.1f} where" in told
    assert f"AdamW lost {min(lost['AdamW']):.1f} to {max(lost['AdamW']):.1f} points" in told
    gpt = json.loads((MEASUREMENTS / "gpt.json").read_text())["runs"]
    best = [
        min(run["bits_per_byte"] for name, run in gpt.items() if name.startswith(row))
        for row in ("none", "exdyna:density=0.01", "exdyna:density=0.05")
    ]
    assert f"GPT {best[1] - best[0]:.2f} bits per byte ({best[2] - best[0]:.2f} at density 0.05)" in told
    dense, corrected = points["warm restarts/momentum"]["dense"], points["warm restarts/`feedback=momentum`"]
    behind = [f"{fmean(dense) - fmean(corrected[method]):.1f}" for method in ("topk", "exdyna")]
    told = numbers(capsys, "--optimizer", "sgd", "--sparsifier", "topk:feedback=momentum")["accuracy"]
    assert f"lost {' and '.join(behind)} points with restarts" in told
    local = json.loads((MEASUREMENTS / "local_steps.json").read_text())["runs"]
    dense, apart = (
        fmean(run["training_bits"] for name, run in local.items() if name.startswith(row))
        for row in ("AdamW in every step", "sparseloco, H = 30/")
    )
    above = re.search(r"ended (\d+) % above", advice._LOCAL_STEPS[30])
    assert above and int(above[1]) == pytest.approx(100 * (apart / dense - 1), abs=2.0)
