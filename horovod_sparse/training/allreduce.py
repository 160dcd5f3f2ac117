"""The sum of a single tensor over ranks: nothing of it is kept for a later one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from horovod_sparse.arrays import GradientParts
from horovod_sparse.carriers.exchanges import answer_for_one_rank
from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import ArgumentError, NonFiniteGradientError, UnsupportedError, warn_once
from horovod_sparse.feedback import Bucket, NoFeedback, Recipe
from horovod_sparse.kernels.host.scatter import apply_scaled_sums
from horovod_sparse.sparsifiers import BucketInfo, SparseSum
from horovod_sparse.training import engine
from horovod_sparse.training.agreement import compared, declaration
from horovod_sparse.training.parts import host_accumulator


class ArrayMemory:
    """Makes accumulators of arrays on the host, and reads and writes these."""

    accumulator, foldable = staticmethod(host_accumulator), GradientParts
    write = staticmethod(apply_scaled_sums)


class LoneTensor:
    """A tensor that is summed by itself: rules apply to its name, feedback has no place.

    Args:
        recipe: sparsifier and rules.
        info: the tensor's facts.
        memory: `ArrayMemory`, or a memory of PyTorch's tensors.
        given: the elements, flat.
        total: becomes the sum, flat.
    """

    def __init__(self, recipe: Recipe, info: BucketInfo, memory: Any, given: Any, total: Any) -> None:
        own = Recipe(recipe.sparsifier, NoFeedback(), recipe.rules)
        own = own.for_parameter(info.name, info.num_elements)
        self._bucket = Bucket(info, own, memory.accumulator(info, own))
        self._given = memory.foldable([given])
        self._write: Callable[..., object] = partial(memory.write, [total], [(0, info.num_elements)])

    def summed(self, facts: Mapping[str, str], scale: float) -> Synchronization[None]:
        """Sums over ranks, once ranks have compared facts; reads the tensor before its first request."""
        report = self._bucket.fold(self._given, None)
        yield from compared(facts)
        self._put((yield from self._bucket.synchronize(report, scale)), scale)

    def write_alone(self) -> bool:
        """Writes what one rank sends; False, and nothing written, if the tensor is not finite."""
        warn_once(
            "Horovod's own allreduce sends every element of what a sparsifier compresses: elements that are "
            "not selected are 0, and are kept for no later call. allreduce of horovod_sparse sends sparsely"
        )
        try:
            self._put(engine.carry_out(self._bucket.step(self._given, scale=1.0), answer_for_one_rank), 1.0)
        except NonFiniteGradientError:
            return False
        return True

    def _put(self, sum_: SparseSum, scale: float) -> None:
        self._write(None if sum_.whole else sum_.indices, sum_.values, scale)


def terms(
    hvd: Any,
    recipe: Recipe,
    op: Any,
    average: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
) -> tuple[float, Callable[[Any, str], dict[str, str]]]:
    """Returns the factor of a sum over ranks, and what ranks have to give alike, by shape and dtype.

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
        raise ArgumentError("process_set", str(process_set), "a set with this rank")

    def facts(shape: Any, dtype: str) -> dict[str, str]:
        given = {"shape": list(shape), "dtype": dtype, "process_set": list(process_set.ranks), "op": chosen}
        factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
        return declaration(recipe, "allreduce", **given, **factors)

    return float(postscale_factor) / (process_set.size() if chosen == "Average" else 1), facts


def refuse_gradients(requires_grad: bool) -> None:
    if requires_grad:
        raise UnsupportedError(
            "the tensor requires a gradient, and a sum that a sparsifier makes has none: give "
            "tensor.detach(), or call this under torch.no_grad()"
        )


#: a start of Horovod, by its `id` (held, lest that returns), and its calls without a name, by process set
_calls: dict[int, tuple[object, Counter[int]]] = {}


def call_name(start: object, process_set: Any) -> str:
    """Names a call without a name by its number, counted anew after each start of Horovod."""
    _, calls = _calls.setdefault(id(start), (start, Counter()))
    calls[process_set.process_set_id] += 1
    return f"noname.{calls[process_set.process_set_id] - 1}"
