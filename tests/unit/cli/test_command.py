"""The command's arguments: what is refused, how it is said, and the exit code."""

import json
import sys
from pathlib import Path

import pytest

import horovod_sparse
from horovod_sparse.cli import calibrate
from horovod_sparse.cli.main import main
from support.jobs import ran

WORTH = ["worth-it", "--params", "1M", "--step-ms", "100", "--nodes", "4", "--bandwidth", "1gbit"]


def said(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "SUBCOMMAND"),
        (["plan"], "invalid choice"),
        ([*WORTH, "--bandwidth", "10"], "'10' has no unit"),
        ([*WORTH, "--bandwidth", "10GB/s"], "in bytes"),
        ([*WORTH, "--bandwidth", "10parsec"], "25gbit"),
        ([*WORTH, "--bandwidth", "1e400bit"], "no number above 0"),
        ([*WORTH, "--latency", "50"], "'50' has no unit"),
        ([*WORTH, "--params", "124X"], "124M"),
        ([*WORTH, "--params", "nan"], "--params"),
        ([*WORTH, "--nodes", "0"], "--nodes"),
        ([*WORTH, "--nodes", "1"], "two nodes"),
        ([*WORTH, "--step-ms", "-1"], "--step-ms"),
        ([*WORTH, "--step-ms", "inf"], "--step-ms"),
        ([*WORTH, "--optimizer", "lion"], "adamw"),
        (["worth-it"], "--params"),
        (["doctor", "--framework", "jax"], "invalid choice"),
        (["calibrate", "--sparsifier", "topk:densty=0.1"], "densty"),
        (["calibrate", "--density", "0"], "(0, 1]"),
        (["calibrate", "--budget", "50"], "'50' has no unit"),
        (["calibrate", "--repetitions", "²"], "no whole number"),
        ([*WORTH, "--nodes", "1" + 400 * "0"], "no whole number from 1 to 1,000,000,000"),
        (["calibrate", "--sparsifier", "topk", "--sparsifier", "topk:indices=gaps"], "every name once"),
        (["calibrate", "--device", "cuda", "--framework", "tensorflow"], "cpu"),
    ],
)
def test_wrong_arguments_are_named_in_one_line_and_end_with_2(
    arguments, words, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate, "start", lambda framework: pytest.fail("Horovod was started"))
    try:
        code = main(arguments)
    except SystemExit as ended:  # from argparse
        code = ended.code
    error, *more = said(capsys).strip().splitlines()
    assert code == 2 and words in error and error.startswith("horovod-sparse")
    command = error.partition(":")[0]
    assert more in ([], [f"see {command} --help"])


_SCRIPT = """
import importlib, json, os, sys
before = dict(os.environ)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(key for key in os.environ if os.environ[key] != before.get(key))))
"""


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
    changed = json.loads(ran(sys.executable, "-c", _SCRIPT, *names).stdout.splitlines()[-1])
    assert not [key for key in changed if not key.endswith("_NUM_THREADS") and key != "TF_CPP_MIN_LOG_LEVEL"]
