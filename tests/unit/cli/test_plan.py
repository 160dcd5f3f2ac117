"""`horovod-sparse plan`: its tables against the model of a step, and its files."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest

from horovod_sparse.cli.main import main
from horovod_sparse.cli.plan.report import Predicted, bucket_rows, chosen_plan
from horovod_sparse.cost import AffineTime, AlphaBeta, CostModel, Fit, assumed_profile
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.merging import ParameterFacts, Plan, Workload, layerwise, predict, single
from horovod_sparse.planning.advice import OPTIMIZERS
from horovod_sparse.plans.dense import ELEMENT_SECONDS

WORKLOAD = Workload(
    (ParameterFacts("a", 100), ParameterFacts("b", 200), ParameterFacts("c", 300)), (3.0, 2.0, 1.0), 4.0
)
#: selection 0.5 + n / 1000, communication 1 + n / 100
COST = CostModel(AffineTime(0.5, 0.001), AffineTime(1.0, 0.01), AffineTime(0.1, 0.005))


def predicted(plan: Plan, workload: Workload = WORKLOAD, name: str = "it") -> Predicted:
    return Predicted(name, plan, predict(workload, plan, COST))


def test_rows_say_what_happens_when():
    rows = bucket_rows(WORKLOAD, predicted(Plan((("c",), ("b", "a")))), density=0.01)
    first, second = rows
    assert (first["names"], first["num_elements"], first["num_selected"]) == (["c"], 300, 3)
    assert (first["ready_seconds"], first["selection_seconds"]) == (5.0, pytest.approx(0.8))  # 4 + 1
    assert (first["send_seconds"], first["waiting_seconds"]) == (pytest.approx(5.8), pytest.approx(0.0))
    assert first["done_seconds"] == pytest.approx(9.8)  # 1 + 3
    assert second["ready_seconds"] == pytest.approx(10.8)
    assert second["done_seconds"] == pytest.approx(10.8 + 0.8 + 4.0)
    late = bucket_rows(WORKLOAD, predicted(layerwise(WORKLOAD)), density=0.01)[1]
    # the network is busy with c
    assert late["waiting_seconds"] == pytest.approx(9.8 - (5.8 + 2.0 + 0.7))


def test_what_stays_dense_has_its_reason():
    recipe = parse_recipe("topk:dense=('b',)")
    rule = lambda parameter: parameter.num_elements > 150  # noqa: E731
    step, plan, reasons = chosen_plan(WORKLOAD, single, rule, recipe, COST)
    assert plan == Plan((("c",),), ("b", "a"))
    assert step.dense == {"a", "b"}
    assert "rule of the sparsifier" in reasons["b"]
    assert "says dense" in reasons["a"]
    given = Plan((("c", "b"),), ("a",))
    assert chosen_plan(WORKLOAD, given, None, recipe, COST)[1:] == (given, {"a": "the given plan says so"})
    with pytest.raises(ArgumentError, match="--tensor-selection"):
        chosen_plan(WORKLOAD, given, "cost", recipe, COST)


def test_numbers_and_plans_are_written_and_read_back(tmp_path, capsys):
    target, saved = tmp_path / "numbers.json", tmp_path / "plan.json"
    common = ["plan", "--model", "vgg16_cifar", "--sparsifier", "topk", "--ranks", "16", "--latency", "1ms"]
    assert main([*common, "--json", str(target), "--save-plan", str(saved)]) == 0
    numbers = json.loads(target.read_text())
    plan = Plan.from_dict(json.loads(saved.read_text()))
    assert plan.to_dict() == numbers["plan"]
    assert [len(bucket) for bucket in plan.buckets] == [len(row["names"]) for row in numbers["buckets"]]
    by_name = {one["name"]: one["iteration_seconds"] for one in numbers["compared"]}
    assert set(by_name) == {"optimal", "layerwise", "single", "fixed 8192", "omgs", "dense"}
    assert all(by_name["optimal"] <= seconds for name, seconds in by_name.items() if name != "dense")
    text = capsys.readouterr().out
    for name, seconds in by_name.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"  {name} ")]
        assert f"{seconds * 1e3:,.1f}" in line
    # the saved plan gives the same step
    assert main([*common, "--merging", str(saved), "--json", "-"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["compared"][0]["iteration_seconds"] == by_name["optimal"]
    assert main(["plan", "--model", "lstm_ptb", "--merging", str(saved)]) == 2  # of another model


def test_density_auto_is_the_largest_for_nothing(capsys, tmp_path):
    network = ["--ranks", "8", "--bandwidth", "2gbit"]
    arguments = ["plan", "--model", "resnet50", "--sparsifier", "topk", *network]
    file = tmp_path / "plan.json"
    density = ["--density", "auto(least=0.002,most=0.2)"]
    assert main([*arguments, *density, "--json", "--save-plan", str(file)]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    chosen = found["plan"]["density"]
    assert 0.002 < chosen < 0.2 and f"density {chosen:g}" in found["density"]

    def seconds(density):
        assert main([*arguments, "--density", f"{density:g}", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["compared"][0]["iteration_seconds"]

    assert found["compared"][0]["iteration_seconds"] == pytest.approx(seconds(chosen))
    assert seconds(chosen) <= 1.02 * seconds(0.002) < seconds(1.1 * chosen)
    # the plan's file says the density: another one beside it is a contradiction
    assert main([*arguments, "--density", "0.5", "--merging", str(file)]) == 2
    assert "a plan for density" in capsys.readouterr().err


def test_two_levels_where_hosts_have_several_ranks(capsys):
    common = ["plan", "--model", "resnet50", "--sparsifier", "topk", "--density", "0.001", "--json", "-"]
    hosts = [*common, "--ranks", "512", "--per-host", "8"]

    def told(*more: str) -> tuple[dict, str]:
        assert main([*hosts, *more]) == 0
        output = capsys.readouterr()
        return json.loads(output.out), output.err

    numbers, words = told()
    assert numbers["levels"] == "host" and "64 hosts of 8 ranks" in words
    flat, _ = told("--levels", "flat")
    (host, beside), (plain, other) = (
        [(row["name"], row["iteration_seconds"]) for row in one["compared"][:2]] for one in (numbers, flat)
    )
    assert host[1] < plain[1]
    assert (beside, other) == (("optimal, flat", plain[1]), ("optimal, host", host[1]))
    slow, words = told("--host-bandwidth", "100mbit")
    assert slow["levels"] == "flat" and "levels: flat" in words
    assert main([*common, "--levels", "host"]) == 2
    assert "--per-host" in capsys.readouterr().err


@pytest.fixture
def bucket_of_bytes(tmp_path, monkeypatch):
    """One bucket of a million elements, for which only bytes and 10 ms of backward take time."""
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"parameters": [["all", 1_000_000, 0.01]]}))
    words = ["plan", "--model", str(path), "--merging", "single", "--density", "0.01", "--latency", "1e-6us"]
    made = partial(assumed_profile, selection=Fit(1e-12, 1e-18))
    monkeypatch.setattr("horovod_sparse.cli.options.assumed_profile", made)
    return [*words, "--sparsifier", "topk", "--json", "-"]


def test_many_sizes_at_once_are_what_each_is_alone_and_what_hands_calculate(bucket_of_bytes, capsys):
    """One bucket of top-k: (P - 1) (16 + 8 d n) bytes against 2 (P - 1) / P * 4 n, in float32."""
    n, backward, density = 1_000_000, 0.01, 0.01
    words = [*bucket_of_bytes, "--gradient-dtype", "float32"]
    assert main([*words, "--sparsifier", "micro", "--ranks", "2,8,64,512"]) == 0
    output = capsys.readouterr()
    topk, micro = json.loads(output.out)["studies"]
    assert (topk["sparsifier"], micro["sparsifier"]) == ("topk:density=0.01", "micro:density=0.01")
    message, beta = 16 + 8 * density * n, 8e-9
    for point in topk["points"]:
        size = point["size"]
        assert point["bytes_per_rank"] == pytest.approx(message)
        assert point["sparse_seconds"] == pytest.approx(backward + (size - 1) * message * beta, rel=1e-4)
        assert point["dense_seconds"] == pytest.approx(
            backward + 2 * (size - 1) / size * 4 * n * beta, rel=1e-4
        )
    # dense wins from 8 n / (16 + 8 d n) on, about 100 ranks
    assert [point["speedup"] > 1.0 for point in topk["points"]] == [True, True, True, False]
    assert "dense wins with 512 ranks" in output.err and "wins at none" in output.err
    assert main([*words, "--ranks", "8"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["sparse_seconds"] == topk["points"][1]["sparse_seconds"]
    assert alone["speedup"] == topk["points"][1]["speedup"]


def test_hosts_of_several_ranks_have_two_levels_in_a_table_of_sizes(bucket_of_bytes, capsys):
    """One bucket of top-k on 4 x 2: dense within hosts, then shards of 4 ranks, two at a time by one card."""
    n, backward = 1_000_000, 0.01
    hosts = ["--per-host", "2", "--host-bandwidth", "80gbit", "--host-latency", "1e-6us", "--levels", "host"]
    assert main([*bucket_of_bytes, *hosts, "--ranks", "8,16"]) == 0
    point = json.loads(capsys.readouterr().out)["studies"][0]["points"][0]
    selected = 0.01 * n / 2
    assert point["bytes_per_rank"] == pytest.approx(16 + 8 * selected, rel=0.01)
    between = 2 * 3 * (16 + 8 * selected) * 8e-9
    within = (4 * n / 2 + 8 * 4 * selected) * 1e-10
    assert point["sparse_seconds"] == pytest.approx(backward + between + within, rel=0.01)


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


def test_selection_is_assumed_to_take_no_less_than_was_measured():
    """0.3 ns an element stood here, where the committed table had more; a busy core takes up to 2.5 times."""
    measured = json.loads((MEASUREMENTS / "local.json").read_text())
    (took,) = [one["median_ms"] for one in measured["timings"] if one["name"] == "topk, P=8"]
    assert 1.0 <= ELEMENT_SECONDS / (1e-3 * took / measured["elements"]) <= 2.5


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
    gpt = json.loads((MEASUREMENTS / "share.json").read_text())["runs"]
    sparse = [run["score"] for name, run in gpt.items() if name.startswith(("gpt: 1 %", "gpt: 0.3 %"))]
    off = [score - gpt["gpt: dense"]["score"] for score in sparse]
    small = json.loads((MEASUREMENTS / "adamw.json").read_text())["runs"]

    def mean(row: str) -> float:
        return fmean(run["training_bits"] for name, run in small.items() if f"{row}/rate 0.003/" in name)

    rows = [f"P={ranks}, topk 1 %, adam{one}" for ranks in (2, 4, 8, 16) for one in ("", ", s = 1")]
    off += [mean(row) - mean("P=2, dense") for row in rows]
    words = f"{math.ceil(10 * max(off)) / 10} bits per byte behind to {math.ceil(-10 * min(off)) / 10} before"
    assert words in numbers(capsys, "--optimizer", "adamw")["accuracy"]
    dense, corrected = points["warm restarts/momentum"]["dense"], points["warm restarts/`feedback=momentum`"]
    behind = [f"{fmean(dense) - fmean(corrected[method]):.1f}" for method in ("topk", "exdyna")]
    told = numbers(capsys, "--optimizer", "sgd", "--sparsifier", "topk:feedback=momentum")["accuracy"]
    assert f"lost {' and '.join(behind)} points with restarts" in told
