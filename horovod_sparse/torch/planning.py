"""The parameters of an optimizer as a plan sees them, and the plan that its arguments ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import ParameterRules, Recipe
from horovod_sparse.frontend.calibration import Where
from horovod_sparse.frontend.decision import FirstPlan, first_plan
from horovod_sparse.frontend.levels import assumed_topology, by_cost
from horovod_sparse.frontend.plan_request import plan_request
from horovod_sparse.merging import ParameterFacts
from horovod_sparse.pytorch.layout import dtype_name
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.calibration import bucket_memory, where_of

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
        shape = tuple(parameter.shape)
        facts[name] = ParameterFacts(name, n, dtype, str(parameter.device), group, density, shape), parameter
    return facts


def joining(
    optimizer: Any, known: Mapping[torch.Tensor, Any], rules: ParameterRules
) -> dict[str, tuple[ParameterFacts, torch.Tensor]]:
    """Facts of parameters that the optimizer has come to train since they were last asked for.

    By `add_param_group`, or since they are not frozen any more. One that was never named is called as
    Horovod calls parameters without names: by its place in the groups, which is the same on all ranks.

    Args:
        optimizer: that has them.
        known: what is synchronized already.
        rules: see `facts_of`.

    Raises:
        UnsupportedError: see `facts_of`.
    """
    new = [
        (optimizer._parameter_names.get(parameter, f"allreduce.noname.{i}.{j}"), parameter)
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
        if parameter.requires_grad and parameter not in known
    ]
    return facts_of(new, optimizer.param_groups, rules) if new else {}


def planned(
    facts: Mapping[str, tuple[ParameterFacts, torch.Tensor]],
    recipe: Recipe,
    process_set: Any,
    levels: str = "flat",
    **arguments: Any,
) -> FirstPlan:
    """The plan to begin with, as this rank's arguments ask for it. No collective.

    Args:
        facts: as made by `facts_of`.
        recipe: what to do with a bucket.
        process_set: the ranks.
        levels: see `horovod_sparse.frontend.levels`.
        **arguments: of the optimizer; see `plan_request`.

    Raises:
        ArgumentError: for arguments that exclude each other, or a plan that does not fit.
        ProfileMismatchError: with one rank, if a profile cannot be read or applied; with more it is kept
            as the failure, for all ranks to know.
    """
    request, plan = plan_request(**arguments, density=recipe.auto)
    arguments = {"plan": plan, **{name: arguments.get(name) for name in ("groups", "bucket_bytes")}}

    def where() -> Where:
        parameters = [fact for fact, _ in facts.values()]
        choose = by_cost(recipe.sparsifier, parameters, request)
        hosts = assumed_topology(levels, hvd, process_set, choose)
        return dataclasses.replace(where_of(process_set, bucket_memory(parameters)[1]), topology=hosts)

    first = first_plan(request, facts, recipe.sparsifier, where, **arguments)
    if first.failure is not None and process_set.size() == 1:
        raise first.failure
    return first
