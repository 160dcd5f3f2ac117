"""`horovod-sparse calibrate` and `doctor` under torchrun, where Horovod cannot be imported."""

import os
import subprocess
import sys

from horovod_sparse.merging import Profile
from support.documents import ROOT

SCRIPT = """
import functools, sys
sys.modules["horovod"] = None
import torch.distributed as dist
# one group for both commands: of torchrun's store PyTorch makes no second one
dist.init_process_group, dist.destroy_process_group = functools.cache(dist.init_process_group), lambda: None
from horovod_sparse.cli.main import main
print("doctor ends with", main(["doctor"]))
sys.exit(main(sys.argv[1:]))
"""
CALIBRATE = ["calibrate", "--quick", "--repetitions", "2", "--budget", "500ms", "--sparsifier", "topk"]


def test_both_ranks_measure_and_one_speaks_and_writes(tmp_path):
    path, script = tmp_path / "profile.json", tmp_path / "command.py"
    script.write_text(SCRIPT)
    known = {name: text for name, text in os.environ.items() if not name.startswith(("HOROVOD_", "OMPI_"))}
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", *launch, *CALIBRATE, "--out", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**known, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0 and done.stdout.count("doctor ends with 0") == 2, done.stdout + done.stderr
    assert done.stdout.count("good: versions: Python") == 1
    assert "2 ranks, started by torchrun, controller gloo" in done.stdout
    assert done.stdout.count(f"{path} written") == 1 and "2 ranks, torch, controller gloo" in done.stdout
    profile = Profile.load(path)
    assert (profile.size, profile.controller, profile.cycle_seconds) == (2, "gloo", 0.0)
    assert sorted(profile.collectives) == ["allgather", "allreduce", "broadcast", "exchange"]
    assert "topk" in profile.selection and "topk" in profile.decoding
