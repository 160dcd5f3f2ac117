"""The parameters of an optimizer as a plan sees them, and the plan that its arguments ask for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.errors import ArgumentError, StateMismatchError, UnsupportedError
from horovod_sparse.merging import (
    DEFAULT_BUCKET_BYTES,
    ParameterFacts,
    Plan,
    explicit_groups,
    fixed_bytes,
    num_buckets,
)
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.tensors import dtype_name

__all__ = ["agree", "facts_of", "make_plan"]


def facts_of(
    named_parameters: Sequence[tuple[str, torch.Tensor]], param_groups: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[ParameterFacts, torch.Tensor]]:
    """Facts and tensor of every parameter that is synchronized, by name, in the model's order.

    Passed over are parameters of other optimizers, frozen ones (integers among them), and those
    without elements.

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
        facts[name] = ParameterFacts(name, parameter.numel(), dtype, str(parameter.device), group), parameter
    return facts


def make_plan(
    facts: Mapping[str, tuple[ParameterFacts, torch.Tensor]],
    *,
    plan: Plan | None = None,
    groups: Any = None,
    bucket_bytes: int | None = None,
) -> Plan:
    """The plan that the optimizer's arguments ask for, at most one of which may be given.

    Args:
        facts: as made by `facts_of`.
        plan: taken as it is.
        groups: Horovod's argument: a number of buckets, or lists of parameters.
        bucket_bytes: see `fixed_bytes`.

    Raises:
        ArgumentError: if several are given, or the plan does not fit the parameters.
    """
    named = {"plan": plan, "groups": groups, "bucket_bytes": bucket_bytes}
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise ArgumentError(" and ".join(given), tuple(named[name] for name in given), "only one of them")
    parameters = [fact for fact, _ in facts.values()]
    if plan is not None:
        made = plan
    elif isinstance(groups, list):
        name_of = {id(parameter): name for name, (_, parameter) in facts.items()}
        made = explicit_groups(parameters, [[name_of.get(id(p), "") for p in group] for group in groups])
    elif groups is not None:
        made = num_buckets(parameters, groups)
    else:
        made = fixed_bytes(parameters, DEFAULT_BUCKET_BYTES if bucket_bytes is None else bucket_bytes)
    made.check(parameters)
    return made


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
    # device names may differ where every rank has one of its own
    own = {item.name: (item.num_elements, item.dtype, item.group) for item in parameters}
    line = json.dumps([plan.to_dict(), own]).encode() + b"\n"
    message = torch.frombuffer(bytearray(line), dtype=torch.uint8)
    gathered = hvd.allgather(message, name="horovod_sparse.plan", process_set=process_set)
    everyone = [json.loads(line) for line in bytes(gathered.tolist()).splitlines()]
    first_plan, first = everyone[0]
    for rank, (_, other) in enumerate(everyone):
        if differing := sorted(
            name for name in first.keys() | other.keys() if first.get(name) != other.get(name)
        ):
            name = differing[0]
            raise StateMismatchError(
                f"ranks 0 and {rank} do not train the same model: {name} is {first.get(name, 'missing')} "
                f"here and {other.get(name, 'missing')} there (elements, dtype, parameter group); "
                f"{len(differing)} parameters differ. Check requires_grad, too"
            )
    return Plan.from_dict(first_plan)
