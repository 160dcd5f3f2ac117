"""`horovod-sparse plan`: its tables against the model of a step, its files, its pictures."""

import json
import sys

import pytest

pytest.importorskip("matplotlib")

from horovod_sparse.cli.main import main
from horovod_sparse.cli.plan.report import Predicted, bucket_rows, chosen_plan
from horovod_sparse.cost import AffineTime, CostModel
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.merging import ParameterFacts, Plan, Workload, joint, layerwise, predict, single

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
        chosen_plan(WORKLOAD, joint, "cost", recipe, COST)
    slow = CostModel(AffineTime(50.0), AffineTime(50.0), AffineTime(0.1, 0.001))
    step, plan, reasons = chosen_plan(WORKLOAD, joint, None, parse_recipe("topk"), slow)
    assert set(plan.dense) == {"a", "b", "c"} == set(reasons)
    assert f"{predict(step, plan, slow).iteration_seconds * 1e3:.1f} ms" in reasons["a"]


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
def bucket_of_bytes(tmp_path):
    """One bucket of a million elements, for which only bytes and 10 ms of backward take time."""
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"parameters": [["all", 1_000_000, 0.01]]}))
    words = ["plan", "--model", str(path), "--merging", "single", "--density", "0.01", "--latency", "1e-6us"]
    words += ["--selection-fixed", "1e-6us", "--selection-per-element", "1e-9ns", "--sparsifier", "topk"]
    return [*words, "--json", "-"]


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


def test_a_picture_shows_both_queues_and_without_matplotlib_is_refused_in_words(
    capsys, monkeypatch, tmp_path
):
    path = tmp_path / "plan.svg"
    arguments = ["--model", "vgg16_cifar", "--sparsifier", "topk", "--merging", "single"]
    assert main(["plan", *arguments, "--tensor-selection", "min_elements(9999)", "--picture", str(path)]) == 0
    drawn = path.read_text()
    assert all(
        f'id="{kind}' in drawn for kind in ("forward None", "backward 0", "selection 0", "sparse 0", "dense")
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plan", "--picture", "x.png", "--model", "resnet50"]) == 2
    assert "pip install 'horovod_sparse[plot]'" in " ".join(capsys.readouterr().err.split())


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
