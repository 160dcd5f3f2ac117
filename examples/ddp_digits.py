"""Trains a small CNN on real handwritten digits with PyTorch's DistributedDataParallel, gradients sparsified.

torchrun --nproc-per-node 2 examples/ddp_digits.py --compression exdyna --density 0.01
torchrun --nproc-per-node 2 examples/ddp_digits.py --compression topk:density=0.01
torchrun --nproc-per-node 2 examples/ddp_digits.py --compression none
torchrun --nproc-per-node 2 examples/ddp_digits.py --compression powersgd:rank=4

With --checkpoint FOLDER every epoch is saved; started again (torchrun --max-restarts), it goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import digits
import torch
import torch.distributed as dist
from rich.progress import track
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse.ddp


class Net(nn.Module):
    """A CNN of two convolutions and two dense layers, 180 000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(1, 16, 5)
        self.convolution2 = nn.Conv2d(16, 32, 5)
        self.dense1 = nn.Linear(512, 320)
        self.dense2 = nn.Linear(320, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits [n, 10] of images [n, 1, 28, 28]."""
        x = functional.max_pool2d(functional.relu(self.convolution1(images)), 2)
        x = functional.max_pool2d(functional.relu(self.convolution2(x)), 2)
        return self.dense2(functional.relu(self.dense1(x.flatten(1))))


def arguments() -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compression",
        default="exdyna",
        help="none, powersgd:rank=R, or a sparsifier: NAME or NAME:ARGUMENT=VALUE,...",
    )
    parser.add_argument("--density", type=float, help="kept fraction of the gradient, in (0, 1]")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument(
        "--warmup-epochs",
        type=float,
        default=1.0,
        help="in which the density falls from 0.25 to its own; PowerSGD is dense in them",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="one file per rank goes there")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="rank 0 writes what was measured to this file"
    )
    return parser.parse_args()


def compression(args: argparse.Namespace, steps_per_epoch: int) -> str:
    """Returns the sparsifier that the command line chooses."""
    arguments = []
    if args.density is not None:
        arguments.append(f"density={args.density}")
    if args.warmup_epochs > 0 and "schedule=" not in args.compression:
        # the first steps change every weight, and a sparse sum reaches few of them
        arguments.append(f"schedule=exponential(steps={round(args.warmup_epochs * steps_per_epoch)})")
    joint = "," if ":" in args.compression else ":"
    return args.compression + (joint + ",".join(arguments) if arguments else "")


def power_sgd(args: argparse.Namespace, steps_per_epoch: int) -> PowerSGDState:
    """Returns the state of PyTorch's own compression: defaults, but for its rank and first step.

    That is 1000 by default, and this training shorter; 2 is the least.
    """
    rank = int(args.compression.partition("rank=")[2] or 1)
    begin = max(2, round(args.warmup_epochs * steps_per_epoch))
    return PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=begin)


def accuracy(model: nn.Module, test: digits.Digits) -> float:
    """Returns the share of the test images that the model reads correctly."""
    model.eval()
    with torch.no_grad():
        guesses = model(torch.from_numpy(test.images).unsqueeze(1)).argmax(1)
    model.train()
    return float((guesses == torch.from_numpy(test.labels)).float().mean())


def main() -> None:
    """Trains; rank 0 prints the result."""
    args = arguments()
    if "RANK" not in os.environ:  # horovodrun and mpirun do not set what init_process_group reads
        sys.exit("start it by torchrun, as in torchrun --nproc-per-node 2 examples/ddp_digits.py")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, test = digits.load()
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.learning_rate * size, momentum=args.momentum)
    steps = digits.steps_per_epoch(train, size, args.batch_size)
    sync = power = None
    if args.compression.startswith("powersgd"):
        power = power_sgd(args, steps)
        model.register_comm_hook(power, powerSGD_hook)
    elif args.compression != "none":
        sync = horovod_sparse.ddp.attach(model, compression(args, steps), optimizer=optimizer)
    # towards 0: what ranks still hold back in the end is then worth little, too
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * steps)

    first = 0
    if args.checkpoint and (file := args.checkpoint / f"rank-{rank}.pt").exists():
        saved = torch.load(file, weights_only=True)
        first = saved["epochs"]
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        if sync is not None:
            sync.load_state_dict(saved["residuals"])

    started, step_seconds = time.perf_counter(), []
    loss = torch.zeros(())
    for epoch in track(range(first, args.epochs), description=args.compression, disable=rank != 0):
        for images, labels in digits.batches(train, rank, size, args.batch_size, epoch):
            step_started = time.perf_counter()
            optimizer.zero_grad()
            loss = functional.cross_entropy(
                model(torch.from_numpy(images).unsqueeze(1)), torch.from_numpy(labels)
            )
            loss.backward()
            optimizer.step()
            schedule.step()
            step_seconds.append(time.perf_counter() - step_started)
        if args.checkpoint:
            args.checkpoint.mkdir(parents=True, exist_ok=True)
            state = {
                "epochs": epoch + 1,
                "model": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "residuals": None if sync is None else sync.state_dict(),
            }
            torch.save(state, args.checkpoint / f"rank-{rank}.new")
            dist.barrier()  # all ranks have written this epoch, or all go on from the one before
            os.replace(args.checkpoint / f"rank-{rank}.new", args.checkpoint / f"rank-{rank}.pt")

    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    result = {
        "compression": args.compression,
        "accuracy": accuracy(net, test),
        "final_loss": float(loss.detach()),
        "num_parameters": num_parameters,
        "size": size,
        "steps": args.epochs * steps,
        "seconds": time.perf_counter() - started,
        "step_seconds": sum(step_seconds) / max(1, len(step_seconds)),
        # what dense training puts into its allreduce
        "bytes_per_step": num_parameters * 4,
    }
    if power is not None:  # dense at first; then two factors of every matrix, and what is none whole
        num_dense = num_parameters * min(power.start_powerSGD_iter, args.epochs * steps)
        num_sent = num_dense + power.total_numel_after_compression
        result["bytes_per_step"] = num_sent * 4 / (args.epochs * steps)
    mean = None if sync is None else sync.telemetry.mean
    if mean is not None:
        result |= {
            "bytes_per_step": mean.bytes_sent,
            "density_asked": mean.density_target,
            "density_union": mean.density_union,
            "fold_seconds": mean.fold_seconds,
            "select_seconds": mean.select_seconds,
            "wait_seconds": mean.wait_seconds,
            "apply_seconds": mean.apply_seconds,
        }
    if rank == 0:
        print(
            f"test accuracy {result['accuracy']:.1%}, "
            f"{result['bytes_per_step']:,.0f} bytes of gradient per step and rank"
        )
        if sync is not None:
            print(sync.telemetry.summary())
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
