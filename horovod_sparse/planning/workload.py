"""A step of a model, as a plan is made for it: parameters and times."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from horovod_sparse.checks import check_seconds
from horovod_sparse.errors import ArgumentError, ProfileMismatchError
from horovod_sparse.plans.plan import ParameterFacts, Plan, by_kind


@dataclass(frozen=True)
class Workload:
    """Parameters and the time that backward takes for each.

    Args:
        parameters: in the order in which the model uses them (forward).
        backward_seconds: as many; from the gradient before it (in backward order) to its own.
        forward_seconds: of the step before backward begins.
        dense: names of parameters that are not sparsified; their allreduce shares the network.

    Raises:
        ArgumentError: a time is missing, negative or not finite, or `dense` names no parameter.
        ProfileMismatchError: all backward times are 0, so that nothing was measured.

    Example:
        >>> workload = Workload((ParameterFacts("a", 10), ParameterFacts("b", 20)), (0.002, 0.001))
        >>> [parameter.name for parameter in workload.backward]
        ['b', 'a']
    """

    parameters: tuple[ParameterFacts, ...]
    backward_seconds: tuple[float, ...]
    forward_seconds: float = 0.0
    dense: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", tuple(self.parameters))
        object.__setattr__(self, "backward_seconds", tuple(map(float, self.backward_seconds)))
        object.__setattr__(self, "dense", frozenset(self.dense))
        if len(self.parameters) != len(self.backward_seconds):
            given = f"{len(self.backward_seconds)} times for {len(self.parameters)} parameters"
            raise ArgumentError("backward_seconds", given, "one time for every parameter")
        for parameter, seconds in zip(self.parameters, self.backward_seconds, strict=True):
            check_seconds(f"backward_seconds of {parameter.name}", seconds, "seconds, 0 or more")
        check_seconds("forward_seconds", self.forward_seconds, "seconds, 0 or more")
        if self.parameters and not any(self.backward_seconds):
            raise ProfileMismatchError("backward takes no time for any parameter: nothing was measured")
        if unknown := sorted(self.dense - {parameter.name for parameter in self.parameters}):
            raise ArgumentError("dense", unknown, "only names of parameters")

    @property
    def backward(self) -> tuple[ParameterFacts, ...]:
        """The parameters in the order in which their gradients come."""
        return self.parameters[::-1]

    @property
    def sparse(self) -> tuple[ParameterFacts, ...]:
        """The parameters that are sparsified, in forward order."""
        return tuple(parameter for parameter in self.parameters if parameter.name not in self.dense)

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The parameters that are not, in backward order."""
        return tuple(parameter.name for parameter in self.backward if parameter.name in self.dense)

    def with_dense(self, dense: Collection[str]) -> Workload:
        """The same step with another choice of what stays dense."""
        return dataclasses.replace(self, dense=frozenset(dense))


def whole_parameters(parameters: Sequence[ParameterFacts]) -> frozenset[str]:
    """Names of those that a rule of the compressor leaves dense."""
    return frozenset(parameter.name for parameter in parameters if parameter.density == 1.0)


def plan_of_segments(workload: Workload, segments: Sequence[int]) -> Plan:
    """The plan that merges runs of neighbours.

    A bucket holds one dtype, device and parameter group, and no more elements than int32 can count:
    a segment that mixes kinds becomes a bucket for each.

    Args:
        workload: gives the sparse parameters.
        segments: where they end: ascending positions in backward order among the sparse parameters,
            the last one being their number.

    Example:
        >>> facts = tuple(ParameterFacts(name, 1) for name in "abc")
        >>> plan_of_segments(Workload(facts, (1.0, 1.0, 1.0)), [1, 3]).buckets
        (('c',), ('b', 'a'))
    """
    backward, starts = workload.sparse[::-1], [0, *segments]
    merged = [by_kind(backward[start:stop]) for start, stop in itertools.pairwise(starts)]
    return Plan(tuple(bucket for buckets in merged for bucket in buckets), workload.dense_names)
