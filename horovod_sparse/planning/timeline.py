"""How a step goes under a plan: one queue of computation, one of communication."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_sparse.planning.cost_model import CostModel
from horovod_sparse.planning.workload import Workload
from horovod_sparse.plans.plan import Plan


@dataclass(frozen=True)
class Span:
    """Something that occupies one of the two queues.

    Attributes:
        kind: "forward", "backward", "selection" (of a bucket) or "packing" (of a parameter that stays dense)
            on the computation queue; "sparse" or "dense" on the communication queue.
        start: seconds from the beginning of the step.
        end: likewise.
        buckets: numbers of the buckets it belongs to (several where messages are fused); empty for
            forward, and for what belongs to dense parameters.
        names: the parameters it belongs to, in backward order.
    """

    kind: str
    start: float
    end: float
    buckets: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """Both queues of a step, as plain data: what a picture or a comparison with a measurement needs.

    Attributes:
        computation: spans one behind the other.
        communication: spans that do not overlap; gaps are waiting for a gradient.
    """

    computation: tuple[Span, ...]
    communication: tuple[Span, ...]

    @property
    def computation_end(self) -> float:
        """Seconds until the last gradient is there and its bucket selected."""
        return max((span.end for span in self.computation), default=0.0)

    @property
    def iteration_seconds(self) -> float:
        """Seconds of the step, Eq. (17): until the last communication ends."""
        ends = [span.end for span in (*self.computation, *self.communication)]
        return max(ends, default=0.0)

    @property
    def visible_seconds(self) -> float:
        """What communication adds to computation: Eq. (9) of OMGS-SGD with its sign put right."""
        return max(0.0, self.iteration_seconds - self.computation_end)


@dataclass(frozen=True)
class _Waiting:
    """A message that is ready for the network."""

    ready: float
    seconds: float
    kind: str
    num_bytes: int
    bucket: int | None
    names: tuple[str, ...]


def predict(workload: Workload, plan: Plan, cost: CostModel) -> Timeline:
    """The two queues of a step, Eqs. (5) to (8) and (17) of OMGS-SGD.

    Computation: backward of one parameter after the other; when the last gradient of a bucket is there,
    its selection, and then backward goes on. Communication: in the order of readiness, one at a time,
    each not before it is ready. A dense parameter is ready with its gradient. What `cost` fuses and
    waits together goes together.

    Args:
        workload: parameters and their backward times.
        plan: every parameter in a bucket or dense.
        cost: of selection and communication.

    Returns:
        The timeline.

    Raises:
        ArgumentError: the plan does not fit the parameters.

    Example:
        >>> from horovod_sparse.cost import AffineTime
        >>> from horovod_sparse.merging import ParameterFacts, layerwise
        >>> workload = Workload((ParameterFacts("a", 100), ParameterFacts("b", 100)), (2.0, 1.0))
        >>> cost = CostModel(AffineTime(0.5), AffineTime(3.0), AffineTime())
        >>> timeline = predict(workload, layerwise(workload, cost), cost)
        >>> timeline.computation_end, timeline.iteration_seconds  # b: 1, 1.5, 4.5; a: 3.5, 4.0, then 7.5
        (4.0, 7.5)
    """
    plan.check(workload.parameters)
    facts = {parameter.name: parameter for parameter in workload.parameters}
    bucket_of = {name: number for number, names in enumerate(plan.buckets) for name in names}
    missing = [len(names) for names in plan.buckets]
    clock, computation, waiting = 0.0, [], []
    if workload.forward_seconds:
        clock = workload.forward_seconds
        computation.append(Span("forward", 0.0, clock))
    for parameter, seconds in zip(workload.backward, reversed(workload.backward_seconds), strict=True):
        number = bucket_of.get(parameter.name)
        here, name = () if number is None else (number,), (parameter.name,)
        computation.append(Span("backward", clock, clock + seconds, here, name))
        clock += seconds
        if number is None:
            size = parameter.num_bytes
            packing = float(cost.dense_work.seconds(parameter.num_elements))
            if packing:
                computation.append(Span("packing", clock, clock + packing, (), name))
                clock += packing
            waiting.append(_Waiting(clock, float(cost.dense.seconds(size)), "dense", size, None, name))
            continue
        missing[number] -= 1
        if missing[number] == 0:
            names = plan.buckets[number]
            total = sum(facts[name].num_elements for name in names)
            selection = float(cost.selection.seconds(total))
            computation.append(Span("selection", clock, clock + selection, here, names))
            clock += selection
            sending = float(cost.communication.seconds(total))
            waiting.append(_Waiting(clock, sending, "sparse", 0, number, names))
    communication = _communicate(waiting, cost)
    return Timeline(tuple(computation), tuple(communication))


def _communicate(waiting: list[_Waiting], cost: CostModel) -> list[Span]:
    """Serves messages in order of readiness; fuses what may be fused and is ready when the network is."""
    startup = {"sparse": cost.communication.fixed_seconds, "dense": cost.dense.fixed_seconds}
    fused = {"sparse": cost.fuse_sparse, "dense": cost.fuse_dense}
    spans, free, queue = [], 0.0, list(waiting)
    while queue:
        first = queue.pop(0)
        start = max(free, first.ready)
        together, num_bytes = [first], first.num_bytes
        if fused[first.kind]:
            for message in queue:
                if message.ready > start:
                    break
                if message.kind == first.kind and num_bytes + message.num_bytes <= cost.fusion_bytes:
                    together.append(message)
                    num_bytes += message.num_bytes
            taken = set(map(id, together))
            queue = [message for message in queue if id(message) not in taken]
        seconds = sum(message.seconds for message in together) - (len(together) - 1) * startup[first.kind]
        free = start + seconds
        buckets = tuple(message.bucket for message in together if message.bucket is not None)
        names = tuple(name for message in together for name in message.names)
        spans.append(Span(first.kind, start, free, buckets, names))
    return spans
