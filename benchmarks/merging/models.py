"""Networks for `scripts/bench merging`: a known one replayed at a smaller size, and one that is computed."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from horovod_sparse.planning.workload import LAYER_TABLES, layer_table

#: widths of the computed network: narrow and wide layers in turn, so that sizes differ as in a real one
_WIDTHS = (128, 512, 256, 768, 384)
_BATCH = 16


def make_network(name: str, scale: float) -> tuple[Any, Callable[[], Any]]:
    """A network, and what computes its loss.

    Args:
        name: one of `LAYER_TABLES`: its parameters, whose computing time is slept through, so that ranks
            that share cores compute as machines of their own would; or "mlp50": 50 dense layers that every
            rank computes.
        scale: of the layer table's parameters and times, in (0, 1].
    """
    if name in LAYER_TABLES:
        replay = _Replay(name, scale)
        return replay, replay
    widths = [64, *(_WIDTHS[number % len(_WIDTHS)] for number in range(49)), 10]
    layers = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    data, labels = torch.randn(_BATCH, 64), torch.randint(0, 10, (_BATCH,))
    return model, lambda: nn.functional.cross_entropy(model(data), labels)


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
    """The parameters of a layer table, each a share of its size, and their times likewise.

    Args:
        name: of the table.
        scale: the share.
    """

    def __init__(self, name: str, scale: float) -> None:
        super().__init__()
        workload = layer_table(name).workload
        self._forward_seconds = scale * workload.forward_seconds
        self._backward_seconds = [scale * seconds for seconds in workload.backward_seconds]
        sizes = [max(1, round(scale * parameter.num_elements)) for parameter in workload.parameters]
        self.held = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
        self._drawn = _drawn(tuple(sizes))

    def forward(self) -> Any:
        """A loss that hangs on all parameters, whose gradients come in the table's order and at its times."""
        time.sleep(self._forward_seconds)
        signal = torch.zeros((), requires_grad=True)
        for row in zip(self.held, self._drawn, self._backward_seconds, strict=True):
            signal = _Sleeping.apply(signal, *row)
        return signal


@functools.cache
def _drawn(sizes: tuple[int, ...]) -> list[Any]:
    """Gradients, each parameter's at a scale of its own; the same for all networks of a rank."""
    scales = torch.logspace(-4, -2, len(sizes))
    return [torch.randn(size) * scale for size, scale in zip(sizes, scales, strict=True)]
