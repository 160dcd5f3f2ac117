"""The sum of a single tensor over ranks: nothing of it is kept for a later one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from horovod_sparse.arrays import Accumulator
from horovod_sparse.carriers.exchanges import answer_alone
from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import ArgumentError, NonFiniteGradientError, UnsupportedError, warn_once
from horovod_sparse.feedback import Bucket, NoFeedback, Recipe
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.training import engine
from horovod_sparse.training.agreement import compared, declaration
from horovod_sparse.training.parts import host_accumulator

#: writes scale times a sum: indices (None for all elements), values, scale
Write = Callable[[Any, Any, float], object]


def stateless_bucket(
    recipe: Recipe,
    info: BucketInfo,
    accumulator: Callable[[BucketInfo, Recipe], Accumulator] = host_accumulator,
) -> Bucket:
    """Returns a fresh bucket for one tensor: rules apply to its name, feedback has no place."""
    own = Recipe(recipe.sparsifier, NoFeedback(), recipe.rules).for_parameter(info.name, info.num_elements)
    return Bucket(info, own, accumulator(info, own))


def summed(
    bucket: Bucket, tensor: Any, write: Write, facts: Mapping[str, str], scale: float
) -> Synchronization[None]:
    """Sums a tensor over ranks, once ranks have compared facts; reads the tensor before its first request."""
    report = bucket.fold(tensor, None)
    yield from compared(facts)
    sum_ = yield from bucket.synchronize(report, scale)
    write(None if sum_.whole else sum_.indices, sum_.values, scale)


def write_alone(bucket: Bucket, tensor: Any, write: Write) -> bool:
    """Writes a tensor as one rank sends it; False, and nothing written, if the tensor is not finite."""
    warn_once(
        "Horovod's own allreduce sends every element of what a sparsifier compresses: elements that are not "
        "selected are 0, and are kept for no later call. allreduce of horovod_sparse sends sparsely"
    )
    try:
        sum_ = engine.carry_out(bucket.step(tensor, scale=1.0), answer_alone)
    except NonFiniteGradientError:
        return False
    write(None if sum_.whole else sum_.indices, sum_.values, 1.0)
    return True


def agreed_facts(
    recipe: Recipe, shape: Any, dtype: str, process_set: Any, **arguments: object
) -> dict[str, str]:
    """Returns what ranks have to give alike, in words."""
    ranks = list(process_set.ranks)
    return declaration(recipe, "allreduce", shape=list(shape), dtype=dtype, process_set=ranks, **arguments)


def scale_of(hvd: Any, op: Any, average: Any, postscale_factor: float, process_set: Any) -> tuple[str, float]:
    """Returns the operation's name, and the factor of a sum over the ranks of a process set.

    Raises:
        ArgumentError: if the operation is neither Average nor Sum, or this rank is not in the process set.
        UnsupportedError: if the operation is Adasum.
    """
    names = {getattr(hvd, name): name for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product")}
    chosen = names.get(hvd.mpi_ops.handle_average_backwards_compatibility(op, average), str(op))
    if chosen == "Adasum":
        raise UnsupportedError(
            "op=Adasum cannot be combined with a sparsifier, which leaves out what it combines by. Use "
            "op=Average or op=Sum, or compression=Compression.none"
        )
    if chosen not in ("Average", "Sum"):
        allowed = "Average or Sum: elements that a rank does not send count as 0; or Compression.none"
        raise ArgumentError("op", chosen, allowed)
    if not process_set.included():
        raise ArgumentError("process_set", str(process_set), "a set that is set up, and holds this rank")
    return chosen, float(postscale_factor) / (process_set.size() if chosen == "Average" else 1)


def refuse_gradients(requires_grad: bool) -> None:
    if requires_grad:
        raise UnsupportedError(
            "the tensor requires a gradient, and a sum that a sparsifier makes has none: give "
            "tensor.detach(), or call this under torch.no_grad()"
        )


class CallNames:
    """Names calls without a name by their number, counted anew after each start of Horovod."""

    def __init__(self) -> None:
        self._start: object = None
        self._counts: Counter[int] = Counter()

    def next(self, start: object, process_set: Any) -> str:
        if start is not self._start:
            self._start, self._counts = start, Counter()
        number = self._counts[process_set.process_set_id]
        self._counts[process_set.process_set_id] += 1
        return f"noname.{number}"
