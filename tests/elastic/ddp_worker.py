"""A rank that trains by a hook of DistributedDataParallel and by local steps: ``ddp_worker.py FOLDER``.

Both twice: without interruption, then saving every second step; rank 1 ends itself before the last one, once.
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

STEPS = 12


def made(local: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    if local:
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
        return model, optimizer, ddp.LocalSteps(optimizer, model, every=4, compression="topk:density=0.1")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    return model, optimizer, ddp.attach(model, "exdyna:density=0.1", optimizer)


def trained(folder: Path, interrupted: bool) -> tuple[int, list[dict[str, torch.Tensor]]]:
    """The step that it began with, and the weights in the end."""
    rank = dist.get_rank()
    trainings = made(local=False), made(local=True)
    file, first = folder / f"rank-{rank}.pt", 0
    if interrupted and file.exists():
        saved = torch.load(file, weights_only=True)
        first = saved["step"]
        for items, states in zip(trainings, saved["states"], strict=True):
            for item, state in zip(items, states, strict=True):
                item.load_state_dict(state)
    for step in range(first, STEPS):
        if interrupted and step == STEPS - 1 and rank == 1 and not (folder / "ended").exists():
            (folder / "ended").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(16, 40, generator=generator)
        for model, optimizer, _ in trainings:
            optimizer.zero_grad()
            (model(inputs) - inputs[:, :1]).square().mean().backward()
            optimizer.step()
        if interrupted and step % 2 and step > 6:
            states = [[item.state_dict() for item in items] for items in trainings]
            torch.save({"step": step + 1, "states": states}, folder / f"{rank}.new")
            dist.barrier()
            os.replace(folder / f"{rank}.new", file)
            dist.barrier()
    return first, [model.state_dict() for model, _, _ in trainings]


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
