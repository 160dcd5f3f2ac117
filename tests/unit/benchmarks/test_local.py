"""scripts/bench local runs, without PyTorch too, and writes what it measured."""

import json

import numpy as np
import pytest

from benchmarks.common.timing import Timing, Work, measure
from benchmarks.local import works
from benchmarks.local.main import main
from benchmarks.local.steps import StepWorks
from horovod_sparse.collectives import AllToAll, Exchange
from horovod_sparse.sparsifiers import ALGORITHMS


@pytest.mark.parametrize("with_torch", [True, False])
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


def test_exdynas_parts_stay_where_the_others_messages_come_from():
    """Bounds that move from round to round would let this rank select in others' parts, which is refused."""
    steps = StepWorks(works.layered_gradient(1_000_000), 0.001, 8)
    bucket = steps._bucket("exdyna")
    for _ in range(40):
        steps._refill()
        steps.run(bucket)
    assert bucket.last.num_selected > 0


def test_only_what_is_asked_for(capsys):
    assert main(["--elements", "999", "--repeat", "1", "--json", "--only", "qsgd,densely"]) == 0
    names = [timing["name"] for timing in json.loads(capsys.readouterr().out)["timings"][1:]]
    assert names == ["qsgd, P=8", *(f"decode {count} messages densely" for count in (2, 4, 8, 16))]


def test_json_alone_goes_to_stdout(capsys):
    assert main(["--elements", "999", "--repeat", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["elements"] == 999


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


def test_the_gradient_has_layers_of_different_scale():
    gradient = works.layered_gradient(3_000_000)
    scales = gradient.reshape(-1, 1000).std(axis=1)
    assert scales.max() > 3 * scales.min() > 0
