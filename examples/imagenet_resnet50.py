"""Trains ResNet-50 on a folder of images with DistributedDataParallel and sparse gradients, without Horovod.

torchrun --nproc-per-node 4 examples/imagenet_resnet50.py --data imagenet
torchrun --nproc-per-node 2 examples/imagenet_resnet50.py --dry-run

--data has train/CLASS/*.JPEG and val/CLASS/*.JPEG, as ImageNet has them; pillow reads them. --dry-run writes
a few images of noise, reads those, and takes two steps of a narrow network.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from resnet import resnet
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import horovod_sparse.ddp

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Folder(Dataset[tuple[torch.Tensor, int]]):
    """Images in a folder per class: [3, side, side] and the class's number, in the order of their names."""

    def __init__(self, root: Path, side: int, augment: bool) -> None:
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.files = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((root / name).iterdir())
        ]
        self.side, self.augment = side, augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, number = self.files[index]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        box = _random_box(*image.size) if self.augment else _middle(*image.size)
        pixels = np.asarray(image.resize((self.side, self.side), Image.Resampling.BILINEAR, box=box))
        if self.augment and random.random() < 0.5:
            pixels = pixels[:, ::-1]
        scaled = (pixels.astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(DEVIATION)
        return torch.from_numpy(scaled.transpose(2, 0, 1).copy()), number


def _random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Returns a random box of 8 % to 100 % of the image, with an aspect ratio from 3 / 4 to 4 / 3."""
    area = random.uniform(0.08, 1.0) * width * height
    ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    wide, high = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = random.uniform(0, width - wide), random.uniform(0, height - high)
    return left, top, left + wide, top + high


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    """Returns the middle square, seven eighths of the shorter side."""
    side = 0.875 * min(width, height)
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


def write_noise(root: Path) -> None:
    """Writes a small data set of noise, of the same form as ImageNet."""
    generator = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for number in range(8):
                pixels = generator.integers(256, size=(40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{number}.jpeg")


def arguments() -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="with train/ and val/")
    add("--compression", default="best:density=0.01", help="none, or NAME:ARGUMENT=VALUE,...")
    add("--warmup-epochs", type=float, default=4.0, help="in which the density falls, and the rate rises")
    add("--epochs", type=int, default=90)
    add("--batch-size", type=int, default=64, help="images per rank and step")
    add("--learning-rate", type=float, default=0.1, help="for 256 images in all; grows with their number")
    add("--workers", type=int, default=4, help="processes that read images, per rank")
    add("--tensorboard", type=Path, metavar="FOLDER", help="rank 0 writes curves to it")
    add("--json", type=Path, metavar="FILE", help="rank 0 writes what was measured to it")
    add("--dry-run", action="store_true", help="two steps on images of noise")
    args = parser.parse_args()
    if args.data is None and not args.dry_run:
        parser.error("--data FOLDER, or --dry-run")
    return args


def accuracy(model: torch.nn.Module, loader: DataLoader[tuple[torch.Tensor, int]], device: str) -> float:
    """Returns the share of all ranks' images that the model classifies correctly."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    with torch.no_grad():
        for images, labels in loader:
            right = (model(images.to(device)).argmax(1).cpu() == labels).sum()
            counts += torch.tensor([float(right), len(labels)], device=device)
    dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1])


def main() -> None:
    """Trains; rank 0 prints the result."""
    args = arguments()
    if "RANK" not in os.environ:  # horovodrun and mpirun do not set what init_process_group reads
        sys.exit("start it by torchrun, as in torchrun --nproc-per-node 2 examples/imagenet_resnet50.py")
    cuda = torch.cuda.is_available()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    random.seed(rank)
    side, width = 224, None
    if args.dry_run:
        side, width, args.epochs, args.batch_size, args.workers = 32, 8, 1, 8 // size or 1, 0
        args.warmup_epochs = 0.0
        folder = tempfile.TemporaryDirectory()
        args.data = Path(folder.name)
        write_noise(args.data)
    train, test = (Folder(args.data / part, side, part == "train") for part in ("train", "val"))
    sampler: DistributedSampler[tuple[torch.Tensor, int]] = DistributedSampler(train, drop_last=True)
    loader = DataLoader(
        train, args.batch_size, sampler=sampler, num_workers=args.workers, pin_memory=cuda, drop_last=True
    )
    test_loader = DataLoader(
        test, args.batch_size, sampler=DistributedSampler(test, shuffle=False), num_workers=args.workers
    )

    net = resnet("resnet50", len(train.classes), width).to(device)
    model = DistributedDataParallel(net)
    rate = args.learning_rate * size * args.batch_size / 256
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    warmup = round(args.warmup_epochs * len(loader))
    compression, sync = args.compression, None
    if compression != "none":
        if warmup and "schedule=" not in compression:
            compression += f"{',' if ':' in compression else ':'}schedule=exponential(steps={warmup})"
        sync = horovod_sparse.ddp.attach(model, compression, optimizer=optimizer)
    writer = None
    if args.tensorboard and rank == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(args.tensorboard))

    started, loss, step, steps = time.perf_counter(), torch.zeros(()), 0, args.epochs * len(loader)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            rising = min(1.0, (step + 1) / warmup) if warmup else 1.0
            optimizer.param_groups[0]["lr"] = rate * rising * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.zero_grad()
            # on a GPU products are computed in bfloat16, gradients stay float32
            with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=cuda):
                loss = functional.cross_entropy(
                    model(images.to(device, non_blocking=True)), labels.to(device), label_smoothing=0.1
                )
            loss.backward()
            optimizer.step()
            if writer is not None and (step % 20 == 0 or args.dry_run):
                writer.add_scalar("loss", float(loss.detach()), step)
                for name, value in ({} if sync is None else sync.telemetry.scalars()).items():
                    writer.add_scalar(name, value, step)
            step += 1
        found = accuracy(net, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {float(loss.detach()):.3f}, validation {found:.1%}")

    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    mean = None if sync is None else sync.telemetry.mean
    result = {
        "compression": compression,
        "accuracy": accuracy(net, test_loader, device),
        "final_loss": float(loss.detach()),
        "num_parameters": num_parameters,
        "size": size,
        "steps": steps,
        "seconds": time.perf_counter() - started,
        "bytes_per_step": 4 * num_parameters if mean is None else mean.bytes_sent,
    }
    if rank == 0:
        if sync is not None:
            print(sync.telemetry.summary())
        if writer is not None:
            writer.close()
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
