"""What both TensorFlow examples share: the command line of `pytorch_mnist.py`, the model, and the report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import digits
import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow as hvd


def arguments(
    description: str | None, *, compression: str = "exdyna", has_stock: bool = False
) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compression",
        default=compression,
        help="none, fp16, or a sparsifier: NAME or NAME:ARGUMENT=VALUE,... (default: %(default)s)",
    )
    parser.add_argument("--density", type=float, help="kept fraction of the gradient, in (0, 1]")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    if has_stock:
        parser.add_argument(
            "--stock", action="store_true", help="use Horovod's own tape with our compression="
        )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="rank 0 writes what was measured to this file"
    )
    return parser.parse_args()


def compression(args: argparse.Namespace) -> Any:
    """Returns the compression that the command line chooses."""
    text = args.compression
    if args.density is not None and text not in ("none", "fp16"):
        text += f"{',' if ':' in text else ':'}density={args.density}"
    return hvd.Compression.parse(text)


def prepare(seed: int) -> None:
    """Sets one thread per rank for arithmetic, and the random seed."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.keras.utils.set_random_seed(seed)


def make_model() -> tf.keras.Model:
    """A CNN of two convolutions and two dense layers, 180 000 parameters."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(16, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(320, activation="relu"),
            layers.Dense(10),
        ]
    )


def endless_batches(
    train: digits.Digits, rank: int, size: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields this rank's batches, epoch after epoch, for `fit`."""
    epoch = 0
    while True:
        for images, labels in digits.batches(train, rank, size, batch_size, epoch):
            yield images[..., None], labels
        epoch += 1


def report(
    args: argparse.Namespace,
    model: tf.keras.Model,
    test: digits.Digits,
    *,
    final_loss: float,
    seconds: float,
    step_seconds: list[float],
    telemetry: Any,
) -> None:
    """Prints the training's result on rank 0, and writes it to a file if one was given."""
    guesses = model.predict(test.images[..., None], batch_size=250, verbose=0).argmax(1)
    num_parameters = model.count_params()
    result = {
        "compression": args.compression,
        "accuracy": float((guesses == test.labels).mean()),
        "final_loss": float(final_loss),
        "num_parameters": num_parameters,
        "size": hvd.size(),
        "steps": len(step_seconds),
        "seconds": seconds,
        "step_seconds": sum(step_seconds) / len(step_seconds),
        # what dense Horovod puts into its allreduce; telemetry replaces it where we sent the gradient
        "bytes_per_step": num_parameters * (2 if args.compression == "fp16" else 4),
    }
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
        if mean is not None:
            print(telemetry.summary())
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    hvd.shutdown()
