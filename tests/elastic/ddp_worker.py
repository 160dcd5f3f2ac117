"""A rank that exchanges gradients of DistributedDataParallel, and local steps: ``ddp_worker.py FOLDER KILL``.

Both twice: without interruption, then with saves, in the last of which the first rank kills itself, once.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse import ddp
from horovod_sparse.training import checkpoint

STEPS, EVERY = 12, 4


def made(local: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    if local:
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
        return model, optimizer, ddp.LocalSteps(optimizer, model, every=EVERY, compression="topk:density=0.1")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    return model, optimizer, ddp.attach(model, "exdyna:density=0.1", optimizer)


def trained(folder: Path, kill: int) -> tuple[list[int], list[dict[str, torch.Tensor]]]:
    """The steps that they began with, and the weights in the end; -1 for no kill and no save."""
    rank, trainings, firsts = dist.get_rank(), (made(local=True), made(local=False)), [0, 0]
    folders = [folder / name for name in ("local", "gradients")]
    restarted = kill >= 0 and (folder / "ended").exists()
    for number, (model, _, sync) in enumerate(trainings if restarted else ()):
        firsts[number] = ddp.load(folders[number], sync, model=model) * (1, EVERY)[number == 0]
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(16, 40, generator=generator)
        for number, (model, optimizer, sync) in enumerate(trainings):
            if step < firsts[number]:
                continue
            optimizer.zero_grad()
            (model(inputs) - inputs[:, :1]).square().mean().backward()
            optimizer.step()
            if kill < 0 or step < 6 or (step + 1) % EVERY:
                continue
            if step == STEPS - 1 and rank == 0 and not restarted:
                dying(folder, kill)
            ddp.save(folders[number], sync, model=model)
    return firsts, [model.state_dict() for model, *_ in trainings]


def dying(folder: Path, kill: int) -> None:
    """Kills this process in a save, where it waits for the disk for the time with this number."""
    calls, sync = iter(range(kill)), checkpoint._fsync

    def noticed(path: Path) -> None:
        if next(calls, None) is None:
            (folder / "ended").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        sync(path)

    checkpoint._fsync = noticed


def main() -> None:
    folder, kill = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if not (folder / "ended").exists():
        torch.save(trained(folder, -1), folder / f"whole-{rank}.pt")
    torch.save(trained(folder, kill), folder / f"restarted-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
