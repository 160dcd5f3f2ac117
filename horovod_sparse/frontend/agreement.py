"""All ranks take the first rank's plan, after a check that they train the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from horovod_sparse.errors import StateMismatchError
from horovod_sparse.merging import ParameterFacts, Plan

__all__ = ["agreed_plan", "check_same_model", "describe_model"]


def describe_model(plan: Plan, parameters: Sequence[ParameterFacts]) -> bytes:
    """A rank's plan and parameters as one line, to be gathered from all ranks."""
    # device names may differ where every rank has one of its own
    own = {item.name: (item.num_elements, item.dtype, item.group, item.density) for item in parameters}
    return json.dumps([plan.to_dict(), own]).encode() + b"\n"


def agreed_plan(gathered: bytes) -> Plan:
    """The plan of the first rank.

    Args:
        gathered: what `describe_model` gave on every rank, one behind the other in rank order.

    Raises:
        StateMismatchError: on every rank alike, if the models differ.

    Example:
        >>> facts = [ParameterFacts("weight", 10)]
        >>> line = describe_model(Plan((("weight",),)), facts)
        >>> agreed_plan(line + line).buckets
        (('weight',),)
    """
    everyone = [json.loads(line) for line in gathered.splitlines()]
    check_same_model([model for _, model in everyone])
    return Plan.from_dict(everyone[0][0])


def check_same_model(models: Sequence[Mapping[str, Any]]) -> None:
    """Refuses ranks that train different models.

    Args:
        models: by rank: what must be equal of every parameter, by name.

    Raises:
        StateMismatchError: naming a parameter that differs.
    """
    first = models[0]
    for rank, other in enumerate(models):
        if differing := sorted(
            name for name in first.keys() | other.keys() if first.get(name) != other.get(name)
        ):
            name = differing[0]
            raise StateMismatchError(
                f"ranks 0 and {rank} do not train the same model: {name} is {first.get(name, 'missing')} "
                f"here and {other.get(name, 'missing')} there (elements, dtype, parameter group, density); "
                f"{len(differing)} parameters differ. Check requires_grad, too"
            )
