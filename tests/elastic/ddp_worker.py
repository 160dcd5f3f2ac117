"""A rank that trains with the hook of DistributedDataParallel, and saves every second step.

ddp_worker.py FOLDER STEP: rank 1 ends itself before this step, once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse import ddp

STEPS = 12


def main() -> None:
    folder, last = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sync = ddp.attach(model, "exdyna:density=0.1", optimizer)
    file, first = folder / f"rank-{rank}.pt", 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        first = saved["step"]
        net.load_state_dict(saved["model"])
        sync.load_state_dict(saved["residuals"])
    for step in range(first, STEPS):
        if step == last and rank == 1 and not (folder / "ended").exists():
            (folder / "ended").touch()
            os._exit(1)
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(16, 40, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :1]).square().mean().backward()
        optimizer.step()
        if step % 2 and step > 6:
            torch.save(
                {"step": step + 1, "model": net.state_dict(), "residuals": sync.state_dict()},
                folder / f"{rank}.new",
            )
            dist.barrier()
            os.replace(folder / f"{rank}.new", file)
            dist.barrier()
    torch.save((first, net.state_dict()), folder / f"end-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
