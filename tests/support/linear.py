"""Models whose gradients a test chooses to the last bit, and hooks in an order it chooses."""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from support.dyadic import dyadic as dyadic


class LinearModel(torch.nn.Module):
    """Parameters p, of one dtype or of several, with the loss sum(p * g): the gradient of p is g itself."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype | Mapping[str, torch.dtype] = torch.float32,
    ) -> None:
        super().__init__()
        for name, shape in shapes.items():
            kind = dtype[name] if isinstance(dtype, Mapping) else dtype
            self.register_parameter(name, torch.nn.Parameter(torch.ones(tuple(shape), dtype=kind)))

    def loss(self, gradients: Mapping[str, np.ndarray]) -> torch.Tensor:
        """Returns a loss whose gradients are those given; hooks fire in the order of the dict."""
        parameters = dict(self.named_parameters())
        loss = torch.zeros((), dtype=torch.float64)
        # what entered the loss last is visited first
        for name in reversed(list(gradients)):
            parameter = parameters[name]
            given = torch.from_numpy(np.asarray(gradients[name], np.float64)).to(parameter)
            loss = loss + (parameter * given).sum().to(torch.float64)
        return loss

    def backward(self, gradients: Mapping[str, np.ndarray]) -> None:
        self.loss(gradients).backward()


def checksums(*tensors: torch.Tensor) -> list[int]:
    """Of their bits."""
    return [zlib.crc32(one.detach().contiguous().view(-1).view(torch.uint8).numpy()) for one in tensors]


def same_on_all_ranks(*tensors: torch.Tensor) -> bool:
    """Whether the tensors have the same bits on all ranks; asked by all of them together."""
    import horovod.torch as hvd

    everyone = hvd.allgather_object(checksums(*tensors))
    return all(item == everyone[0] for item in everyone)
