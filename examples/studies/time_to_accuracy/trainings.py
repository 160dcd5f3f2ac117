"""What is trained: three models, each with its data, its optimizer, and what says how good it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import digits
import gpt
import source_text
import torch
from cifar10_resnet import augmented, load, normalized
from resnet import resnet
from torch import nn
from torch.nn import functional

from studies.tasks import DigitNet
from studies.time_to_accuracy.images import TEST_FILE, TRAIN_FILES

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Training:
    """A model, its data, and how it learns.

    Attributes:
        make_model: a fresh model; the caller seeds PyTorch.
        make_optimizer: of that model.
        batches: called with rank, size and seed: batches of that rank without end.
        loss: of a model on a batch.
        test: called with a model, rank and size: the sum of scores of this rank's share of the test data, and
            how many they are.
        num_warmup: steps in which the learning rate rises; a cosine to 0 follows.
        max_norm: to which the synchronized gradient is clipped.
    """

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batches: Callable[[int, int, int], Batches]
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    test: Callable[[nn.Module, int, int], tuple[float, int]]
    num_warmup: int = 0
    max_norm: float | None = None

    def rate_at(self, step: int, num_steps: int) -> float:
        """The learning rate of a step (from 0) by the largest one."""
        rising = min(1.0, (step + 1) / self.num_warmup) if self.num_warmup else 1.0
        return rising * 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))


def digits_training(hidden: int = 8192, batch_size: int = 32) -> Training:
    """The demo's CNN on handwritten digits, 4.3 million parameters."""
    train, test = digits.load()

    def batches(rank: int, size: int, seed: int) -> Batches:
        epoch = 1000 * seed
        while True:
            for images, labels in digits.batches(train, rank, size, batch_size, epoch):
                yield torch.from_numpy(images), torch.from_numpy(labels)
            epoch += 1

    def count(model: nn.Module, rank: int, size: int) -> tuple[float, int]:
        return _right(
            model, torch.from_numpy(test.images[rank::size]), torch.from_numpy(test.labels[rank::size])
        )

    return Training(
        lambda: DigitNet(hidden),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        batches,
        lambda model, images, labels: functional.cross_entropy(model(images), labels),
        count,
    )


def images_training(folder: Path, batch_size: int = 8, num_test: int = 500) -> Training:
    """ResNet-20 on images of CIFAR-10's shape, from files of its form: 0.27 million parameters."""
    images, labels = load(folder, TRAIN_FILES)
    test_images, test_labels = (part[:num_test] for part in load(folder, [TEST_FILE]))

    def batches(rank: int, size: int, seed: int) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(images), generator=generator)
            order = order[: len(order) // (size * batch_size) * size * batch_size]
            for chosen in order[rank::size].split(batch_size):
                yield augmented(normalized(images[chosen])), labels[chosen]

    def count(model: nn.Module, rank: int, size: int) -> tuple[float, int]:
        return _right(model, normalized(test_images[rank::size]), test_labels[rank::size])

    return Training(
        lambda: resnet("resnet20", 10),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
        batches,
        lambda model, inputs, answers: functional.cross_entropy(model(inputs), answers),
        count,
    )


def text_training(
    layers: int = 4, width: int = 128, length: int = 64, batch_size: int = 4, num_test: int = 128
) -> Training:
    """A small GPT on source text: 0.83 million parameters."""
    train, test = source_text.load()
    pieces = torch.from_numpy(test[: num_test * (length + 1)]).view(num_test, length + 1)

    def loss(model: nn.Module, inputs: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(inputs).flatten(0, 1), answers.flatten())

    def batches(rank: int, size: int, seed: int) -> Batches:
        for inputs, answers in source_text.batches(train, rank, size, batch_size, length, 10**9, seed):
            yield torch.from_numpy(inputs), torch.from_numpy(answers)

    def bits(model: nn.Module, rank: int, size: int) -> tuple[float, int]:
        mine = pieces[rank::size]
        with torch.no_grad():
            mean = float(loss(model, mine[:, :-1], mine[:, 1:])) / math.log(2)
        return mean * len(mine), len(mine)

    return Training(
        lambda: gpt.GPT(layers, width, 4, length),
        lambda model: torch.optim.AdamW(gpt.parameter_groups(model, 0.1), lr=3e-3, betas=(0.9, 0.95)),
        batches,
        loss,
        bits,
        num_warmup=30,
        max_norm=1.0,
    )


def _right(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    """How many images a model names correctly, and of how many."""
    model.eval()
    with torch.no_grad():
        found = [
            float((model(some).argmax(1) == answers).sum())
            for some, answers in zip(images.split(100), labels.split(100), strict=True)
        ]
    model.train()
    return sum(found), len(labels)
