"""A model's variables as the callbacks need them, in Keras 3 and in tf-keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_sparse.tensorflow.functions import broadcast_variables
from horovod_sparse.tensorflow.tensors import as_variable

__all__ = ["broadcast", "model_variables", "optimizer_variables", "plain_optimizer"]


def model_variables(model: Any) -> list[Any]:
    """Weights, those that are not trained included.

    Not the states of random generators, which are variables in Keras 3: dropout is to differ from rank to
    rank.
    """
    return [as_variable(variable) for variable in model.weights]


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Slots, iterations and learning rate; residuals are not among them."""
    variables = optimizer.variables
    return [as_variable(variable) for variable in (variables() if callable(variables) else variables)]


def plain_optimizer(optimizer: Any) -> Any:
    """The optimizer that has the momentum: the one inside of a loss scaler."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def broadcast(variables: Sequence[Any], root_rank: int) -> None:
    """Gives all ranks the values of one."""
    if variables:
        broadcast_variables(variables, root_rank)
