"""The command's arguments: what is refused, how it is said, and the exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import horovod_sparse
from horovod_sparse.cli import calibrate
from horovod_sparse.cli.main import main
from horovod_sparse.cli.model import read_model
from horovod_sparse.cost import AlphaBeta, Profile, assumed_profile
from horovod_sparse.errors import ArgumentError, ProfileMismatchError

TABLE = ["--model", "vgg16_cifar"]
VERDICT = ["plan", "--verdict", "--params", "100e6", "--step-ms", "100", "--nodes", "4"]


def said(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "SUBCOMMAND"),
        (["plam"], "invalid choice"),
        (["plan", *TABLE, "--density", "0"], "(0, 1]"),
        (["plan", *TABLE, "--density", "0.1", "--sparsifier", "topk:density=0.01"], "--density=0.1"),
        (["plan", *TABLE, "--density", "auto(least=2)"], "least=2"),
        (["plan", *TABLE, "--ranks", "1"], "2 or more"),
        (["plan", *TABLE, "--bandwidth", "10parsec"], "25gbit"),
        (["plan", *TABLE, "--ranks", "2,one"], "'one'"),
        (["plan", *TABLE, "--ranks", "²"], "no number of ranks"),
        (["plan", "--model", "resnet51"], "resnet50"),
        (["plan", *TABLE, "--sparsifier", "topk:densty=0.1"], "densty"),
        (["plan", *TABLE, "--tensor-selection", "some"], "min_elements(1024)"),
        (["plan", *TABLE, "--profile", "missing.json"], "missing.json"),
        (["plan"], "--model"),
        (["plan", *TABLE, "--ranks", "8192"], "4096"),
        (["plan", *TABLE, "--ranks", "2,4", "--save-plan", "plan.json"], "--save-plan"),
        (["plan", *TABLE, "--verdict", "--save-plan", "plan.json"], "--save-plan"),
        (["plan", "--params", "1M", "--step-ms", "9", "--save-plan", "plan.json"], "--save-plan"),
        (["plan", *TABLE, "--sparsifier", "topk", "--sparsifier", "exdyna"], "--sparsifier"),
        ([*VERDICT, "--bandwidth", "10"], "'10' has no unit"),
        ([*VERDICT, "--bandwidth", "10GB/s"], "in bytes"),
        ([*VERDICT, "--bandwidth", "1e400bit"], "no number above 0"),
        ([*VERDICT, "--latency", "50"], "'50' has no unit"),
        ([*VERDICT, "--params", "124X"], "124M"),
        ([*VERDICT, "--nodes", "0"], "--nodes"),
        ([*VERDICT, "--params", "nan"], "--params"),
        ([*VERDICT, "--nodes", "1"], "--nodes"),
        ([*VERDICT, "--step-ms", "-1"], "--step-ms"),
        ([*VERDICT, "--step-ms", "inf"], "--step-ms"),
        ([*VERDICT, "--model", "resnet50"], "--params"),
        ([*VERDICT, "--ranks", "4"], "--nodes"),
        (["calibrate", "--sparsifier", "topk", "--sparsifier", "topk:indices=gaps"], "every name once"),
        (["calibrate", "--device", "cuda", "--framework", "tensorflow"], "cpu"),
    ],
)
def test_wrong_arguments_are_named_in_the_last_line_and_end_with_2(
    arguments, words, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate, "start", lambda framework: pytest.fail("Horovod was started"))
    try:
        code = main(arguments)
    except SystemExit as ended:  # from argparse, after the usage
        code = ended.code
    *before, last = said(capsys).strip().splitlines()
    assert code == 2 and words in last
    assert not before or before[0].startswith("usage: ")


@pytest.mark.parametrize(
    "content",
    [
        {"layers": [["a", 3]]},
        {"parameters": [["a", [2, 0], 0.1]]},
        {"parameters": [["a", 3, 0.1], ["b", 3]]},
        {"parameters": [["a", 3, 0.1], ["a", 3, 0.1]]},
        {"parameters": [["a", 3, 0.0], ["b", 3, 0.0]]},  # nothing was measured
        {"parameters": [["a", 3, -1.0]]},
        [],
    ],
)
def test_model_files_of_another_form_are_refused(content, tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ArgumentError, match="--model"):
        read_model(str(path))


def test_a_profile_brings_the_times_that_a_model_file_has_not(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"parameters": [["a", [3, 4]], ["b", 5]]}))
    model = read_model(str(path))
    profile = Profile(2, "torch", "mpi", 0.001, backward_seconds={"b": 0.5, "a": 0.25}, forward_seconds=2.0)
    workload = model.workload(profile)
    # in the profile's order, in which gradients came
    assert [parameter.name for parameter in workload.parameters] == ["b", "a"]
    assert workload.backward_seconds == (0.5, 0.25)
    assert workload.forward_seconds == 2.0
    with pytest.raises(ArgumentError, match="backward times"):
        model.workload()
    lacking = Profile(2, "torch", "mpi", 0.001, backward_seconds={"b": 0.5})
    with pytest.raises(ProfileMismatchError, match="no backward time for a"):
        model.workload(lacking)
    path.write_text(json.dumps({"parameters": [["a", [3, 4], 0.1], ["b", 5, 0.2]]}))
    timed = read_model(str(path))
    assert timed.workload(lacking).backward_seconds == (0.1, 0.2)
    assert "another model" in timed.doubts(lacking)[0]
    assert timed.doubts(profile) == timed.doubts(None) == ()


def test_a_profile_of_another_place_is_warned_about_or_refused(tmp_path, capsys):
    path = tmp_path / "profile.json"
    assumed_profile(AlphaBeta(), 4).save(path)
    arguments = ["plan", *TABLE, "--profile", str(path), "--sparsifier", "topk"]
    assert main([*arguments, "--ranks", "16"]) == 0
    assert "warning: the profile was measured with 4 ranks, here 16" in capsys.readouterr().out
    assert main([*arguments, "--bandwidth", "1gbit"]) == 2
    assert "--bandwidth" in said(capsys)
    path.write_text("{}")
    assert main(arguments) == 2
    assert "not a profile" in said(capsys)


_SCRIPT = """
import importlib, json, os, sys
before = dict(os.environ)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(key for key in os.environ if os.environ[key] != before.get(key))))
"""


#: front ends set the last one, so that stock Horovod's collectives have a deadline, too
_ALLOWED = {"TF_CPP_MIN_LOG_LEVEL", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"}


def test_nothing_but_thread_counts_and_logging():
    """One of them once made every later test of the same process believe that it was elastic."""
    root = Path(horovod_sparse.__file__).parents[1]
    names = [
        str(path.relative_to(root).with_suffix("")).replace("/", ".")
        for folder in ("horovod_sparse/cli", "benchmarks")
        for path in sorted(root.glob(f"{folder}/**/*.py"))
        # what only the ranks of a launch import has a process of its own
        if path.stem != "__init__" and not path.stem.endswith("rank")
    ]
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *names], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    changed = json.loads(found.stdout.splitlines()[-1])
    assert not [key for key in changed if not key.endswith("_NUM_THREADS") and key not in _ALLOWED]
