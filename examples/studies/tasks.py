"""What is trained: real data, small models, on one thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import digits
import numpy as np
import source_text
import torch
from gpt import GPT
from torch import nn
from torch.nn import functional

__all__ = ["Task", "digits_task", "gpt_task", "small_digits_task", "text_task"]

Batches = Iterator[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Task:
    """A model, its data, and how good it is.

    Attributes:
        name: for tables.
        make_model: a fresh model; the caller seeds PyTorch.
        batches: called with rank, size, number of steps and seed: as many batches of that rank.
        loss: of a model on a batch.
        score: of a model on the test data, and what the score is called.
        score_name: what `score` returns.
        momentum: of SGD.
    """

    name: str
    make_model: Callable[[], nn.Module]
    batches: Callable[[int, int, int, int], Batches]
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    score: Callable[[nn.Module], float]
    score_name: str
    momentum: float = 0.0


class DigitNet(nn.Module):
    """Two convolutions and two dense layers; `width` of the hidden layer sets the size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.dense = nn.Sequential(nn.Flatten(), nn.Linear(512, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [n, 10] of images [n, 28, 28]."""
        return self.dense(self.convolutions(images.unsqueeze(1)))


class TextNet(nn.Module):
    """An embedding, an LSTM and a dense layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(source_text.VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.dense = nn.Linear(width, source_text.VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, length, vocabulary] of the tokens that follow."""
        return self.dense(self.lstm(self.embedding(tokens))[0])


def digits_task(width: int = 1920, batch_size: int = 16) -> Task:
    """A CNN on handwritten digits: 1.0 million parameters at the default width."""
    return _digits("CNN on digits", lambda: DigitNet(width), batch_size)


def small_digits_task(width: int = 64, batch_size: int = 16) -> Task:
    """A perceptron on digits of 7 x 7 points: 3 850 parameters at the default width, made for many runs."""

    def perceptron() -> nn.Module:
        hidden = (nn.Linear(49, width), nn.ReLU(), nn.Linear(width, 10))
        return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), *hidden)

    return _digits("perceptron on small digits", perceptron, batch_size)


def _digits(name: str, make_model: Callable[[], nn.Module], batch_size: int) -> Task:
    train, test = digits.load()

    def batches(rank: int, size: int, num_steps: int, seed: int) -> Batches:
        given, epoch = 0, 1000 * seed
        while given < num_steps:
            for batch in digits.batches(train, rank, size, batch_size, epoch):
                yield batch
                given += 1
            epoch += 1

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            guesses = model(torch.from_numpy(test.images)).argmax(1)
        return float((guesses == torch.from_numpy(test.labels)).double().mean())

    return Task(
        name,
        make_model,
        batches,
        lambda model, images, labels: functional.cross_entropy(model(images), labels),
        accuracy,
        "test accuracy",
        momentum=0.9,
    )


def text_task(width: int = 340, batch_size: int = 4, length: int = 32, num_test: int = 256) -> Task:
    """An LSTM on the standard library's source: 1.0 million parameters at the default width."""
    return _text("LSTM on source text", lambda: TextNet(width), batch_size, length, num_test)


def gpt_task(
    layers: int = 4,
    width: int = 96,
    batch_size: int = 8,
    length: int = 128,
    num_test: int = 512,
    num_bytes: int = 2_000_000,
) -> Task:
    """The GPT of examples/gpt_text.py on the same text: 0.48 million parameters at the default width."""
    return _text(
        "GPT on source text", lambda: GPT(layers, width, 4, length), batch_size, length, num_test, num_bytes
    )


def _text(
    name: str,
    make_model: Callable[[], nn.Module],
    batch_size: int,
    length: int,
    num_test: int,
    num_bytes: int = 2_000_000,
) -> Task:
    train, test = source_text.load(num_bytes)
    pieces = torch.from_numpy(test[: num_test * (length + 1)]).view(num_test, length + 1)

    def loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def bits(model: nn.Module) -> float:
        with torch.no_grad():
            losses = [loss(model, some[:, :-1], some[:, 1:]) for some in pieces.split(32)]
        return float(torch.stack(losses).mean()) / math.log(2)

    def batches(rank: int, size: int, num_steps: int, seed: int) -> Batches:
        return source_text.batches(train, rank, size, batch_size, length, num_steps, seed)

    return Task(name, make_model, batches, loss, bits, "bits per character")
