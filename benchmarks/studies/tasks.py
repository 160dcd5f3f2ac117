"""Models and their data: real data, small models, one thread."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import digits
import numpy as np
import source_text
import torch
from gpt import GPT, VOCABULARY
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

__all__ = ["DigitNet", "Task", "adapters_task", "digits_task", "gpt_task", "text_task"]

Batch = tuple[torch.Tensor, torch.Tensor]
#: tokens to train on, and to test with
Text = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Task:
    """A model, its data, and its score.

    Attributes:
        make_model: a fresh model; the caller seeds PyTorch.
        batches: called with rank, size, number of steps and seed: as many batches of that rank.
        loss: of a model on a batch.
        test: called with a model, rank and size: the sum of scores over this rank's share of the test data,
            and the length of that share.
        momentum: of SGD.
    """

    make_model: Callable[[], nn.Module]
    batches: Callable[[int, int, int, int], Iterator[Batch]]
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    test: Callable[[nn.Module, int, int], tuple[float, int]]
    momentum: float = 0.0

    def score(self, model: nn.Module) -> float:
        """Returns the mean score over all test data."""
        total, count = self.test(model, 0, 1)
        return total / count


class DigitNet(nn.Module):
    """Two convolutions and two dense layers; `width` of the hidden layer sets the size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.dense = nn.Sequential(nn.Flatten(), nn.Linear(512, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.dense(self.convolutions(images.unsqueeze(1)))


class TextNet(nn.Module):
    """An embedding, an LSTM and a dense layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(source_text.VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.dense = nn.Linear(width, source_text.VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.dense(self.lstm(self.embedding(tokens))[0])


class Adapter(nn.Module):
    """Adds a trained product of two matrices of rank 4, which begins at 0, to a frozen weight (LoRA)."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        height, width = weight.shape
        self.up = nn.Parameter(torch.zeros(height, 4))
        self.down = nn.Parameter(torch.randn(4, width) / math.sqrt(width))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


def digits_task(width: int = 1920, batch_size: int = 16) -> Task:
    """Returns a CNN on handwritten digits: 1.0 million parameters at the default width."""
    train, test = digits.load()

    def batches(rank: int, size: int, num_steps: int, seed: int) -> Iterator[Batch]:
        epochs = (
            digits.batches(train, rank, size, batch_size, epoch) for epoch in itertools.count(1000 * seed)
        )
        for images, labels in itertools.islice(itertools.chain.from_iterable(epochs), num_steps):
            yield torch.from_numpy(images), torch.from_numpy(labels)

    images, labels = torch.from_numpy(test.images), torch.from_numpy(test.labels)

    def right(model: nn.Module, rank: int, size: int) -> tuple[float, int]:
        own = images[rank::size], labels[rank::size]
        model.eval()
        with torch.no_grad():
            pairs = zip(*(part.split(100) for part in own), strict=True)
            found = [float((model(some).argmax(1) == answers).sum()) for some, answers in pairs]
        model.train()
        return sum(found), len(own[1])

    return Task(
        lambda: DigitNet(width),
        batches,
        lambda model, inputs, answers: functional.cross_entropy(model(inputs), answers),
        right,
        momentum=0.9,
    )


def text_task(width: int = 340, batch_size: int = 4, length: int = 32, num_test: int = 256) -> Task:
    """Returns an LSTM on the standard library's source: 1.0 million parameters at the default width."""
    return _text(lambda: TextNet(width), batch_size, length, num_test, source_text.load())


def gpt_task(
    layers: int = 4,
    width: int = 96,
    batch_size: int = 8,
    length: int = 128,
    num_test: int = 512,
    num_bytes: int = 2_000_000,
    heads: int = 4,
    text: Text | None = None,
    vocabulary: int = VOCABULARY,
) -> Task:
    """Returns the GPT of examples/gpt_text.py on the same text: 0.48 million parameters by default."""
    text = text or source_text.load(num_bytes)
    return _text(lambda: GPT(layers, width, heads, length, vocabulary), batch_size, length, num_test, text)


def adapters_task(base_steps: int, **shape: Any) -> Task:
    """Adapters of a frozen GPT, which was trained on the first half of the text; they train on the second."""
    train, test = source_text.load()
    cut = len(train) // 2
    base = gpt_task(text=(train[:cut], test), **shape)

    def make_model() -> nn.Module:
        net = base.make_model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        for batch in base.batches(0, 1, base_steps, 0):
            optimizer.zero_grad()
            base.loss(net, *batch).backward()
            optimizer.step()
        net.requires_grad_(False)
        for layer in [part for part in net.modules() if isinstance(part, nn.Linear)]:
            parametrize.register_parametrization(layer, "weight", Adapter(layer.weight))
        return net

    return replace(gpt_task(text=(train[cut:], test), **shape), make_model=make_model)


def _text(
    make_model: Callable[[], nn.Module], batch_size: int, length: int, num_test: int, text: Text
) -> Task:
    train, test = text
    held_out = test[: num_test * (length + 1)].astype(np.int64)
    pieces = torch.from_numpy(held_out).view(num_test, length + 1)

    def loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        device = next(model.parameters()).device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(inputs.to(device)).flatten(0, 1)
            return functional.cross_entropy(logits, targets.flatten().to(device))

    def bits(model: nn.Module, rank: int, size: int) -> tuple[float, int]:
        own = pieces[rank::size]
        with torch.no_grad():
            losses = [float(loss(model, some[:, :-1], some[:, 1:])) * len(some) for some in own.split(32)]
        return float(np.sum(losses)) / math.log(2), len(own)

    def batches(rank: int, size: int, num_steps: int, seed: int) -> Iterator[Batch]:
        for inputs, targets in source_text.batches(train, rank, size, batch_size, length, num_steps, seed):
            yield torch.from_numpy(inputs).long(), torch.from_numpy(targets).long()

    return Task(make_model, batches, loss, bits)
