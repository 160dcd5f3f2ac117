"""Trains a ResNet on CIFAR-10 with Horovod and sparse gradients.

horovodrun -np 2 python examples/cifar10_resnet.py --data cifar-10-batches-py
horovodrun --gloo -np 2 python examples/cifar10_resnet.py --dry-run

--data is the folder of the data set's "python version", unpacked; --dry-run makes random images instead and
takes two steps of a narrow network. With --checkpoint FOLDER every epoch is saved, and a second start goes on
from the last.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from resnet import KINDS, resnet
from torch.nn import functional

import horovod_sparse.torch as hvd

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def arguments() -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="cifar-10-batches-py")
    add("--model", choices=[kind for kind in KINDS if KINDS[kind][3]], default="resnet20")
    add("--compression", default="best:density=0.01", help="none, fp16, or NAME:ARGUMENT=VALUE,...")
    add("--warmup-epochs", type=float, default=4.0, help="in which the density falls to its own")
    add("--epochs", type=int, default=100)
    add("--batch-size", type=int, default=128, help="images per rank and step")
    add("--learning-rate", type=float, default=0.1, help="for 128 images in all; grows with their number")
    add("--checkpoint", type=Path, metavar="FOLDER")
    add("--tensorboard", type=Path, metavar="FOLDER", help="rank 0 writes curves to it")
    add("--json", type=Path, metavar="FILE", help="rank 0 writes what was measured to it")
    add("--dry-run", action="store_true", help="two steps on random images")
    args = parser.parse_args()
    if args.data is None and not args.dry_run:
        parser.error("--data FOLDER, or --dry-run")
    return args


def load(folder: Path, files: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Loads images, uint8 [n, 3, 32, 32], and labels, int64 [n], from pickle files: trust their source."""
    parts = [pickle.loads((folder / name).read_bytes(), encoding="bytes") for name in files]
    images = torch.cat([torch.from_numpy(part[b"data"]).view(-1, 3, 32, 32) for part in parts])
    return images, torch.tensor([label for part in parts for label in part[b"labels"]])


def made_up(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `count` images of noise, with labels."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, torch.randint(10, (count,), generator=generator)


def normalized(images: torch.Tensor) -> torch.Tensor:
    """Returns the images as floats, normalized by the data set's mean and deviation."""
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
    return (images.float() / 255 - mean) / deviation


def augmented(images: torch.Tensor) -> torch.Tensor:
    """Returns the images moved by up to 4 pixels, half of them mirrored."""
    padded = functional.pad(images, (4, 4, 4, 4))
    down, right = torch.randint(9, (2,)).tolist()
    moved = padded[:, :, down : down + 32, right : right + 32]
    mirror = torch.rand(len(images)) < 0.5
    return torch.where(mirror.view(-1, 1, 1, 1), moved.flip(3), moved)


def batches(
    images: torch.Tensor, labels: torch.Tensor, batch_size: int, epoch: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields this rank's share of an epoch; every rank has equally many batches."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    order = order[: len(order) // (hvd.size() * batch_size) * hvd.size() * batch_size]
    for indices in order[hvd.rank() :: hvd.size()].split(batch_size):
        yield augmented(normalized(images[indices])), labels[indices]


def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, device: str) -> float:
    """Returns the share of the images that the model classifies correctly."""
    model.eval()
    with torch.no_grad():
        right = [
            (model(normalized(some).to(device)).argmax(1).cpu() == answers).sum()
            for some, answers in zip(images.split(500), labels.split(500), strict=True)
        ]
    model.train()
    return float(torch.stack(right).sum()) / len(images)


def main() -> None:
    """Trains; rank 0 prints the result."""
    args = arguments()
    hvd.init()
    torch.manual_seed(0)
    device = f"cuda:{hvd.local_rank()}" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if args.dry_run:
        args.epochs, args.batch_size, args.warmup_epochs = 1, 8, 0.0
        train, test = made_up(2 * 8 * hvd.size()), made_up(16)
    else:
        train = load(args.data, [f"data_batch_{number}" for number in range(1, 6)])
        test = load(args.data, ["test_batch"])
    model = resnet(args.model, 10, width=8 if args.dry_run else None).to(device)

    steps_per_epoch = len(train[0]) // (hvd.size() * args.batch_size)
    compression = args.compression
    if args.warmup_epochs > 0 and compression not in ("none", "fp16") and "schedule=" not in compression:
        steps = round(args.warmup_epochs * steps_per_epoch)
        compression += f"{',' if ':' in compression else ':'}schedule=exponential(steps={steps})"
    rate = args.learning_rate * hvd.size() * args.batch_size / 128
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    first = 0
    if args.checkpoint and args.checkpoint.exists():
        first = hvd.load(args.checkpoint, optimizer, model=model) // steps_per_epoch
    writer = None
    if args.tensorboard and hvd.rank() == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(args.tensorboard))

    started, loss = time.perf_counter(), torch.zeros(())
    for epoch in range(first, args.epochs):
        for number, (images, labels) in enumerate(batches(*train, args.batch_size, epoch)):
            step = epoch * steps_per_epoch + number
            # to 0: what ranks still hold back in the end is then worth little
            share = 0.5 * (1 + math.cos(math.pi * step / (args.epochs * steps_per_epoch)))
            optimizer.param_groups[0]["lr"] = rate * share
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            if writer is not None and (step % 20 == 0 or args.dry_run):
                writer.add_scalar("loss", float(loss.detach()), step)
                for name, value in optimizer.telemetry.scalars().items():
                    writer.add_scalar(name, value, step)
        if args.checkpoint:
            hvd.save(args.checkpoint, optimizer, model=model)
        if hvd.rank() == 0:
            found = accuracy(model, *test, device)
            print(f"epoch {epoch + 1}: loss {float(loss.detach()):.3f}, test {found:.1%}")

    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    mean = optimizer.telemetry.mean if compression not in ("none", "fp16") else None
    result = {
        "compression": compression,
        "accuracy": accuracy(model, *test, device),
        "final_loss": float(loss.detach()),
        "num_parameters": num_parameters,
        "size": hvd.size(),
        "steps": args.epochs * steps_per_epoch,
        "seconds": time.perf_counter() - started,
        "bytes_per_step": 4 * num_parameters if mean is None else mean.bytes_sent,
    }
    if hvd.rank() == 0:
        if mean is not None:
            print(optimizer.telemetry.summary())
        if writer is not None:
            writer.close()
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
