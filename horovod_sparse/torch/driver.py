"""PyTorch over Horovod: its import and private names, the driver of coroutines, and a training's engine.

Horovod's optimizers register gradient hooks in `_register_hooks`, after they have checked their arguments:
`pass_new_optimizers_to` takes over those with a sparsifier there. A parameter belongs to the optimizer made
for it last, of this package or of Horovod (`claim`). Every ``hvd.init()`` makes a new table of handles, which
Horovod 0.28.1 keeps in Python: comparing tables by identity notices a new start.

**Who frees tensors.** When a worker is lost, Horovod's thread lets go of all tensors under way while it holds
a mutex. Freeing a tensor needs the interpreter's lock if Python's reference is the last one; and a hook that
starts a collective holds that lock and waits for that mutex: both wait for ever. So every tensor that Horovod
gets is also held by another tensor (`hold_tensors`) until its collective has succeeded, or Horovod starts
again.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from horovod_sparse import carriers, collectives, errors
from horovod_sparse.collectives import Request, Synchronization
from horovod_sparse.feedback import Recipe
from horovod_sparse.tensors.layout import readable_tensor
from horovod_sparse.tensors.models import claim, new_facts
from horovod_sparse.topology import Placement, Topology
from horovod_sparse.training.collective_errors import ConstructionErrors, horovod_binding
from horovod_sparse.training.deadline import Deadline
from horovod_sparse.training.engine import Driver, Facts, Handle, carry_out
from horovod_sparse.training.settings import requested_transport
from horovod_sparse.training.training import Training

_log = logging.getLogger("horovod_sparse")

hvd: Any = horovod_binding("PyTorch", has="allreduce_async")
HorovodOptimizer: Any = hvd.optimizer._DistributedOptimizer

#: a start of Horovod, and by handle the tensors of its collectives in flight
_holders: tuple[Any, dict[int, list[torch.Tensor]]] = (None, {})


#: gives a token of Horovod's present start: compare it with ``is``, and hold it to compare with later
present_start: Callable[[], Any] = partial(getattr, hvd.mpi_ops, "_handle_map")


def pass_new_optimizers_to(adopt: Callable[[Any], bool]) -> None:
    """Makes Horovod call `adopt` with each new optimizer; if that is False, Horovod registers its hooks."""
    for kind in (HorovodOptimizer, hvd.optimizer._DistributedAdasumOptimizer):

        def register_or_adopt(self: Any, register: Callable[[Any], None] = kind._register_hooks) -> None:
            if not adopt(self):
                register(self)

        kind._register_hooks = register_or_adopt


def tensor_holding(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a new tensor with `tensor` as its `.grad`, which keeps it alive without a Python reference."""
    while True:
        holder = tensor.new_empty(()).expand(tensor.shape)
        try:
            holder.grad = tensor
        except RuntimeError:
            # PyTorch wants both of one shape; Horovod's thread may have given an output its own meanwhile
            if holder.shape == tensor.shape:
                raise
        else:
            return holder


def hold_tensors(handle: int) -> int:
    """Keeps a started collective's tensors alive until `wait_for_result`; returns the handle."""
    global _holders
    start = present_start()
    if _holders[0] is not start:
        _holders = start, {}
    under_way = _pytree.tree_leaves(start[handle])
    _holders[1][handle] = [tensor_holding(one) for one in under_way if isinstance(one, torch.Tensor)]
    return handle


def wait_for_result(handle: int) -> Any:
    """Waits for a collective, and returns its result."""
    result = hvd.synchronize(handle)
    if _holders[0] is present_start():
        _holders[1].pop(handle, None)
    return result


class _HorovodOwner:
    """Marks parameters as those of Horovod's own optimizer, whose hooks `retire` can disable."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    def retire(self) -> None:
        """Disables the hooks of Horovod's optimizer, which would wait for passes that never come."""
        if (optimizer := self._optimizer()) is not None:
            optimizer._grad_accs.clear()
            optimizer._allreduce_delay = dict.fromkeys(optimizer._allreduce_delay, sys.maxsize)


def claim_for_horovod(optimizer: Any) -> None:
    """Makes one of Horovod's own optimizers the owner of its parameters (`claim`)."""
    optimizer._owner_of_parameters = _HorovodOwner(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # claims among Horovod's own optimizers need no action
    claim(optimizer._owner_of_parameters, parameters, spared=_HorovodOwner)


class _HorovodHandle:
    """A collective in flight: Horovod's handle, and a function that turns its tensors into the result."""

    def __init__(self, handle: int, tensor: torch.Tensor, answer: Callable[[Any], Any]) -> None:
        self._handle, self._answer = hold_tensors(handle), answer
        self._tensor = tensor  # Horovod reads its memory until the collective is done

    def done(self) -> bool | None:
        # hvd.init() makes a new map and reuses handles, so a handle alone is not unique
        entry = present_start().get(self._handle)
        if entry is None or entry[0] is not self._tensor:
            return None
        try:
            return bool(hvd.poll(self._handle))
        except ValueError:  # Horovod was shut down
            return None

    def result(self) -> Any:
        return self._answer(wait_for_result(self._handle))


def _start_native(request: Request, name: str, process_set: Any) -> Handle:
    begin: Any
    if isinstance(request, (collectives.AllGather, collectives.Broadcast)):
        tensor, begin = readable_tensor(request.buffer), hvd.allgather_async
        if isinstance(request, collectives.Broadcast):  # Horovod counts roots in the world, not in the set
            begin = partial(hvd.broadcast_async, root_rank=process_set.ranks[request.root])
        return _HorovodHandle(begin(tensor, name=name, process_set=process_set), tensor, torch.Tensor.numpy)
    if isinstance(request, (collectives.AllReduce, collectives.ReduceScatter)):
        tensor, answer = _as_summable(request.buffer)
        whole = isinstance(request, collectives.AllReduce)
        begin = hvd.allreduce_async if whole else hvd.reducescatter_async
        return _HorovodHandle(begin(tensor, op=hvd.Sum, name=name, process_set=process_set), tensor, answer)
    if isinstance(request, collectives.Exchange):
        received = partial(carriers.inbox, request, whose=f"{name}: rank {process_set.rank()}")
        sends = carriers.as_alltoall(request, process_set.size())
        return _start_alltoall(sends, name, process_set, received)
    return _start_alltoall(list(request.buffers), name, process_set, list)


def _start_reduce_scatter(
    request: collectives.ReduceScatter, name: str, process_set: Any, ranks: Sequence[int]
) -> Handle:
    """Starts a reduce-scatter as an all-to-all, which is faster on the host than Horovod's own."""
    tensor, answer = _as_summable(request.buffer)
    splits = torch.zeros(process_set.size(), dtype=torch.int32)
    for place, rank in enumerate(ranks):
        begin, end = collectives.rank_part(tensor.numel(), place, len(ranks))
        splits[rank] = end - begin
    handle = hvd.alltoall_async(tensor, splits=splits, name=name, process_set=process_set)

    def add_up(output: tuple[torch.Tensor, torch.Tensor]) -> Any:
        parts = output[0].view(len(ranks), -1)
        total = parts[0] + parts[1]
        for one in parts[2:]:
            total += one
        return answer(total)

    return _HorovodHandle(handle, tensor, add_up)


def _start_alltoall(
    buffers: list[np.ndarray], name: str, process_set: Any, answer: Callable[[list[np.ndarray]], Any]
) -> Handle:
    tensor = readable_tensor(np.concatenate(buffers))
    splits = torch.tensor([buffer.size for buffer in buffers], dtype=torch.int32)
    handle = hvd.alltoall_async(tensor, splits=splits, name=name, process_set=process_set)

    def split(output: tuple[torch.Tensor, torch.Tensor]) -> Any:
        received, lengths = output
        return answer(np.split(received.numpy(), np.cumsum(lengths.numpy())[:-1]))

    return _HorovodHandle(handle, tensor, split)


def _as_summable(buffer: np.ndarray | torch.Tensor) -> tuple[torch.Tensor, Callable[[Any], Any]]:
    """Returns a buffer as a tensor that Horovod can sum, and a function that converts the sum back."""
    if not isinstance(buffer, torch.Tensor):
        return readable_tensor(buffer), torch.Tensor.numpy
    # which this build of Horovod has or has not
    function = f"horovod_torch_allreduce_async_{buffer.type().replace('.', '_')}"
    if buffer.device.type == "cpu" or hasattr(hvd.mpi_ops.mpi_lib, function):
        return buffer, lambda total: total
    errors.warn_once(
        "Horovod is built without operations on %s: dense parameters are summed on the host. To sum them on "
        "the device, build it with HOROVOD_GPU_OPERATIONS=NCCL (scripts/setup --gpu)",
        buffer.device.type,
    )
    return buffer.cpu(), lambda total: total.to(buffer.device)


class HorovodDriver(Driver):
    def __init__(
        self,
        process_set: Any = hvd.global_process_set,
        deadline_seconds: float | None = None,
        topology: Topology | None = None,
    ) -> None:
        self.process_set, self._topology = process_set, topology
        self.mpi: carriers.MpiCarrier | None = None
        #: how messages between pairs of ranks travel, and why; empty before `choose_transport`
        self.transport = ""
        self._connected_under: Any = None
        deadline = Deadline(deadline_seconds, lambda: (int(process_set.rank()), list(process_set.ranks)))
        super().__init__(hvd.HorovodInternalError, process_set.size, deadline)

    def start_request(self, request: Request, name: str) -> Handle:
        if self.process_set.size() is None:
            allowed = "one that hvd.init() or hvd.add_process_set() has set up"
            raise errors.ArgumentError("process_set", self.process_set, allowed)
        if request.level != "all":
            return self._start_as_messages(request, name)
        if self.mpi is not None and self.mpi.carries(request):
            return self.mpi.start(request, name)
        return _start_native(request, name, self.process_set)

    def _start_as_messages(self, request: Request, name: str) -> Handle:
        """Starts a collective within a host or a column as messages, since process sets slow every cycle."""
        rank = self.process_set.rank()
        if self._topology is None:
            raise errors.CollectiveMismatchError(f"{name}: level {request.level!r} needs a topology")
        ranks = self._topology.group(request.level, rank)
        if isinstance(request, collectives.ReduceScatter) and len(ranks) > 1 and list(ranks) == sorted(ranks):
            return _start_reduce_scatter(request, name, self.process_set, ranks)
        return carriers.Rounds(self.start_request, carriers.answer_among(request, ranks, rank), name)

    def forget_messages(self) -> None:
        if self.mpi is not None:
            self.mpi.forget()

    def begin(self, training: Training) -> None:
        """Called on all ranks once they have agreed: takes label and topology, and chooses the transport."""
        self.label, self._topology = training.label, training.topology
        self.choose_transport()
        sparsifiers = (part.bucket.recipe.sparsifier for part in training.sparse)
        kinds = {kind for sparsifier in sparsifiers for kind in sparsifier.rounds(training.size)}
        if self._topology is not None or collectives.Exchange in kinds:
            training.telemetry.transport = self.transport

    def choose_transport(self) -> None:
        """Makes messages between pairs of ranks go over MPI, if every rank can use it.

        Does so once after each start of Horovod; all ranks call it together.
        """
        since = present_start()
        if self._connected_under is since or self.process_set.size() == 1:
            return
        own = carriers.why_not_mpi(hvd)
        self._connected_under, self.mpi, reasons = since, None, [own]
        if hvd.mpi_enabled():
            name = "horovod_sparse.transport"
            reasons = carry_out_together(collectives.gather_values(own), self.process_set, name)
        told = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
        if told:
            self.transport = f"Horovod's all-to-all ({own if set(reasons) == {own} else told[0]})"
        else:
            self.transport = "MPI, on a communicator of their own (every rank can)"
            self.mpi = carriers.MpiCarrier(self.process_set.ranks, lambda: present_start() is since)
        in_vain = told and self.process_set.rank() == 0 and requested_transport() == "pairs"
        level = logging.WARNING if in_vain else logging.INFO
        _log.log(level, "messages between two ranks go through %s", self.transport)


def carry_out_together(
    coroutine: Synchronization[Any],
    process_set: Any,
    name: str,
    note_start: Callable[[float], object] | None = None,
    deadline_seconds: float | None = None,
    meanwhile: Callable[[], None] | None = None,
    topology: Topology | None = None,
) -> Any:
    """Runs a coroutine on all ranks, and returns its result; calls `meanwhile` again and again in waits."""
    driver = HorovodDriver(process_set, deadline_seconds, topology)

    def execute(request: Request) -> Any:
        started = time.perf_counter()
        task = driver.start(f"{name}.{type(request).__name__}", collectives.single_request(request))
        if note_start is not None:
            note_start(time.perf_counter() - started)
        driver.wait([task], meanwhile)
        return task.value()

    return carry_out(coroutine, execute)


def raise_explained(error: BaseException) -> None:
    """Raises an error with a remedy if `error` is a known failure of Horovod; else returns."""
    if isinstance(error, hvd.HorovodInternalError) and "join" in str(error).lower():
        raise errors.UnsupportedError(
            "a rank has called hvd.join(): Horovod can fill in for a joined rank in an allreduce only, and "
            "sparse synchronization needs every rank's message. Give every rank the same number of batches "
            f"(drop_last=True, or a padding sampler) ({error})"
        ) from error


#: of optimizers and compressors
construction_errors = ConstructionErrors.of_horovod(hvd)


class HorovodEngine(HorovodDriver):
    """The `Engine` for one optimizer's parameters over Horovod."""

    name = "horovod_sparse.torch"
    start_token = staticmethod(present_start)

    def __init__(
        self,
        optimizer: Any,
        names: Mapping[torch.Tensor, str],
        recipe: Recipe,
        process_set: Any,
        deadline_seconds: float | None,
    ) -> None:
        super().__init__(process_set, deadline_seconds)
        self.optimizer, self._names, self._recipe = optimizer, dict(names), recipe
        self._deadline_seconds = deadline_seconds

    def rank_and_size(self) -> tuple[int, int]:
        return int(self.process_set.rank()), int(self.process_set.size())

    def placement(self) -> Placement:
        return Placement.of_horovod(hvd, self.process_set)

    def facts(self, known: Facts) -> Facts:
        return new_facts(self.optimizer, known, self._names, self._recipe.rules)

    def carry_out(
        self, coroutine: Synchronization[Any], topology: Topology | None, name: str = "agreement"
    ) -> Any:
        """Runs a coroutine on all ranks, under one name, so that ranks with other arguments take part."""
        return carry_out_together(
            *(coroutine, self.process_set, f"horovod_sparse.{name}"),
            deadline_seconds=self._deadline_seconds,
            meanwhile=construction_errors.watcher(self.process_set),
            topology=topology,
        )

    def declared(self) -> Mapping[str, object]:
        ranks = self.process_set.ranks
        return {"process_set": "all" if ranks is None else list(ranks)}

    def to_array(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())
