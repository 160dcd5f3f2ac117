"""The parameters of an optimizer as a plan sees them, and the plan that its arguments ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import ParameterRules
from horovod_sparse.frontend import agreed_plan, describe_model, make_plan
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.tensors import dtype_name

__all__ = ["agree", "facts_of", "make_plan"]

_NO_RULES = ParameterRules()


def facts_of(
    named_parameters: Sequence[tuple[str, torch.Tensor]],
    param_groups: Sequence[Mapping[str, Any]],
    rules: ParameterRules = _NO_RULES,
) -> dict[str, tuple[ParameterFacts, torch.Tensor]]:
    """Facts and tensor of every parameter that is synchronized, by name, in the model's order.

    Passed over are parameters of other optimizers, frozen ones (integers among them), and those
    without elements.

    Args:
        named_parameters: of the model.
        param_groups: of the optimizer.
        rules: which parameters have another density, or are sent whole.

    Raises:
        UnsupportedError: for a dtype that cannot be synchronized.
    """
    group_of = {id(p): number for number, group in enumerate(param_groups) for p in group["params"]}
    facts = {}
    for name, parameter in named_parameters:
        if id(parameter) not in group_of or not parameter.requires_grad or parameter.numel() == 0:
            continue
        dtype = dtype_name(parameter)
        if dtype is None:
            raise UnsupportedError(
                f"{name} has dtype {parameter.dtype}: gradients of float32, float64, float16 and bfloat16 "
                "can be synchronized; give such parameters an optimizer of their own"
            )
        group = group_of[id(parameter)]
        n, density = parameter.numel(), rules.density_of(name, parameter.numel()) or 0.0
        facts[name] = ParameterFacts(name, n, dtype, str(parameter.device), group, density), parameter
    return facts


def agree(plan: Plan, parameters: Sequence[ParameterFacts], process_set: Any) -> Plan:
    """The plan of the process set's first rank, after a check that all ranks have the same parameters.

    One collective, at construction only. Ranks may list their parameters in different orders; a
    parameter that another rank does not have, or has in another size, would hang the first step.

    In elastic training a worker that joins makes its optimizer while the others synchronize their
    state, so there is no collective and no check; every worker computes the same plan.

    Raises:
        StateMismatchError: on every rank, if the models differ.
    """
    if process_set.size() == 1 or os.environ.get("HOROVOD_ELASTIC") == "1":
        return plan
    message = torch.frombuffer(bytearray(describe_model(plan, parameters)), dtype=torch.uint8)
    gathered = hvd.allgather(message, name="horovod_sparse.plan", process_set=process_set)
    return agreed_plan(bytes(gathered.tolist()))
