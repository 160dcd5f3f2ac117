"""Trains a small CNN on real handwritten digits with sparsified gradients.

horovodrun --gloo -np 2 python examples/pytorch_mnist.py --compression exdyna --density 0.01
mpirun -np 2 python examples/pytorch_mnist.py --compression topk:density=0.01
horovodrun --gloo -np 2 python examples/pytorch_mnist.py --compression none
horovodrun --gloo -np 2 python examples/pytorch_mnist.py --merging optimal --tensor-selection cost
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import digits
import horovod.torch as stock
import torch
from rich.progress import track
from torch import nn
from torch.nn import functional

import horovod_sparse.torch as hvd


class Net(nn.Module):
    """Two convolutions and two dense layers: 180 000 parameters, most of them before the hidden units."""

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
        "--compression", default="exdyna", help="none, fp16, or a sparsifier: NAME or NAME:ARGUMENT=VALUE,..."
    )
    parser.add_argument("--density", type=float, help="kept fraction of the gradient, in (0, 1]")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument(
        "--schedule",
        choices=("cosine", "restarts"),
        default="cosine",
        help="of the learning rate: to 0 once, or four times from its start",
    )
    parser.add_argument(
        "--warmup-epochs", type=float, default=1.0, help="in which the density falls from 0.25 to its own"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--merging",
        choices=("layerwise", "single", "omgs", "optimal"),
        help="which parameters are sparsified together (default: buckets of 32 MiB); the last two go by "
        "times, which are measured before",
    )
    parser.add_argument(
        "--tensor-selection",
        choices=("cost", "all"),
        help="which parameters are sparsified at all: all of them, or those where it pays",
    )
    parser.add_argument("--profile", type=Path, metavar="FILE", help="measurements to plan by")
    parser.add_argument(
        "--levels",
        choices=("flat", "host"),
        default="flat",
        help="host: sums gradients densely within each host first (docs/merging.md)",
    )
    parser.add_argument(
        "--stock", action="store_true", help="use Horovod's own DistributedOptimizer with our compression="
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="rank 0 writes what was measured to this file"
    )
    args = parser.parse_args()
    if args.stock and (args.merging or args.tensor_selection or args.profile or args.levels != "flat"):
        parser.error("--stock makes no buckets: leave --merging, --tensor-selection, --profile, --levels out")
    return args


def compression(args: argparse.Namespace, steps_per_epoch: int) -> Any:
    """Returns the compression that the command line chooses."""
    text = args.compression
    if text in ("none", "fp16"):
        return hvd.Compression.parse(text)
    arguments = []
    if args.density is not None:
        arguments.append(f"density={args.density}")
    if args.warmup_epochs > 0 and "schedule=" not in text:
        # the first steps change every weight, and a sparse sum reaches few of them
        arguments.append(f"schedule=exponential(steps={round(args.warmup_epochs * steps_per_epoch)})")
    joint = "," if ":" in text else ":"
    return hvd.Compression.parse(text + (joint + ",".join(arguments) if arguments else ""))


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
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, test = digits.load()
    model = Net()
    rate = args.learning_rate * hvd.size()
    inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=args.momentum)
    if args.optimizer == "adam":
        inner = torch.optim.Adam(model.parameters(), lr=rate)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    steps = digits.steps_per_epoch(train, hvd.size(), args.batch_size)
    make_optimizer = stock.DistributedOptimizer if args.stock else hvd.DistributedOptimizer
    chosen = compression(args, steps)
    planning = {"merging": args.merging, "tensor_selection": args.tensor_selection, "profile": args.profile}
    planning["levels"] = None if args.levels == "flat" else args.levels
    if (args.merging in ("omgs", "optimal") or args.tensor_selection == "cost") and not args.profile:
        images, labels = map(torch.from_numpy, next(digits.batches(train, 0, 1, args.batch_size, 0)))

        def loss_of_first() -> torch.Tensor:
            return functional.cross_entropy(model(images.unsqueeze(1)), labels)

        planning["profile"] = hvd.measured_profile(loss_of_first, model.named_parameters(), chosen)
    optimizer = make_optimizer(
        inner,
        named_parameters=model.named_parameters(),
        compression=chosen,
        **{name: value for name, value in planning.items() if value is not None},
    )
    # towards 0: what ranks still hold back in the end is then worth little, too
    falls = 4 if args.schedule == "restarts" else 1
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, -(-args.epochs * steps // falls)
    )

    started, step_seconds = time.perf_counter(), []
    for epoch in track(range(args.epochs), description=args.compression, disable=hvd.rank() != 0):
        for images, labels in digits.batches(train, hvd.rank(), hvd.size(), args.batch_size, epoch):
            step_started = time.perf_counter()
            optimizer.zero_grad()
            loss = functional.cross_entropy(
                model(torch.from_numpy(images).unsqueeze(1)), torch.from_numpy(labels)
            )
            loss.backward()
            optimizer.step()
            schedule.step()
            step_seconds.append(time.perf_counter() - step_started)

    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    result = {
        "compression": args.compression,
        "accuracy": accuracy(model, test),
        "final_loss": float(loss.detach()),
        "num_parameters": num_parameters,
        "size": hvd.size(),
        "steps": args.epochs * steps,
        "seconds": time.perf_counter() - started,
        "step_seconds": sum(step_seconds) / len(step_seconds),
        # what dense Horovod puts into its allreduce; telemetry replaces it where we sent the gradient
        "bytes_per_step": num_parameters * (2 if args.compression == "fp16" else 4),
    }
    # Horovod's own optimizer without a sparsifier has none
    telemetry = getattr(optimizer, "telemetry", None)
    mean = None if telemetry is None else telemetry.mean
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
    if hvd.rank() == 0:
        print(
            f"test accuracy {result['accuracy']:.1%}, "
            f"{result['bytes_per_step']:,.0f} bytes of gradient per step and rank"
        )
        if telemetry is not None and mean is not None:
            print(telemetry.summary())
        if (decision := getattr(optimizer, "decision", None)) is not None:
            print(decision)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
