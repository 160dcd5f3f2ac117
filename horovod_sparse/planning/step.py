"""A step of a model, and how it goes under a plan: one queue of computation, one of communication."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from horovod_sparse.checks import check_seconds
from horovod_sparse.errors import ArgumentError, ProfileMismatchError
from horovod_sparse.planning.cost_model import CostModel
from horovod_sparse.plans import ParameterFacts, Plan, by_kind


@dataclass(frozen=True)
class Workload:
    """Parameters and the time that backward takes for each.

    Args:
        parameters: in the order in which the model uses them (forward).
        backward_seconds: as many; from the gradient before it (in backward order) to its own.
        forward_seconds: of the step before backward begins.
        dense: names of parameters that are not sparsified; their allreduce shares the network.
    """

    parameters: tuple[ParameterFacts, ...]
    backward_seconds: tuple[float, ...]
    forward_seconds: float = 0.0
    dense: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if len(self.parameters) != len(self.backward_seconds):
            given = f"{len(self.backward_seconds)} times for {len(self.parameters)} parameters"
            raise ArgumentError("backward_seconds", given, "one time for every parameter")
        for parameter, seconds in zip(self.parameters, self.backward_seconds, strict=True):
            check_seconds(f"backward_seconds of {parameter.name}", seconds)
        check_seconds("forward_seconds", self.forward_seconds)
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
        """The parameters that stay dense, in backward order."""
        return tuple(parameter.name for parameter in self.backward if parameter.name in self.dense)

    def with_dense(self, dense: Collection[str]) -> Workload:
        return dataclasses.replace(self, dense=frozenset(dense))


def plan_of_segments(workload: Workload, segments: Sequence[int]) -> Plan:
    """Returns the plan that merges runs of neighbours; a run of several kinds becomes a bucket for each.

    Runs end at `segments`: ascending positions in backward order among the sparse parameters, the last one
    being their number.
    """
    backward, starts = workload.sparse[::-1], [0, *segments]
    merged = [by_kind(backward[start:stop]) for start, stop in itertools.pairwise(starts)]
    return Plan(tuple(bucket for buckets in merged for bucket in buckets), workload.dense_names)


class Span(NamedTuple):
    """A time during which one of the queues is busy, in seconds from the beginning of the step.

    `kind` is "forward", "backward", "selection" (of a bucket) or "packing" (of a parameter that stays dense)
    in computation, and "sparse" or "dense" in communication.
    """

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Both queues of a step, as spans one behind the other; gaps in communication wait for a gradient."""

    computation: tuple[Span, ...]
    communication: tuple[Span, ...]

    @property
    def computation_end(self) -> float:
        """Seconds until the last gradient is there and its bucket selected."""
        return max((span.end for span in self.computation), default=0.0)

    @property
    def iteration_seconds(self) -> float:
        """Seconds of the step, Eq. (17): until the last communication ends."""
        return max((span.end for span in (*self.computation, *self.communication)), default=0.0)

    @property
    def visible_seconds(self) -> float:
        """What communication adds to computation: Eq. (9) of OMGS-SGD with its sign put right."""
        return max(0.0, self.iteration_seconds - self.computation_end)


class _Message(NamedTuple):
    kind: str
    ready: float
    seconds: float
    num_bytes: int = 0


def predict(workload: Workload, plan: Plan, cost: CostModel) -> Timeline:
    """Returns the two queues of a step, Eqs. (5) to (8) and (17) of OMGS-SGD.

    Computation: backward of one parameter after the other; when the last gradient of a bucket is there,
    its selection, and then backward goes on. Communication: in the order of readiness, one at a time,
    each not before it is ready. A dense parameter is ready with its gradient. What `cost` fuses and
    waits together goes together.
    """
    plan.check(workload.parameters)
    elements = {parameter.name: parameter.num_elements for parameter in workload.parameters}
    bucket_of = {name: number for number, names in enumerate(plan.buckets) for name in names}
    missing = [len(names) for names in plan.buckets]
    computation: list[Span] = []
    messages: list[_Message] = []

    def work(kind: str, seconds: float) -> float:
        start = computation[-1].end if computation else 0.0
        computation.append(Span(kind, start, start + seconds))
        return start + seconds

    if workload.forward_seconds:
        work("forward", workload.forward_seconds)
    for parameter, seconds in zip(workload.backward, reversed(workload.backward_seconds), strict=True):
        ready, number = work("backward", seconds), bucket_of.get(parameter.name)
        if number is None:
            if packing := float(cost.dense_work.seconds(parameter.num_elements)):
                ready = work("packing", packing)
            size = parameter.num_bytes
            messages.append(_Message("dense", ready, float(cost.dense.seconds(size)), size))
            continue
        missing[number] -= 1
        if missing[number] == 0:
            total = sum(elements[name] for name in plan.buckets[number])
            ready = work("selection", float(cost.selection.seconds(total)))
            messages.append(_Message("sparse", ready, float(cost.communication.seconds(total))))
    return Timeline(tuple(computation), tuple(_communicate(messages, cost)))


def _communicate(messages: list[_Message], cost: CostModel) -> list[Span]:
    """Serves messages in order of readiness; fuses what may be fused and is ready when the network is."""
    startup = {"sparse": cost.communication.fixed_seconds, "dense": cost.dense.fixed_seconds}
    fused = {"sparse": cost.fuse_sparse, "dense": cost.fuse_dense}
    spans, free = list[Span](), 0.0
    while messages:
        first, *others = messages
        start, num_bytes, seconds, messages = max(free, first.ready), first.num_bytes, first.seconds, []
        for one in others:
            alike = fused[first.kind] and one.kind == first.kind and one.ready <= start
            if alike and num_bytes + one.num_bytes <= cost.fusion_bytes:
                num_bytes, seconds = num_bytes + one.num_bytes, seconds + one.seconds - startup[one.kind]
            else:
                messages.append(one)
        free = start + seconds
        spans.append(Span(first.kind, start, free))
    return spans
