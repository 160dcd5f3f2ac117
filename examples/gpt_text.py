"""Trains a small GPT on a text file, byte by byte, with AdamW, clipping, bfloat16 and sparse gradients.

horovodrun -np 2 python examples/gpt_text.py --text book.txt --layers 12 --width 768 --heads 12 --length 1024
horovodrun --gloo -np 2 python examples/gpt_text.py --dry-run

Without --text it reads the source of Python's standard library, which is on every machine. --dry-run takes
two steps of a tiny model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import source_text
import torch
from gpt import GPT, parameter_groups
from torch import nn
from torch.nn import functional

import horovod_sparse.torch as hvd


def arguments() -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="its last tenth is for the test")
    add("--compression", default="best:density=0.01", help="none, fp16, or NAME:ARGUMENT=VALUE,...")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--length", type=int, default=128, help="bytes of a piece of text")
    add("--batch-size", type=int, default=8, help="pieces per rank and step")
    add("--steps", type=int, default=1000)
    add("--warmup-steps", type=int, default=100, help="in which the rate rises")
    add("--learning-rate", type=float, default=3e-3)
    add("--weight-decay", type=float, default=0.1)
    add("--max-norm", type=float, default=1.0, help="clips gradients: a rank's own with best, else the mean")
    add("--no-bfloat16", dest="bfloat16", action="store_false", help="compute all products in float32")
    add("--seed", type=int, default=0)
    add("--tensorboard", type=Path, metavar="FOLDER", help="rank 0 writes curves to it")
    add("--json", type=Path, metavar="FILE", help="rank 0 writes what was measured to it")
    add("--dry-run", action="store_true", help="two steps of a tiny model")
    args = parser.parse_args()
    if args.dry_run:
        args.layers, args.width, args.heads, args.length, args.steps, args.warmup_steps = 2, 32, 2, 16, 2, 0
    return args


def texts(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes to train on, and to test with."""
    if path is None:
        return source_text.load()
    tokens = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64)
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def bits_per_byte(model: nn.Module, tokens: np.ndarray, length: int, num_pieces: int, device: str) -> float:
    """Returns how many bits the model needs for a byte of the test text."""
    pieces = torch.from_numpy(tokens[: num_pieces * length + 1])
    count = (len(pieces) - 1) // length
    inputs, targets = pieces[: count * length], pieces[1 : count * length + 1]
    with torch.no_grad():
        losses = [
            functional.cross_entropy(model(some.to(device)).flatten(0, 1), answers.flatten().to(device)).cpu()
            for some, answers in zip(
                inputs.view(-1, length).split(16), targets.view(-1, length).split(16), strict=True
            )
        ]
    return float(torch.stack(losses).mean()) / math.log(2)


def main() -> None:
    """Trains; rank 0 prints the result."""
    args = arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    device = f"cuda:{hvd.local_rank()}" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    train, test = texts(args.text)
    model = GPT(args.layers, args.width, args.heads, args.length).to(device)
    dense = args.compression in ("none", "fp16")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(
            parameter_groups(model.parameters(), args.weight_decay), lr=args.learning_rate, betas=(0.9, 0.95)
        ),
        named_parameters=model.named_parameters(),
        compression=args.compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    writer = None
    if args.tensorboard and hvd.rank() == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(args.tensorboard))

    stream = source_text.batches(
        train, hvd.rank(), hvd.size(), args.batch_size, args.length, args.steps, args.seed
    )
    started, curve, loss = time.perf_counter(), [], torch.zeros(())
    for step, (inputs, targets) in enumerate(stream):
        rising = min(1.0, (step + 1) / args.warmup_steps) if args.warmup_steps else 1.0
        # to 0: what ranks still hold back in the end is then worth little
        rate = args.learning_rate * rising * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=args.bfloat16):
            logits = model(torch.from_numpy(inputs).to(device))
        loss = functional.cross_entropy(
            logits.float().flatten(0, 1), torch.from_numpy(targets).flatten().to(device)
        )
        loss.backward()
        optimizer.synchronize()  # gradients are then means over ranks; with best it does nothing
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        with optimizer.skip_synchronize():
            optimizer.step()
        if step % 20 == 0 or step == args.steps - 1:
            curve.append([step, round(float(loss.detach()) / math.log(2), 4)])
            if writer is not None:
                told = {} if dense else optimizer.telemetry.scalars()
                told |= {"bits_per_byte": curve[-1][1], "rate": rate, "norm": float(norm)}
                for name, value in told.items():
                    writer.add_scalar(name, value, step)
            if hvd.rank() == 0 and step % 100 == 0:
                print(f"step {step}: {curve[-1][1]:.3f} bits per byte")

    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    result = {
        "compression": args.compression,
        "bits_per_byte": bits_per_byte(model, test, args.length, 8 if args.dry_run else 512, device),
        "final_loss": float(loss.detach()),
        "curve": curve,
        "num_parameters": num_parameters,
        "size": hvd.size(),
        "steps": args.steps,
        "seconds": time.perf_counter() - started,
        "bytes_per_step": 4 * num_parameters,
    }
    mean = None if dense else optimizer.telemetry.mean
    if mean is not None:
        result |= {"bytes_per_step": mean.bytes_sent, "density_union": mean.density_union}
    if hvd.rank() == 0:
        print(f"{result['bits_per_byte']:.3f} bits per byte of the test text")
        if mean is not None:
            print(optimizer.telemetry.summary())
        if writer is not None:
            writer.close()
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
