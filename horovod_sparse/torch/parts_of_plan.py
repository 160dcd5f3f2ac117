"""The parts that a plan asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from horovod_sparse.feedback import Recipe
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.torch.parts import DenseBucket, DenseParameter, Part, SparseBucket


def parts_of(
    plan: Plan,
    facts: Mapping[str, tuple[ParameterFacts, torch.Tensor]],
    recipe: Recipe,
    learning_rate: Callable[[int], float | None],
    place: tuple[int, int],
    first: int = 0,
) -> list[Part]:
    """Buckets in the plan's order, then what stays dense. Fresh: their residuals are zeros.

    Args:
        plan: which parameters form which bucket.
        facts: of every parameter by name, and the parameter.
        recipe: what to do with a bucket.
        learning_rate: tells the present one of a parameter group.
        place: (rank, size) within the process set.
        first: number of the first bucket.
    """
    parts: list[Part] = []
    for number, names in enumerate(plan.buckets, first):
        parameters = [facts[name][1] for name in names]
        rate = partial(learning_rate, facts[names[0]][0].group)
        chosen = recipe.for_parameter(names[0], parameters[0].numel())
        parts.append(SparseBucket(f"bucket{number}.{names[0]}", names, parameters, chosen, rate, place))
    dense = recipe.for_dense()
    # a dense parameter has its share of the feedback, and a bucket of its own where that keeps something
    keeps = dense.feedback.num_companions > 0 or getattr(dense.feedback, "clip_norm", None) is not None
    for name in plan.dense:
        fact, parameter = facts[name]
        if keeps:
            rate = partial(learning_rate, fact.group)
            parts.append(DenseBucket(f"dense.{name}", [name], [parameter], dense, rate, place))
        else:
            parts.append(DenseParameter(name, parameter, place))
    return parts
