"""Known networks, replayed from their layer tables."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import nn

from benchmarks.common.layers import layer_table


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


class Replay(nn.Module):
    """A model with the parameters of a layer table, which replays the table's times.

    It computes nothing: its backward takes the table's time for every parameter, asleep, and leaves
    gradients that were drawn beforehand. So ranks that share cores overlap computation and communication as
    machines of their own would.

    Args:
        name: of the table.
        scale: of its sizes and times.
    """

    def __init__(self, name: str, scale: float = 1.0) -> None:
        super().__init__()
        workload = layer_table(name).workload
        self._forward_seconds = scale * workload.forward_seconds
        self._backward_seconds = [scale * seconds for seconds in workload.backward_seconds]
        sizes = tuple(max(1, round(scale * one.num_elements)) for one in workload.parameters)
        self.held = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
        self._drawn = _drawn(sizes)

    def forward(self) -> Any:
        """Returns a loss whose backward gives every parameter its gradient at the table's time."""
        time.sleep(self._forward_seconds)
        signal = torch.zeros((), requires_grad=True)
        for row in zip(self.held, self._drawn, self._backward_seconds, strict=True):
            signal = _Sleeping.apply(signal, *row)
        return signal


@functools.cache
def _drawn(sizes: tuple[int, ...]) -> list[Any]:
    """Draws gradients for parameters of these sizes, each at its own scale, once for all models."""
    scales = torch.logspace(-4, -2, len(sizes))
    return [torch.randn(size) * scale for size, scale in zip(sizes, scales, strict=True)]
