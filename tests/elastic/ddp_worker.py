"""A rank that exchanges gradients of DistributedDataParallel: ``ddp_worker.py FOLDER KILL``.

It trains without interruption, then with saves, in the last of which the first rank kills itself, once.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse import ddp
from horovod_sparse.training import checkpoint

STEPS, EVERY = 12, 4


def trained(folder: Path, kill: int) -> tuple[int, dict[str, torch.Tensor]]:
    """The step that it began with, and the weights in the end; `kill` is -1 for no kill and no save."""
    rank, restarted = dist.get_rank(), kill >= 0 and (folder / "ended").exists()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sync = ddp.attach(model, "exdyna:density=0.1", optimizer)
    first = ddp.load(folder / "saved", sync, model=model) if restarted else 0
    for step in range(first, STEPS):
        inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :1]).square().mean().backward()
        optimizer.step()
        if kill >= 0 and step > EVERY and (step + 1) % EVERY == 0:
            if step == STEPS - 1 and rank == 0 and not restarted:
                dying(folder, kill)
            ddp.save(folder / "saved", sync, model=model)
    return first, model.state_dict()


def dying(folder: Path, kill: int) -> None:
    """Kills this process in a save, where it waits for the disk for the time with this number."""
    calls, sync = iter(range(kill)), checkpoint._fsync

    def noticed(path: Path) -> None:
        if next(calls, None) is None:
            (folder / "ended").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        sync(path)

    checkpoint._fsync = noticed


if __name__ == "__main__":
    folder, kill = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    if not (folder / "ended").exists():
        torch.save(trained(folder, -1), folder / f"whole-{dist.get_rank()}.pt")
    torch.save(trained(folder, kill), folder / f"restarted-{dist.get_rank()}.pt")
    dist.destroy_process_group()
