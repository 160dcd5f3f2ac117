"""The command: arguments that are refused, its exit code, and what `worth-it` answers."""

import pytest

from horovod_sparse.cli import calibrate
from horovod_sparse.cli.main import main
from horovod_sparse.cli.worth_it import Case, recommended_row, rows_of

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
    monkeypatch.setattr(calibrate, "connect_ranks", lambda framework: pytest.fail("Horovod was started"))
    try:
        code = main(arguments)
    except SystemExit as ended:  # from argparse
        code = ended.code
    error, *more = said(capsys).strip().splitlines()
    assert code == 2 and words in error and error.startswith("horovod-sparse")
    command = error.partition(":")[0]
    assert more in ([], [f"see {command} --help"])


ROUND = ["--params", "1M", "--step-ms", "100", "--nodes", "4", "--bandwidth", "1gbit", "--latency", "1ms"]


def added(case: Case) -> dict[str, float]:
    return {row.name: row.added_seconds for row in rows_of(case)}


def test_seconds_are_those_calculated_by_hand():
    """4 nodes: 6 rounds of a quarter of the bytes; or three messages of 10,000 elements of 8 bytes."""
    found = added(Case(1_000_000, 0.1, 4, 1e9, 1e-3))
    assert found["dense"] == pytest.approx(1.5 * 4e6 * 8 / 1e9 + 6e-3)
    assert found["fp16"] == pytest.approx(1.5 * 2e6 * 8 / 1e9 + 6e-3)
    assert found["sparse"] == pytest.approx(3 * 80_000 * 8 / 1e9 + 1e-3)
    assert found["sparse, delay=1"] == found["sparse, every=4, delay=1"] == 0.0
    two = added(Case(1_000_000, 0.1, 2, 1e6, 0.2))
    late = {"sparse, delay=1": 0.64 + 0.2 - 0.1, "sparse, every=4, delay=1": 0.64 + (0.2 - 0.4) / 4}
    found = {name: two[name] for name in ("dense", "fp16", "sparse", *late)}
    assert found == pytest.approx({"dense": 32 + 0.4, "fp16": 16 + 0.4, "sparse": 0.64 + 0.2, **late})


@pytest.mark.parametrize(
    ("nodes", "bits_per_second", "latency", "name"),
    [
        (4, 1e8, 1e-6, "sparse, delay=1"),
        (4, 2e9, 1e-6, "sparse"),
        (4, 1e11, 1e-6, "dense"),
        (400, 1e8, 1e-6, "fp16"),
        (4, 2e9, 0.02, "sparse, delay=1"),
        (4, 2e9, 0.1, "sparse, every=4, delay=1"),
        (4, 2e9, 0.5, "sparse, every=15, delay=1"),
    ],
)
def test_what_saves_nothing_is_not_recommended(nodes, bits_per_second, latency, name):
    case = Case(1_000_000, 0.05, nodes, bits_per_second, latency)
    assert recommended_row(case, rows_of(case)).name == name


def test_the_answer_has_code_to_paste_and_a_link(capsys):
    assert main(["worth-it", *ROUND]) == 0
    every, rare = capsys.readouterr().out.splitlines()[4:6]
    assert every.startswith("sparse, every=4, delay=1: 0.1 s") and rare.endswith("2.3 times the steps")
    assert main(["worth-it", *ROUND[:-2]]) == 0 and "every" not in capsys.readouterr().out  # nor at 50 us
    assert main(["worth-it", *ROUND, "--optimizer", "sgd"]) == 0  # without a row for every > 1
    dense, fp16, sparse, delay, paste, accuracy, assumed = capsys.readouterr().out.splitlines()
    assert delay.startswith("sparse, delay=1: 0.1 s")
    assert dense == "dense: 0.154 s a step, 54 % longer than alone"
    assert fp16.startswith("fp16: 0.13 s") and sparse.startswith("sparse: 0.103 s")
    assert "docs/report.md" in accuracy and assumed.startswith("assumed: ")
    line = paste.removeprefix("paste: ")
    compile(line, "paste", "exec")
    assert "torch.optim.SGD" in line and 'attach(model, "best:density=0.01", optimizer)' in line
