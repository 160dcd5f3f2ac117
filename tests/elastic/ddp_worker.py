"""A rank that trains with the hook of DistributedDataParallel twice: ``ddp_worker.py FOLDER``.

Once without interruption; then it saves every second step, and rank 1 ends itself before the last one, once.
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


def trained(folder: Path, interrupted: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """The step that it began with, and the weights in the end."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sync = ddp.attach(model, "exdyna:density=0.1", optimizer)
    file, first = folder / f"rank-{rank}.pt", 0
    if interrupted and file.exists():
        saved = torch.load(file, weights_only=True)
        first = saved["step"]
        net.load_state_dict(saved["model"])
        sync.load_state_dict(saved["residuals"])
    for step in range(first, STEPS):
        if interrupted and step == STEPS - 1 and rank == 1 and not (folder / "ended").exists():
            (folder / "ended").touch()
            os._exit(1)
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(16, 40, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :1]).square().mean().backward()
        optimizer.step()
        if interrupted and step % 2 and step > 6:
            torch.save(
                {"step": step + 1, "model": net.state_dict(), "residuals": sync.state_dict()},
                folder / f"{rank}.new",
            )
            dist.barrier()
            os.replace(folder / f"{rank}.new", file)
            dist.barrier()
    return first, net.state_dict()


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if not (folder / "ended").exists():
        torch.save(trained(folder, interrupted=False), folder / f"whole-{rank}.pt")
    torch.save(trained(folder, interrupted=True), folder / f"restarted-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
