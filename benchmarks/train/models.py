"""Models for `scripts/bench train`: small real ones, and known networks replayed from their layer tables."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from horovod_sparse.planning.workload import LAYER_TABLES, layer_table

#: trained for real: every rank computes forward and backward
REAL_MODELS = ("cnn", "digits", "lstm", "mlp")
MODELS = (*REAL_MODELS, *LAYER_TABLES)


def make_model(name: str, batch: int) -> tuple[Any, Callable[[], Any]]:
    """A model, and what computes its loss on a batch of random data.

    Args:
        name: one of `MODELS`. A layer table's model computes nothing: its backward takes the table's
            time for every parameter, asleep, and leaves gradients that were drawn beforehand. So ranks
            that share cores overlap computation and communication as machines of their own would.
        batch: samples for each rank, of the real models.

    Returns:
        The model, and a function that gives the loss.
    """
    if name in LAYER_TABLES:
        replay = _Replay(name)
        return replay, replay
    if name == "mlp":
        model = nn.Sequential(
            nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
        )
        data = torch.randn(batch, 1024)
    elif name == "cnn":
        model, data = _residual_network(), torch.randn(batch, 3, 32, 32)
    elif name == "digits":
        model, data = _digits_network(), torch.randn(batch, 1, 28, 28)
    else:
        model, data = _Words(), torch.randint(0, _Words.num_words, (batch, 16))
    classes = _Words.num_words if name == "lstm" else 10
    labels = torch.randint(0, classes, (batch,))
    return model, lambda: nn.functional.cross_entropy(model(data), labels)


class _Residual(nn.Module):
    """Two convolutions around a short cut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.short = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, images: Any) -> Any:
        """The sum of both ways."""
        return nn.functional.relu(self.body(images) + self.short(images))


def _residual_network() -> Any:
    """Four stages of two convolutions, 5 million parameters, most of them in the last stage."""
    stages = [_Residual(before, after, 2) for before, after in ((32, 64), (64, 128), (128, 256), (256, 512))]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)
    )


def _digits_network() -> Any:
    """Two convolutions and two dense layers, 180,000 parameters: that of examples/pytorch_mnist.py."""
    convolutions = [nn.Conv2d(1, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(16, 32, 5), nn.MaxPool2d(2)]
    return nn.Sequential(
        *convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(512, 320), nn.ReLU(), nn.Linear(320, 10)
    )


class _Words(nn.Module):
    """An embedding, two layers of LSTM, and a word to come: 6 million parameters, half of them embeddings."""

    num_words = 5000

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.num_words, 256)
        self.lstm = nn.LSTM(256, 384, num_layers=2, batch_first=True)
        self.output = nn.Linear(384, self.num_words)

    def forward(self, words: Any) -> Any:
        """Scores of the next word."""
        return self.output(self.lstm(self.embedding(words))[0][:, -1])


class _Sleeping(torch.autograd.Function):
    """Passes its input on; backward sleeps, and gives a parameter a gradient drawn beforehand."""

    @staticmethod
    def forward(ctx: Any, signal: Any, parameter: Any, drawn: Any, seconds: float) -> Any:
        ctx.drawn, ctx.seconds = drawn, seconds
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, incoming: Any) -> tuple[Any, ...]:
        time.sleep(ctx.seconds)
        return incoming, ctx.drawn, None, None


class _Replay(nn.Module):
    """A network of a layer table.

    Args:
        name: of the table.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        workload = layer_table(name).workload
        self._forward_seconds = workload.forward_seconds
        self._backward_seconds = workload.backward_seconds
        self.held = nn.ParameterList([nn.Parameter(torch.zeros(f.num_elements)) for f in workload.parameters])
        self._drawn = _drawn(name, tuple(f.num_elements for f in workload.parameters))

    def forward(self) -> Any:
        """A loss that hangs on all parameters, whose gradients come in the table's order and at its times."""
        time.sleep(self._forward_seconds)
        signal = torch.zeros((), requires_grad=True)
        for row in zip(self.held, self._drawn, self._backward_seconds, strict=True):
            signal = _Sleeping.apply(signal, *row)
        return signal


@functools.cache
def _drawn(name: str, sizes: tuple[int, ...]) -> list[Any]:
    """Gradients for all models of a table, each parameter's at a scale of its own."""
    scales = torch.logspace(-4, -2, len(sizes))
    return [torch.randn(size) * scale for size, scale in zip(sizes, scales, strict=True)]
