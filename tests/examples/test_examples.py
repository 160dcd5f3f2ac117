"""The examples on two ranks as a user would copy them: for an epoch, or on made data for two steps."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from support.jobs import HOROVODRUN, ran

EXAMPLES = Path(__file__).parents[2] / "examples"
KERAS = pytest.param("tensorflow2_keras_mnist", marks=[pytest.mark.tensorflow, pytest.mark.nightly])
#: launched by torchrun
WITHOUT_HOROVOD = ("ddp_digits", "imagenet_resnet50", "demo")


def launched(example: str, file: Path, *arguments: str, size: int = 2) -> dict[str, Any]:
    launcher = [*HOROVODRUN, "--disable-cache", "-np", "2", sys.executable]
    if example in WITHOUT_HOROVOD:
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        launcher = [torchrun, "--standalone", "--nproc-per-node", str(size)]
    # these models are small, and would stay dense
    more = {"HOROVOD_SPARSE_TENSOR_SELECTION": "all"}
    ran(*launcher, EXAMPLES / f"{example}.py", *arguments, "--json", file, **more)
    told: dict[str, Any] = json.loads(file.read_text())
    return told


@pytest.mark.parametrize(
    "compression", ["exdyna:density=0.05", pytest.param("none", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("example", ["pytorch_mnist", "ddp_digits", KERAS])
def test_an_example_learns_and_tells_its_bytes(example: str, compression: str, tmp_path: Path) -> None:
    own = example == "tensorflow2_keras_mnist" and compression != "none"  # its default learns as well
    given = [] if own else ["--compression", compression]
    run = launched(example, tmp_path / "run.json", *given, "--epochs", "1")
    assert run["accuracy"] > 0.5
    dense_bytes = 4 * run["num_parameters"]
    if compression == "none":
        assert run["bytes_per_step"] == dense_bytes
    else:
        assert run["bytes_per_step"] < dense_bytes / 2


@pytest.mark.tensorflow
@pytest.mark.nightly
def test_the_keras_example_ends_within_a_point_of_dense(tmp_path: Path) -> None:
    sparse, dense = (
        launched("tensorflow2_keras_mnist", tmp_path / "run.json", *given)["accuracy"]
        for given in ((), ("--compression", "none"))
    )
    assert sparse > dense - 0.01


@pytest.mark.parametrize(
    "example",
    [
        "cifar10_resnet",
        *(pytest.param(one, marks=pytest.mark.nightly) for one in ("imagenet_resnet50", "gpt_text")),
    ],
)
def test_a_dry_run_takes_every_path_but_the_data(example: str, tmp_path: Path) -> None:
    curves = importlib.util.find_spec("tensorboard") is not None
    arguments = ["--tensorboard", str(tmp_path / "curves")] if curves else []
    arguments += ["--checkpoint", str(tmp_path / "saved")] if example == "cifar10_resnet" else []
    run = launched(example, tmp_path / "run.json", "--dry-run", *arguments)
    assert run["steps"] == 2 and run["size"] == 2
    assert run["bytes_per_step"] < run["num_parameters"] / 2, "an eighth of dense or less"
    assert math.isfinite(run["final_loss"]) and run["final_loss"] > 0.0
    if curves:
        (file,) = (tmp_path / "curves").iterdir()
        assert b"sparse/density_union" in file.read_bytes()


@pytest.mark.nightly
def test_the_demo_trains_by_every_method(tmp_path: Path) -> None:
    run = launched("demo", tmp_path / "run.json", "--seconds", "6", "--rate", "300", size=4)
    assert len(run["runs"]) == 6
    start = run["runs"]["dense"]["curve"][0]
    for name, method in run["runs"].items():
        assert method["curve"][0] == start, f"{name} begins elsewhere"
        assert method["bits"] < start[1] - 0.1, name
    sent = {name: method["bytes_per_pass"] for name, method in run["runs"].items()}
    assert sent["DiLoCo, every=30"] < 0.1 * sent["dense"] and sent["best"] < 0.05 * sent["dense"]
    assert sent["best, delay=1"] > 0.9 * sent["best"], "messages that leave after their pass count too"


@pytest.mark.parametrize(
    "example", ["imagenet_resnet50", pytest.param("ddp_digits", marks=pytest.mark.nightly)]
)
def test_what_torchrun_has_to_start_says_so(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = [] if example == "ddp_digits" else ["--dry-run"]
    monkeypatch.delenv("RANK", raising=False)
    done = ran(sys.executable, EXAMPLES / f"{example}.py", *needed, status=1, HOROVOD_RANK="0")
    assert done.stderr.splitlines()[-1].startswith("start it by torchrun")
    assert "Traceback" not in done.stderr
