"""What others offer, for `scripts/study adamw`: from the gradients of all ranks, what is applied.

A baseline is made for a model's shapes and gives an `Exchange`. Two of them are optimizers: what they give is
a direction, which plain SGD applies. Bytes are what a rank has to put in, without headers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

#: (gradients of all ranks [n] each, step, learning rate) -> (what is applied [n], bytes that a rank sent)
Exchange: TypeAlias = Callable[[Sequence[torch.Tensor], int, float], tuple[torch.Tensor, float]]
Shapes: TypeAlias = Sequence[torch.Size]


class Baseline(NamedTuple):
    """Makes a baseline's exchange function.

    Attributes:
        make: by the shapes of the parameters and the setting of the study.
        is_step: what it gives is a direction that is multiplied by the rate, and no gradient for AdamW.
    """

    make: Callable[[Shapes, Mapping[str, Any]], Exchange]
    is_step: bool = False


def dense(shapes: Shapes, setting: Mapping[str, Any]) -> Exchange:
    """Returns an exchange of gradients in float32."""
    return lambda gradients, step, rate: (torch.stack(list(gradients)).mean(0), 4.0 * gradients[0].numel())


def fp16(shapes: Shapes, setting: Mapping[str, Any]) -> Exchange:
    """Returns an exchange of gradients in float16, as Horovod's `Compression.fp16`."""

    def exchange(gradients: Sequence[torch.Tensor], step: int, rate: float) -> tuple[torch.Tensor, float]:
        sum_ = torch.stack([gradient.half() for gradient in gradients]).sum(0)
        return sum_.float() / len(gradients), 2.0 * sum_.numel()

    return exchange


@dataclass(frozen=True)
class _GradBucket:
    """Stands in for the bucket that PyTorch gives to a hook."""

    flat: torch.Tensor
    shapes: Shapes

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def power_sgd(shapes: Shapes, setting: Mapping[str, Any], rank: int) -> Exchange:
    """Returns an exchange by PyTorch's PowerSGD hook, dense in the first tenth of the steps, as advised.

    It runs on one rank that has the mean of all gradients: both factors are linear in the sum over ranks of
    gradient and residual, so more ranks get the same, to rounding.

    Source: Vogels, Karimireddy and Jaggi, NeurIPS 2019.
    """
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    dense_steps = round(setting["num_steps"] * setting["warmup"])
    state = PowerSGDState(None, rank, start_powerSGD_iter=dense_steps)

    def exchange(gradients: Sequence[torch.Tensor], step: int, rate: float) -> tuple[torch.Tensor, float]:
        mean, before = torch.stack(list(gradients)).mean(0), state.total_numel_after_compression
        found = powerSGD_hook(state, _GradBucket(mean, shapes)).wait()
        sent = mean.numel() if step < dense_steps else state.total_numel_after_compression - before
        return found, 4.0 * sent

    return exchange


def one_bit_adam(shapes: Shapes, setting: Mapping[str, Any]) -> Exchange:
    """Adam in the first fifth of the steps; then v stays, and signs of the momentum are exchanged, both ways
    with error feedback and with one scale per parameter (mean of absolute values).

    Each rank averages a part of the elements and sends the average's signs to all: n bits, and n / P.

    Source: Tang et al., ICML 2021, Algorithm 1.
    """
    sizes = [shape.numel() for shape in shapes]
    beta1, beta2, frozen = 0.9, setting["beta2"], round(0.2 * setting["num_steps"])
    m, v, server_error = (torch.zeros(sum(sizes)) for _ in range(3))
    errors: list[torch.Tensor] = []

    def signs(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.abs().mean() * torch.where(part < 0, -1.0, 1.0) for part in x.split(sizes)])

    def exchange(gradients: Sequence[torch.Tensor], step: int, rate: float) -> tuple[torch.Tensor, float]:
        if step < frozen:
            mean = torch.stack(list(gradients)).mean(0)
            mean *= min(1.0, setting["clip_norm"] / (float(mean.norm()) + 1e-6))
            m.lerp_(mean, 1.0 - beta1)
            v.mul_(beta2).addcmul_(mean, mean, value=1.0 - beta2)
            sent, first = 4.0 * mean.numel(), 1.0 - beta1 ** (step + 1)
        else:
            if not errors:
                errors.extend(torch.zeros_like(m) for _ in gradients)
            total = server_error.clone()
            for gradient, error in zip(gradients, errors, strict=True):
                gradient = gradient * min(1.0, setting["clip_norm"] / (float(gradient.norm()) + 1e-6))
                waiting = torch.lerp(m, gradient, 1.0 - beta1) + error
                told = signs(waiting)
                error.copy_(waiting - told)
                total += told / len(gradients)
            m.copy_(signs(total))
            server_error.copy_(total - m)
            sent, first = m.numel() / 8 * (1 + 1 / len(gradients)) + 8 * len(sizes), 1.0
        second = v / (1.0 - beta2 ** min(step + 1, frozen))
        return m / first / (second.sqrt() + 1e-8), sent

    return exchange


def _side(length: int) -> int:
    """Returns the largest divisor up to 64."""
    return max(side for side in range(1, 65) if length % side == 0)


def _cosines(length: int) -> torch.Tensor:
    """Returns the orthonormal DCT-II as a matrix."""
    place = torch.arange(length, dtype=torch.float64)
    matrix = torch.cos(math.pi / length * (place + 0.5) * place[:, None]) * math.sqrt(2.0 / length)
    matrix[0] /= math.sqrt(2.0)
    return matrix.float()


def demo(shapes: Shapes, setting: Mapping[str, Any]) -> Exchange:
    """Decoupled momentum: the 32 largest cosine coefficients of every block of up to 64 x 64 leave a rank's
    momentum and are averaged; the sign of what comes back is applied.

    A coefficient is a float32 and a position of 16 bits.

    Source: Peng, Quesnelle and Kingma, arXiv 2411.19870, Algorithm 1, with its authors' beta of 0.999.
    """
    beta, most = 0.999, 32
    matrices = [(shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, shape[0]) for shape in shapes]
    sides = [(_side(rows), _side(columns)) for rows, columns in matrices]
    cosines = {side: _cosines(side) for pair in sides for side in pair}
    momenta: list[torch.Tensor] = []

    def blocks(flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split([rows * columns for rows, columns in matrices])
        return [
            part.view(rows // a, a, columns // b, b).transpose(1, 2)
            for part, (rows, columns), (a, b) in zip(parts, matrices, sides, strict=True)
        ]

    def back(coefficients: torch.Tensor, a: int, b: int) -> torch.Tensor:
        return (cosines[a].T @ coefficients @ cosines[b]).transpose(1, 2).reshape(-1)

    def exchange(gradients: Sequence[torch.Tensor], step: int, rate: float) -> tuple[torch.Tensor, float]:
        if not momenta:
            momenta.extend(torch.zeros_like(gradient) for gradient in gradients)
        sums, sent = [0.0] * len(sides), 0
        for gradient, momentum in zip(gradients, momenta, strict=True):
            momentum.mul_(beta).add_(gradient, alpha=rate)
            taken = []
            for number, (block, (a, b)) in enumerate(zip(blocks(momentum), sides, strict=True)):
                whole = (cosines[a] @ block @ cosines[b].T).flatten(2)
                found = whole.abs().topk(min(most, a * b)).indices
                kept = torch.zeros_like(whole).scatter_(2, found, whole.gather(2, found)).view(block.shape)
                sums[number] = sums[number] + kept
                sent += found.numel()
                taken.append(back(kept, a, b))
            momentum -= torch.cat(taken)
        summed = [back(sum_, a, b) for sum_, (a, b) in zip(sums, sides, strict=True)]
        return torch.cat(summed).sign(), 6.0 * sent / len(gradients)

    return exchange


BASELINES: dict[str, Baseline] = {
    "dense": Baseline(dense),
    "fp16": Baseline(fp16),
    "powersgd rank 1": Baseline(partial(power_sgd, rank=1)),
    "powersgd rank 4": Baseline(partial(power_sgd, rank=4)),
    "1-bit adam": Baseline(one_bit_adam, is_step=True),
    "demo": Baseline(demo, is_step=True),
}
