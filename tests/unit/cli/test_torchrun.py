"""`horovod-sparse calibrate` and `doctor` under torchrun, where Horovod cannot be imported."""

import os
import subprocess
import sys
from pathlib import Path

from horovod_sparse.cost import Profile
from support.documents import ROOT

SCRIPT = """
import sys
sys.modules["horovod"] = None
from horovod_sparse.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
CALIBRATE = ["calibrate", "--quick", "--repetitions", "2", "--budget", "500ms", "--sparsifier", "topk"]


def launched(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "command.py").write_text(SCRIPT)
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(folder / "command.py")]
    known = {name: text for name, text in os.environ.items() if not name.startswith(("HOROVOD_", "OMPI_"))}
    return subprocess.run(
        [sys.executable, "-m", *launch, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**known, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def test_both_ranks_measure_and_one_writes(tmp_path):
    path = tmp_path / "profile.json"
    done = launched(tmp_path, *CALIBRATE, "--out", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{path} written") == 1 and "2 ranks, torch, controller gloo" in done.stdout
    profile = Profile.load(path)
    assert (profile.size, profile.controller, profile.cycle_seconds) == (2, "gloo", 0.0)
    assert sorted(profile.collectives) == ["allgather", "allreduce", "broadcast", "exchange"]
    assert "topk" in profile.selection and "topk" in profile.decoding


def test_the_doctor_looks_at_both_and_speaks_once(tmp_path):
    done = launched(tmp_path, "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("good: versions: Python") == 1
    assert "2 ranks, started by torchrun, controller gloo" in done.stdout
