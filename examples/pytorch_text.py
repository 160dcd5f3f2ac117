"""Trains an LSTM on the source of the Python standard library, character by character.

horovodrun --gloo -np 2 python examples/pytorch_text.py --compression exdyna --density 0.01
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import source_text
import torch
from rich.progress import track
from torch import nn
from torch.nn import functional

import horovod_sparse.torch as hvd


class Net(nn.Module):
    """An embedding, an LSTM and a dense layer."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(source_text.VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.dense = nn.Linear(width, source_text.VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, length, vocabulary] of the tokens that follow."""
        return self.dense(self.lstm(self.embedding(tokens))[0])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", default="exdyna", help="none, fp16, or NAME:ARGUMENT=VALUE,...")
    parser.add_argument("--density", type=float, help="kept fraction of the gradient, in (0, 1]")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16, help="pieces of text per rank and step")
    parser.add_argument("--length", type=int, default=64, help="characters of a piece")
    parser.add_argument("--learning-rate", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="rank 0 writes what was measured to this file"
    )
    return parser.parse_args()


def bits_per_character(model: nn.Module, tokens: torch.Tensor, length: int) -> float:
    """How many bits the model needs for a character of the test text."""
    pieces = tokens[: (len(tokens) - 1) // length * length + 1]
    inputs, targets = pieces[:-1].view(-1, length), pieces[1:].view(-1, length)
    with torch.no_grad():
        losses = [
            functional.cross_entropy(model(batch).flatten(0, 1), target.flatten())
            for batch, target in zip(inputs[:512].split(64), targets[:512].split(64), strict=True)
        ]
    return float(torch.stack(losses).mean()) / math.log(2)


def main() -> None:
    """Trains, and prints what came of it on rank 0."""
    args = arguments()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, test = source_text.load()
    model = Net()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    text = args.compression
    if args.density is not None and text not in ("none", "fp16"):
        text += f"{',' if ':' in text else ':'}density={args.density}"
    # unless it is asked for, a network that is too small to win stays dense
    asked = {} if text in ("none", "fp16") else {"tensor_selection": "all"}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.learning_rate),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.parse(text),
        **asked,
    )
    stream = source_text.batches(
        train, hvd.rank(), hvd.size(), args.batch_size, args.length, args.steps, args.seed
    )
    started = time.perf_counter()
    for inputs, targets in track(stream, total=args.steps, description=text, disable=hvd.rank() != 0):
        optimizer.zero_grad()
        logits = model(torch.from_numpy(inputs))
        loss = functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())
        loss.backward()
        optimizer.step()

    result = {
        "compression": text,
        "bits_per_character": bits_per_character(model, torch.from_numpy(test), args.length),
        "final_loss": float(loss.detach()),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "size": hvd.size(),
        "steps": args.steps,
        "seconds": time.perf_counter() - started,
    }
    mean = optimizer.telemetry.mean
    if mean is not None:  # dense training has nothing to tell
        result |= {"bytes_per_step": mean.bytes_sent, "density_union": mean.density_union}
    if hvd.rank() == 0:
        print(f"{result['bits_per_character']:.3f} bits per character of the test text")
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
