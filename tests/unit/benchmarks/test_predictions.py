"""`scripts/bench predictions` and `density`: what is predicted, judged and kept, without any hosts."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest

from benchmarks import density
from benchmarks.predictions import main as predictions
from benchmarks.report.tables import density_table, predictions_table
from horovod_sparse.cost import AlphaBeta, Fit, assumed_profile
from horovod_sparse.merging import Plan, fixed, layer_table

ALONE = {"slowest_parts": {"forward": 0.07, "backward": 0.13, "exchange": 0.0, "step": 0.1}}


def profile(**training):
    made = assumed_profile(AlphaBeta(50e-6, 8e-9), 4)
    return dataclasses.replace(made, training=training)


def test_a_step_computes_as_long_as_alone_and_updates_as_the_profile_says():
    workload = predictions.workload_of("resnet50", profile(update=Fit(1e-4, 4e-9)), ALONE)
    assert workload.step_seconds == pytest.approx(0.2)
    assert workload.update_seconds == pytest.approx(161 * 1e-4 + 4e-9 * 25_557_032)


def test_the_update_and_the_fused_sums_lengthen_predictions():
    recipes = {"topk": "topk:density=0.001"}
    plain = predictions.predicted(predictions.workload_of("resnet50", profile(), ALONE), profile(), recipes)
    known = profile(update=Fit(0.0, 4e-9), allreduce=Fit(1e-3, 3e-8), start=Fit(1e-4, 0.0))
    more = predictions.predicted(predictions.workload_of("resnet50", known, ALONE), known, recipes)
    assert more["topk"] - plain["topk"] == pytest.approx(4e-9 * 25_557_032)
    assert more["dense"] > 4 * 25_557_032 * 3e-8 > plain["dense"]


def test_a_plan_by_positions_is_the_same_plan():
    workload = layer_table("vgg16_cifar").workload.with_dense(["stage1.conv1.bias"])
    plan = fixed(num_elements=500_000)(workload, None)
    names = [parameter.name for parameter in workload.parameters]
    found = predictions.positions(plan, workload)
    buckets = tuple(tuple(names[place] for place in bucket) for bucket in found["buckets"])
    assert Plan(buckets, tuple(names[place] for place in found["dense"])) == plan


def test_other_rates_and_models_stay_with_their_commands(tmp_path):
    path = tmp_path / "found.json"
    before = [{"rate": rate, "model": "a", "command": f"old {rate}"} for rate in ("1", "10")]
    path.write_text(json.dumps({"comparisons": before}))
    options = argparse.Namespace(add=True, json=str(path))
    arguments = (
        [{"rate": "10", "model": "a"}],
        options,
        "density",
        ["--rate", "10", "--add", "--json", str(path)],
    )
    found = predictions.with_others(*arguments)
    commands = [one["command"] for one in found["comparisons"]]
    assert commands == ["old 1", "scripts/bench density --rate 10"]
    assert found["command"] == "; ".join(commands)
    options.add = False
    assert [one["rate"] for one in predictions.with_others(*arguments)["comparisons"]] == ["10"]


def test_the_best_density_is_the_largest_that_costs_nothing():
    seconds = {"0.001": 1.0, "0.01": 1.049, "0.1": 1.06, "auto": 1.11}
    found = density.judged([0.001, 0.01, 0.1], seconds)
    assert (found["best"], found["met"]) == (0.01, False)
    assert density.judged([0.001, 0.01, 0.1], {**seconds, "auto": 1.1})["met"]


def test_tables_say_what_was_missed():
    times = {"median": 0.1, "low": 0.09, "high": 0.12}
    row = {"method": "topk", "recipe": "topk", "predicted_seconds": 0.12, "seconds": times, "error": 0.2}
    machine = {"cores": 2, "memory_gib": 24}
    comparison = {"model": "resnet50", "rate": "1gbit", "rows": [row, {**row, "error": -0.15}]}
    lines = predictions_table({"machine": machine, "comparisons": [comparison]}).splitlines()
    assert "| resnet50, 1gbit, topk | 120 | 100 | 90.0 to 120 | +20.0% | **missed** |" in lines
    assert lines[-1].endswith("| -15.0% | met |")
    seconds = {"0.001": times, "auto": {**times, "median": 0.11}}
    one = {"model": "resnet50", "rate": "1gbit", "seconds": seconds, "densities": [0.001], "auto": 0.002}
    found = density_table(
        {"machine": machine, "comparisons": [{**one, "best": 0.001, "longer": 0.1, "met": False}]}
    )
    assert found.splitlines()[-1] == "| resnet50, 1gbit | 100 | 0.002 | 110 | 0.001 | +10.0% | **missed** |"
