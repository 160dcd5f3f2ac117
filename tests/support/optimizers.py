"""Our own optimizer around a model of chosen gradients, for unit tests and rank tests alike."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from support.linear import LinearModel


def base_for(compression: Any, parameters: Any, lr: float) -> torch.optim.Optimizer:
    if "feedback=adam" in str(compression):
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    if "feedback=rmsprop" in str(compression):
        return torch.optim.RMSprop(parameters, lr=lr)
    return torch.optim.SGD(parameters, lr=lr)


def make(model: torch.nn.Module, compression: Any, *, lr: float = 0.5, **arguments: Any) -> Any:
    return wrapped("own", model, compression, arguments, lr)


def wrapped(front: str, model: Any, compression: Any, arguments: Any = None, lr: float = 0.5) -> Any:
    """An optimizer of ours ("own"), or of Horovod's with our compressor."""
    import horovod.torch as stock

    import horovod_sparse.torch as hvd

    if front == "stock" and isinstance(compression, str):
        compression = hvd.Compression.parse(compression)
    return (hvd if front == "own" else stock).DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr),
        model.named_parameters(),
        compression=compression,
        **(arguments or {}),
    )


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def train_step(
    model: LinearModel, optimizer: Any, gradients: Mapping[str, np.ndarray]
) -> dict[str, torch.Tensor]:
    """Backward, synchronize, step, zero_grad; returns the synchronized gradients."""
    model.backward(gradients)
    optimizer.synchronize()
    found = gradients_of(model)
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    return found


def residuals_of(optimizer: Any) -> dict[str, torch.Tensor]:
    saved = optimizer.state_dict()["horovod_sparse"]
    return saved["residuals"]
