"""The buckets of DistributedDataParallel as a plan, and what it has to know of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import ParameterRules
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.merging.plan import same_kind
from horovod_sparse.pytorch.layout import dtype_name

#: the parameters of every bucket, in the order in which the buckets come
Layout: TypeAlias = Sequence[Sequence[torch.Tensor]]


def facts_of(
    layout: Layout,
    name_of: dict[torch.Tensor, str],
    named: Mapping[str, torch.Tensor],
    group_of: Mapping[torch.Tensor, int] | None,
    rules: ParameterRules,
) -> dict[str, tuple[ParameterFacts, torch.Tensor]]:
    """Facts and tensor of every parameter, by name; those without elements are passed over.

    Args:
        layout: of a step.
        name_of: names by parameter; gets those of parameters that nobody has named.
        named: all that were named; nothing where names were left out.
        group_of: numbers of the optimizer's groups, which have buckets of their own, if one was given.
        rules: which parameters have another density, or are sent whole.

    Raises:
        ArgumentError: if names or the optimizer are those of another model.
        UnsupportedError: for a dtype that cannot be synchronized.
    """
    facts = {}
    for parameter in (p for bucket in layout for p in bucket if p.numel()):
        if parameter not in name_of:
            if named:
                allowed = "those of the very module that DistributedDataParallel has"
                raise ArgumentError("named_parameters", list(named)[:4], allowed)
            # as Horovod calls parameters without names
            name_of[parameter] = f"allreduce.noname.0.{len(name_of)}"
        name, dtype = name_of[parameter], dtype_name(parameter)
        if dtype is None:
            raise UnsupportedError(
                f"{name} has dtype {parameter.dtype}: gradients of float32, float64, float16 and bfloat16 "
                "can be synchronized"
            )
        if group_of is not None and parameter not in group_of:
            raise ArgumentError("optimizer", f"one without {name}", "one of all the model's parameters")
        n, shape = parameter.numel(), tuple(parameter.shape)
        group = 0 if group_of is None else group_of[parameter]
        density = rules.density_of(name, n) or 0.0
        facts[name] = ParameterFacts(name, n, dtype, str(parameter.device), group, density, shape), parameter
    return facts


def plan_of(layout: Layout, facts: Mapping[str, tuple[ParameterFacts, torch.Tensor]]) -> Plan:
    """The buckets of a step, parameters of other groups and densities apart.

    Args:
        layout: of the step.
        facts: as made by `facts_of`.
    """
    fact_of = {parameter: fact for fact, parameter in facts.values()}
    buckets: list[tuple[str, ...]] = []
    dense: list[str] = []
    for bucket in layout:
        kinds: dict[Any, list[str]] = {}
        for fact in (fact_of[parameter] for parameter in bucket if parameter.numel()):
            (dense if fact.density == 1.0 else kinds.setdefault(same_kind(fact), [])).append(fact.name)
        buckets += map(tuple, kinds.values())
    return Plan(tuple(buckets), tuple(dense))
