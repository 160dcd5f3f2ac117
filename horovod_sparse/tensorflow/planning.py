"""The variables of a tape or an optimizer as a plan sees them, and the ranks' agreement about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import ParameterRules
from horovod_sparse.frontend.agreement import (
    agreed_plan,
    common_names,
    compared,
    describe_model,
    next_label,
    settings,
)
from horovod_sparse.frontend.building import Building
from horovod_sparse.frontend.calibration import Where
from horovod_sparse.frontend.collective_errors import raise_together
from horovod_sparse.frontend.decision import FirstPlan, check_agreement, first_plan
from horovod_sparse.frontend.engine import carry_out
from horovod_sparse.frontend.plan_request import PlanRequest
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.tensorflow._horovod import hvd, is_elastic, takes_part
from horovod_sparse.tensorflow.calibration import carry_out_together, where_of
from horovod_sparse.tensorflow.tensors import dtype_name
from horovod_sparse.topology import Topology

#: of optimizers, tapes and compressors
building = Building(hvd)

#: facts and variable, by name
Facts = Mapping[str, tuple[ParameterFacts, Any]]

_NO_RULES = ParameterRules()


def facts_of(
    names: Sequence[str], variables: Sequence[Any], rules: ParameterRules = _NO_RULES
) -> dict[str, tuple[ParameterFacts, Any]]:
    """Facts and variable, by name, in the model's order.

    Args:
        names: of the variables.
        variables: of the model.
        rules: which variables have another density, or are sent whole.

    Raises:
        UnsupportedError: for a shape that is not known, or a dtype that cannot be synchronized.
    """
    facts = {}
    for name, variable in zip(names, variables, strict=True):
        num_elements, dtype = tf.TensorShape(variable.shape).num_elements(), dtype_name(variable.dtype)
        if num_elements is None or dtype is None:
            raise UnsupportedError(
                f"{name} is {tf.as_dtype(variable.dtype).name} of shape {variable.shape}: gradients of "
                "float32, float64, float16 and bfloat16 and of known shape can be synchronized sparsely"
            )
        density = rules.density_of(name, num_elements) or 0.0
        shape = tuple(tf.TensorShape(variable.shape).as_list())
        facts[name] = ParameterFacts(name, num_elements, dtype, density=density, shape=shape), variable
    return facts


def planned(
    facts: Facts,
    sparsifier: Sparsifier,
    process_set: Any,
    request: PlanRequest | None,
    arguments: Mapping[str, Any],
    topology: Callable[[], Topology | None] = lambda: None,
) -> FirstPlan:
    """The plan to begin with, the same on all ranks.

    Args:
        facts: as made by `facts_of`.
        sparsifier: that the buckets have.
        process_set: the ranks.
        request: how plans are made, if `merging` or `tensor_selection` ask for it; see `plan_request`.
        arguments: of `make_plan`, if not.
        topology: tells which ranks share a host, where their gradients are summed first.

    Returns:
        The plan, why it was taken where a profile or formulas decided, and how further ones are made.

    Raises:
        ArgumentError: for a plan that does not fit.
        ProfileMismatchError: on every rank alike, if ranks ask for different things, or a profile cannot
            be read or applied.
        StateMismatchError: on every rank alike, if their models differ.
    """
    together(check_agreement(request), process_set)

    def where() -> Where:
        return dataclasses.replace(where_of(process_set), topology=topology())

    first = first_plan(request, facts, sparsifier, where, **arguments)
    if request is not None:
        together(raise_together(first.failure), process_set)
    return dataclasses.replace(first, plan=agree(first.plan, facts, process_set))


def together(coroutine: Synchronization[Any], process_set: Any) -> Any:
    """What a coroutine returns that all ranks run now, also while a function is traced.

    In elastic training, where a worker that joins traces while the others go on, and with one rank, this
    rank runs it alone.

    Its collectives have the same names whatever they are about: a rank that is about something else is an
    error then, where it would wait for ever otherwise.

    Args:
        coroutine: yields requests.
        process_set: the ranks.
    """
    alone = process_set.size() == 1 or is_elastic()
    if alone:
        return carry_out(coroutine, lambda request: request.buffer)  # type: ignore[union-attr]
    with tf.init_scope(), tf.device("/cpu:0"):
        look = building.looking(process_set)
        return carry_out_together(coroutine, process_set, _name(process_set), look)


def agree(plan: Plan, facts: Facts, process_set: Any) -> Plan:
    """The plan of the process set's first rank, after a check that all ranks have the same variables.

    One collective, when variables are seen for the first time (while a function is traced, or in the
    first eager step); none in elastic training, where a worker that joins traces while the others go on.

    Args:
        plan: of this rank.
        facts: as made by `facts_of`.
        process_set: the ranks that take part.

    Raises:
        StateMismatchError: on every rank, if the models differ.
    """
    if process_set.size() == 1 or is_elastic():
        return plan
    line = describe_model(plan, [fact for fact, _ in facts.values()])
    with tf.init_scope(), tf.device("/cpu:0"):
        message = tf.constant(np.frombuffer(line, np.uint8))
        gathered = hvd.allgather(message, name=_name(process_set), process_set=process_set)
        return agreed_plan(gathered.numpy().tobytes())


def ranks_of(process_set: Any) -> str:
    """A process set, in words that are the same on all of its ranks."""
    return "all" if process_set is hvd.global_process_set else str(list(process_set.ranks))


def compare_densely(compression: Any, process_set: Any, **arguments: object) -> None:
    """Ranks that send whole gradients compare their arguments: some rank may sparsify.

    A collective, where gradients are reduced for the first time, which all ranks do. None in elastic
    training, where a worker that joins traces while the others go on.

    Args:
        compression: one of Horovod's compressors.
        process_set: the ranks.
        **arguments: see `settings`.

    Raises:
        StateMismatchError: on every rank alike, if they differ.
    """
    if not takes_part(process_set) or process_set.size() == 1 or is_elastic():
        return
    name = str(getattr(compression, "__name__", type(compression).__name__))
    name = {"NoneCompressor": "none", "FP16Compressor": "fp16"}.get(name, name)
    given = settings(name, "horovod.tensorflow", process_set=ranks_of(process_set), **arguments)
    together(compared(given), process_set)


def op_name(op: Any) -> str:
    """Of one of Horovod's reductions."""
    return {hvd.Average: "Average", hvd.Sum: "Sum", hvd.Adasum: "Adasum"}.get(op, str(op))


def label_of(prefix: str, process_set: Any, variables: Sequence[Any]) -> str:
    """A name for collectives about these variables, taken when the first of them is due: see `next_label`.

    Args:
        prefix: what it is for.
        process_set: the ranks.
        variables: of the model.
    """
    model = [(variable.shape, tf.as_dtype(variable.dtype).name) for variable in variables]
    return next_label(f"{prefix}.{process_set.process_set_id}", model)


def renamed(facts: Facts, label: str, process_set: Any) -> tuple[str, dict[str, tuple[ParameterFacts, Any]]]:
    """The first rank's label, and the facts by its names: see `common_names`. A collective, as `agree` is."""
    parameters = [fact for fact, _ in facts.values()]
    label, names = together(common_names(label, parameters), process_set)
    known = {
        names[name]: (dataclasses.replace(fact, name=names[name]), variable)
        for name, (fact, variable) in facts.items()
    }
    return label, known


def _name(process_set: Any) -> str:
    return f"horovod_sparse.{process_set.process_set_id}.plan"
