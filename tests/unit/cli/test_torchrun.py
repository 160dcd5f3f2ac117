"""DistributedDataParallel, `calibrate` and `doctor` under torchrun, where Horovod cannot be imported."""

import os
import sys

from horovod_sparse.merging import Profile
from support.documents import ROOT
from support.jobs import ran

SCRIPT = """
import functools, sys
sys.modules["horovod"] = None
import torch.distributed as dist
# one group for both commands: of torchrun's store PyTorch makes no second one
dist.init_process_group, dist.destroy_process_group = functools.cache(dist.init_process_group), lambda: None
from horovod_sparse.cli.main import main
# every line in one piece: the other rank speaks, too
sys.stdout.write(f"doctor ends with {main(['doctor'])}\\n")
status = main(sys.argv[1:])

import torch
from torch.nn.parallel import DistributedDataParallel
from horovod_sparse import ddp

model = DistributedDataParallel(torch.nn.Linear(30, 20))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = ddp.attach(model, "exdyna:density=0.1", optimizer)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 30)).square().sum().backward()
    optimizer.step()
frameworks = [name for name in sys.modules if name.split(".")[0] in ("horovod", "tensorflow")]
sys.stdout.write(f"trained {sync.step} {sorted(sync.state_dict()['residuals'])} {frameworks}\\n")
sys.exit(status)
"""
CALIBRATE = ["calibrate", "--quick", "--repetitions", "2", "--budget", "500ms", "--sparsifier", "topk"]


def test_both_ranks_measure_and_train_and_one_speaks_and_writes(tmp_path, monkeypatch):
    path, script = tmp_path / "profile.json", tmp_path / "command.py"
    script.write_text(SCRIPT)
    for name in os.environ:
        if name.startswith(("HOROVOD_", "OMPI_")):
            monkeypatch.delenv(name)
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = ran(sys.executable, "-m", *launch, *CALIBRATE, "--out", path, PYTHONPATH=str(ROOT))
    assert done.stdout.count("doctor ends with 0") == 2
    assert done.stdout.count("good: versions: Python") == 1
    assert "2 ranks, started by torchrun, controller gloo" in done.stdout
    assert done.stdout.count(f"{path} written") == 1 and "2 ranks, torch, controller gloo" in done.stdout
    profile = Profile.load(path)
    assert (profile.size, profile.controller, profile.cycle_seconds) == (2, "gloo", 0.0)
    assert sorted(profile.collectives) == ["allgather", "allreduce", "broadcast", "exchange"]
    assert "topk" in profile.selection and "topk" in profile.decoding
    assert done.stdout.count("trained 4 ['bias', 'weight'] ['horovod']") == 2
