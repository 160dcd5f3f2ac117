"""DistributedDataParallel where Horovod cannot be imported."""

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["horovod"] = None
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import horovod_sparse.ddp

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = torch.nn.Linear(30, 20)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
sync = horovod_sparse.ddp.attach(model, "exdyna:density=0.1", optimizer)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 30)).square().sum().backward()
    optimizer.step()
print(sync.step, sorted(sync.state_dict()["residuals"]))
print(sorted(name for name in sys.modules if name.split(".")[0] in ("horovod", "tensorflow")))
dist.destroy_process_group()
"""


def test_one_rank_trains():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["4 ['bias', 'weight']", "['horovod']"]
