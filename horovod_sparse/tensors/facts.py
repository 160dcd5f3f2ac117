"""The parameters of PyTorch as a plan sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import ParameterRules
from horovod_sparse.plans.plan import ParameterFacts
from horovod_sparse.tensors.layout import dtype_name

_NO_RULES = ParameterRules()


def facts_of(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    group_of: Mapping[torch.Tensor, int] | None,
    rules: ParameterRules = _NO_RULES,
    advice: str = "",
) -> dict[str, tuple[ParameterFacts, torch.Tensor]]:
    """Facts and tensor of every parameter, by name, in their order; those without elements are passed over.

    Args:
        named_parameters: with names, that are synchronized.
        group_of: the number of every parameter's group in the optimizer, if there is one.
        rules: which parameters have another density, or are sent whole.
        advice: what else to do with a dtype that cannot be synchronized.

    Raises:
        UnsupportedError: for such a dtype.
    """
    facts = {}
    for name, parameter in named_parameters:
        n, dtype = parameter.numel(), dtype_name(parameter)
        if n == 0:
            continue
        if dtype is None:
            raise UnsupportedError(
                f"{name} has dtype {parameter.dtype}: gradients of float32, float64, float16 and bfloat16 "
                f"can be synchronized{advice}"
            )
        group = 0 if group_of is None else group_of[parameter]
        device, density = str(parameter.device), rules.density_of(name, n) or 0.0
        facts[name] = (
            ParameterFacts(name, n, dtype, device, group, density, tuple(parameter.shape)),
            parameter,
        )
    return facts


def groups_of(optimizer: Any) -> dict[torch.Tensor, int]:
    """The number of every parameter's group."""
    return {
        parameter: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
