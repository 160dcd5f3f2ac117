"""The plan that the arguments of an optimizer or of a tape ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod_sparse.errors import ArgumentError
from horovod_sparse.merging import (
    DEFAULT_BUCKET_BYTES,
    ParameterFacts,
    Plan,
    explicit_groups,
    fixed_bytes,
    num_buckets,
)

__all__ = ["make_plan"]


def make_plan(
    facts: Mapping[str, tuple[ParameterFacts, Any]],
    *,
    plan: Plan | None = None,
    groups: Any = None,
    bucket_bytes: int | None = None,
) -> Plan:
    """The plan that the arguments ask for, at most one of which may be given.

    Args:
        facts: by name, of every parameter, and the parameter itself.
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
