"""The parameters of an optimizer as a plan sees them, and the plan that its arguments ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import ParameterRules
from horovod_sparse.frontend import (
    Asked,
    Decision,
    agreed_plan,
    asked_for,
    check_agreement,
    describe_model,
    make_plan,
    plan_by_times,
)
from horovod_sparse.frontend.failures import raise_together
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.calibration import bucket_memory, carry_out_together, where_of
from horovod_sparse.torch.tensors import dtype_name

__all__ = ["agree", "facts_of", "make_plan", "planned"]

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


def planned(
    facts: Mapping[str, tuple[ParameterFacts, torch.Tensor]],
    sparsifier: Sparsifier,
    process_set: Any,
    *,
    plan: Plan | None = None,
    groups: Any = None,
    bucket_bytes: int | None = None,
    merging: Any = None,
    tensor_selection: Any = None,
    profile: Any = None,
) -> tuple[Asked | None, Plan, Decision | None]:
    """The plan to begin with, the same on all ranks.

    Args:
        facts: as made by `facts_of`.
        sparsifier: that the buckets have.
        process_set: the ranks.
        plan: and the others: the optimizer's arguments; see `asked_for`.
        groups: Horovod's argument.
        bucket_bytes: see `fixed_bytes`.
        merging: see `asked_for`.
        tensor_selection: see `asked_for`.
        profile: see `asked_for`.

    Returns:
        How plans are made (None where one was given, or none is asked for), the plan, and why it was
        taken where a profile decided.

    Raises:
        ArgumentError: for arguments that exclude each other, or a plan that does not fit.
        ProfileMismatchError: on every rank alike, if ranks ask for different things, or a profile cannot
            be read or applied.
        StateMismatchError: on every rank alike, if their models differ.
    """
    asked, plan = asked_for(
        merging=merging,
        tensor_selection=tensor_selection,
        profile=profile,
        plan=plan,
        groups=groups,
        bucket_bytes=bucket_bytes,
    )
    parameters = [fact for fact, _ in facts.values()]
    together = _together(process_set)
    if together:
        carry_out_together(check_agreement(asked), process_set, "horovod_sparse.asked")
    elif asked is not None and asked.failure is not None:
        raise asked.failure
    decision, made = None, None
    if asked is None:
        made = make_plan(facts, plan=plan, groups=groups, bucket_bytes=bucket_bytes)
    else:
        failure: Exception | None = None
        try:
            if asked.measures and asked.profile is not None and asked.complete:
                _, device, _ = bucket_memory(parameters)
                where = where_of(process_set, device)
                decision = plan_by_times(asked, where, parameters, sparsifier, asked.profile)
                made = decision.plan
            else:
                made = asked.first_plan(parameters)
                made.check(parameters)
        except Exception as error:  # a rule of the user's may fail on one rank alone
            failure = error
        if together:
            carry_out_together(raise_together(failure), process_set, "horovod_sparse.asked")
        elif failure is not None:
            raise failure
    if made is None:
        raise RuntimeError("no plan was made: this is a bug, please report it")
    return asked, agree(made, parameters, process_set), decision


def _together(process_set: Any) -> bool:
    return bool(process_set.size() > 1 and os.environ.get("HOROVOD_ELASTIC") != "1")


def agree(plan: Plan, parameters: Sequence[ParameterFacts], process_set: Any) -> Plan:
    """The plan of the process set's first rank, after a check that all ranks have the same parameters.

    One collective, at construction only. Ranks may list their parameters in different orders; a
    parameter that another rank does not have, or has in another size, would hang the first step.

    In elastic training a worker that joins makes its optimizer while the others synchronize their
    state, so there is no collective and no check; every worker computes the same plan.

    Raises:
        StateMismatchError: on every rank, if the models differ.
    """
    if not _together(process_set):
        return plan
    message = torch.frombuffer(bytearray(describe_model(plan, parameters)), dtype=torch.uint8)
    gathered = hvd.allgather(message, name="horovod_sparse.plan", process_set=process_set)
    return agreed_plan(bytes(gathered.tolist()))
