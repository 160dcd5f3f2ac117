"""What `compression=` has to know of Horovod's own `DistributedOptimizer`, and of its insides.

Horovod calls ``compression.compress(gradient)`` and tells it no name. Unnamed collectives are out of
the question: ranks count them in the order in which hooks happen to fire. The optimizer that calls
knows all that is needed; so when the user has not passed `named_parameters` to the compressor, the
calling frames are searched for it. Everything here reads attributes that Horovod 0.28.1 has, in one
file, and answers None where they are missing.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import StateMismatchError, UnsupportedError
from horovod_sparse.tensors.parameter_buckets import NamedParameters
from horovod_sparse.topology import Topology
from horovod_sparse.torch._horovod import finished, hvd, present_start
from horovod_sparse.torch.driver import carry_out_together
from horovod_sparse.training.agreement import compared, declaration
from horovod_sparse.training.collective_errors import ConstructionErrors
from horovod_sparse.training.settings import Settings

#: how long ranks that have waited in vain may differ in when they stopped
_ANSWER_SECONDS = 5.0
#: the methods of the stock optimizer that call `compress`, directly or from a list comprehension
_CALLERS = {"_allreduce_grad_async", "_grouped_allreduce_grad_async"}


def calling_optimizer(depth: int = 2, limit: int = 2) -> Any | None:
    """The stock optimizer whose method is calling, if one is."""
    frame: FrameType | None = sys._getframe(depth)
    for _ in range(limit):
        if frame is None:
            return None
        if frame.f_code.co_name in _CALLERS:
            optimizer = frame.f_locals.get("self")
            if isinstance(getattr(optimizer, "_parameter_names", None), dict):
                return optimizer
        frame = frame.f_back
    return None


class StockOptimizer:
    """A stock `DistributedOptimizer`, as far as a compressor needs to know it; does not keep it alive."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        optimizer.register_step_post_hook(_refuse_closures)
        #: without `named_parameters` the optimizer has made names from positions in `param_groups`,
        #: which are the same on all ranks
        self.parameters = NamedParameters(
            (name, parameter) for parameter, name in optimizer._parameter_names.items()
        )
        self._group = {
            id(parameter): i
            for i, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }

    @property
    def process_set(self) -> Any:
        """The ranks that it synchronizes with; None if it does not say."""
        return getattr(self._optimizer(), "process_set", None)

    @property
    def adds_up(self) -> bool:
        """Whether gradients are summed up over ranks, and not averaged."""
        return bool(getattr(self._optimizer(), "op", None) == hvd.Sum)

    def learning_rate(self, parameter: torch.Tensor) -> float | None:
        """The learning rate of the parameter's group, where there is one."""
        optimizer = self._optimizer()
        if optimizer is None or id(parameter) not in self._group:
            return None
        rate = optimizer.param_groups[self._group[id(parameter)]].get("lr")
        return None if rate is None else float(rate)

    def forget_step(self) -> None:
        """Makes it ready for a new backward pass after a step was given up; gradients become 0.

        What it still has under way is waited for: all ranks give up the same step, after having
        submitted all of it.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for handle, _ in optimizer._handles.values():
            if callable(handle):
                handle()
            elif handle is not None:
                finished(handle)
        optimizer._handles.clear()
        for parameter in optimizer._allreduce_delay:
            optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
        for group in optimizer._group_counts:
            optimizer._group_counts[group] = 0
        optimizer._synchronized = False
        for parameter in self.parameters.tensors:
            if parameter.grad is not None:
                parameter.grad.zero_()


#: of optimizers and compressors
construction_errors = ConstructionErrors.of_horovod(hvd)


def arguments_of(optimizer: Any) -> dict[str, object]:
    """What of Horovod's own arguments, of its optimizer or ours, has to be equal on all ranks."""
    ranks = optimizer.process_set.ranks
    return {
        "op": {hvd.Average: "Average", hvd.Sum: "Sum"}.get(optimizer.op, "Adasum"),
        "gradient_predivide_factor": float(optimizer.gradient_predivide_factor),
        "backward_passes_per_step": optimizer.backward_passes_per_step,
        "sparse_as_dense": bool(optimizer.sparse_as_dense),
        "process_set": "all" if ranks is None else list(ranks),
    }


def settings_of(optimizer: Any, compression: object, engine: str) -> dict[str, str]:
    """What of one of Horovod's optimizers has to be equal on all ranks."""
    return declaration(compression, engine, **arguments_of(optimizer), **Settings().describe())


def compare_with_ranks(
    coroutine: Synchronization[Any],
    process_set: Any,
    optimizer: Any = None,
    deadline_seconds: float | None = None,
    topology: Topology | None = None,
) -> Any:
    """Runs what ranks begin with, under one name whatever they go on with: see `compared`."""
    hear = construction_errors.looking(process_set)
    waiting = [] if optimizer is None else [(optimizer, key) for key in optimizer._handles]

    def look() -> None:
        hear()
        if waiting and _took_one(waiting):
            waiting.clear()

    return carry_out_together(
        *(coroutine, process_set, "horovod_sparse.agreement"),
        deadline_seconds=deadline_seconds,
        meanwhile=look,
        topology=topology,
    )


def refuse_whole_gradients(names: Sequence[str], process_set: Any) -> None:
    """After ranks have been waited for in vain: finds out whether one sends whole gradients, and ends that.

    It waits for collectives of the parameters' names. Putting another type under such a name is an error of
    Horovod's on all ranks. Nothing goes on afterwards in any case, so it does not matter if nobody answers.
    """
    other = torch.float64
    handles = [
        hvd.allreduce_async(torch.zeros(1, dtype=other), name=name, process_set=process_set) for name in names
    ]
    until = time.monotonic() + _ANSWER_SECONDS
    while not all(map(hvd.poll, handles)) and time.monotonic() < until:
        time.sleep(0.01)
    for handle in handles:
        try:
            if hvd.poll(handle):
                hvd.synchronize(handle)
        except hvd.HorovodInternalError as error:
            if "mismatched" in str(error).lower():
                raise _sends_whole_gradients(error) from error


def _sends_whole_gradients(error: Exception) -> StateMismatchError:
    return StateMismatchError(
        f"compression differs: another rank sends whole gradients ({error}); give all ranks the same"
    )


def _took_one(waiting: list[tuple[Any, Any]]) -> bool:
    """Whether a number came back that was sent in a gradient's place; Horovod's optimizer gets it later."""
    for optimizer, key in waiting:
        handle, ctx = optimizer._handles[key]
        if isinstance(key, tuple) or handle is None or callable(handle) or not hvd.poll(handle):
            continue
        try:
            output = finished(handle)
        except hvd.HorovodInternalError as error:
            if "mismatched data type" not in str(error).lower():
                # one that is given up, or of an optimizer with other arguments: it will say so itself
                optimizer._handles[key] = functools.partial(_given, error), ctx
                return True
            raise _sends_whole_gradients(error) from error
        optimizer._handles[key] = functools.partial(_given, output), ctx
        return True
    return False


def _given(output: torch.Tensor | Exception) -> torch.Tensor:
    if isinstance(output, Exception):
        raise output
    return output


def before_synchronizing(optimizer: Any, meet: Callable[[Any], None]) -> None:
    """Has something done before Horovod's own optimizer waits for anything."""
    cls = type(optimizer)
    synchronize = cls.synchronize

    @functools.wraps(synchronize)
    def met(self: Any) -> None:
        meet(self)
        synchronize(self)

    cls.synchronize = met


def compare_dense(optimizer: Any, compression: object) -> None:
    """Has an optimizer of whole gradients compare its arguments with other ranks, once per start."""
    name = str(getattr(compression, "__name__", type(compression).__name__))
    name = {"NoneCompressor": "none", "FP16Compressor": "fp16"}.get(name, name)
    under: list[Any] = [None]

    def meet(optimizer: Any) -> None:
        start = present_start()
        if under[0] is start or not optimizer.process_set.included() or optimizer.process_set.size() == 1:
            return
        try:
            given = settings_of(optimizer, name, "horovod.torch")
            compare_with_ranks(compared(given), optimizer.process_set)
        except hvd.HorovodInternalError as error:
            if "join" not in str(error).lower():  # a rank without batches has nothing that could differ
                raise
        under[0] = start

    before_synchronizing(optimizer, meet)


def _refuse_closures(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Refuses a step whose closure has computed gradients, once it has ended.

    Horovod's `step` synchronizes before it calls the closure. What backward gives in there is under way
    when the optimizer wants it: it gets this rank's own gradient.
    """
    if any(handle is not None for handle, _ in optimizer._handles.values()):
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step(closure) used gradients before they were synchronized: "
            "Horovod's own optimizer waits for them before it calls the closure. Compute them before step(), "
            "or use horovod_sparse.torch.DistributedOptimizer, which waits after the closure"
        )


def refuse_adasum(optimizer: Any | None, tensor: torch.Tensor) -> None:
    """Refuses what Adasum passes: not gradients, but what a step has done to the parameters."""
    is_adasum = optimizer is not None and (
        hasattr(optimizer, "_starting_models") or getattr(optimizer, "op", None) == hvd.Adasum
    )
    if is_adasum or isinstance(tensor, torch.nn.Parameter):
        raise UnsupportedError(
            "op=Adasum cannot be combined with a sparsifier: it combines whole parameter updates, and a "
            "residual has no place in that. Use op=Average or op=Sum, or compression=Compression.none"
        )
