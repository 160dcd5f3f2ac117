"""The engine over torch.distributed, its threads that run coroutines, and errors of other ranks."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.carriers import COLLECTIVE_ERRORS, side_by_side
from horovod_sparse.collectives import Synchronization, translate_requests
from horovod_sparse.ddp.collectives import Carrier
from horovod_sparse.errors import DeadlineError
from horovod_sparse.feedback import Recipe
from horovod_sparse.tensors.models import new_facts, trained_by
from horovod_sparse.topology import Placement, Topology
from horovod_sparse.training.collective_errors import ConstructionErrors
from horovod_sparse.training.deadline import Deadline
from horovod_sparse.training.engine import Batch, Facts, Starter, Task

_log = logging.getLogger("horovod_sparse")

#: seconds until the log says which ranks are missing, and between checks
_QUIET_SECONDS, _LOOK_SECONDS = 5.0, 0.05
#: seconds between checks of the deadline; and to wait for a thread that may wait for a lost rank
_CHECK_SECONDS, _END_SECONDS = 0.5, 2.0
_ABSENT = "have not begun their first step: all ranks call attach, or make LocalSteps, and train"

#: by a group's name: number of models at their first step
_begun: Counter[str] = Counter()
#: by group: one that is made when another was destroyed may have its name, and other ranks
_errors: MutableMapping[dist.ProcessGroup, ConstructionErrors] = weakref.WeakKeyDictionary()


class GroupStore:
    """Writes and reads values in a process group's store, like `deadline.launcher_store`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        store = dist.distributed_c10d._get_process_group_store(group)
        self._store = dist.PrefixStore("horovod_sparse.notes", store)

    def __call__(self, scope: str, key: str, value: bytes | None = None) -> bytes | None:
        name = f"{scope}/{key}"
        with contextlib.suppress(RuntimeError):  # the process with the store has ended
            if value is not None:
                self._store.set(name, value)
                self._store.add(f"{name}/there", 1)
            elif self._store.add(f"{name}/there", 0):  # `get` waits for what is not there
                found: bytes = self._store.get(name)
                return found
        return None


def _construction_errors(group: dist.ProcessGroup) -> ConstructionErrors:
    place = dist.get_rank(group), list(range(dist.get_world_size(group)))
    made = ConstructionErrors(lambda _: place, GroupStore(group))
    return _errors.setdefault(group, made)


@contextlib.contextmanager
def sending_errors(wrappers: Sequence[DistributedDataParallel], given: Any) -> Iterator[None]:
    """Returns a context that publishes an error raised in it to the model's other ranks."""
    if getattr(given, "ndim", 0) == 1:  # a mesh
        given = given.get_group()
    group = given if isinstance(given, dist.ProcessGroup) else None
    group = group or (wrappers[0].process_group if wrappers else dist.group.WORLD)
    try:
        yield
    except Exception as error:
        if group is not None:
            _construction_errors(group).publish(error, None)
        raise
    if group is not None:
        _construction_errors(group).withdraw_error()


def await_first_step(group: dist.ProcessGroup, deadline_seconds: float | None) -> Deadline:
    """Waits until all ranks begin their first step; returns the deadline for later collectives.

    An error of a rank that could not attach is raised; the deadline's says which ranks have not come.
    """
    rank, size, store = dist.get_rank(group), dist.get_world_size(group), GroupStore(group)
    number, look = _begun[group.group_name], _construction_errors(group).watcher(None)
    deadline = Deadline(deadline_seconds, lambda: (rank, list(range(size))), store)
    store("came", f"{number}.{rank}", b"yes")
    missing, since, said = list(range(size)), time.monotonic(), False
    while missing := [one for one in missing if store("came", f"{number}.{one}") is None]:
        look()
        waited = time.monotonic() - since
        if waited > min(_QUIET_SECONDS, deadline.seconds) and not said:
            said = True
            _log.warning("waiting: ranks %s %s", missing, _ABSENT)
        if waited > deadline.seconds:
            what = f"the first step (ranks {missing} {_ABSENT})"
            raise DeadlineError(what, 0, deadline.seconds, dict.fromkeys(missing, ""))
        time.sleep(_LOOK_SECONDS)
    _begun[group.group_name] += 1
    return deadline


#: a batch in progress: yields a function that waits for each of its collectives
_Running: TypeAlias = Generator[Callable[[], Any], Any, None]


class _ThreadState:
    """State of a communicator's threads, which holds no reference to the communicator itself."""

    def __init__(self, lanes: Sequence[Carrier]) -> None:
        self.lanes = lanes
        self.waiting: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        #: begun batches: tasks, generator, the function that waits for the first messages, an error
        self.begun: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.free_lanes = threading.Semaphore(len(lanes))
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        #: lock that a thread holds while it runs coroutines, but not while it waits for messages
        self.working = threading.Lock()
        #: seconds that the threads have waited for collectives
        self.idle_seconds = 0.0

    def advance(self, running: _Running, answer: Any = None) -> Callable[[], Any] | None:
        """Resumes a batch and begins its next collective; returns its waiting function, None at the end."""
        with self.working:
            if self.failure is not None:  # the caller may have timed out, and rolled the step back
                raise self.failure
            try:
                return running.send(answer)
            except StopIteration:
                return None


class Communicator(Starter):
    """Runs coroutines in two threads, in the order of their start, which all ranks share.

    torch.distributed matches sums by their order, and its messages can only be waited for. So one thread runs
    batches of tasks up to their first messages, folds and selections included, while backward goes on; the
    other waits for messages, makes sums, and ends the batches in that order. Each batch in flight has a lane.
    """

    def __init__(self, lanes: Sequence[Carrier], deadline: Deadline) -> None:
        self._shared, self._deadline = _ThreadState(lanes), deadline
        #: prefix of names: a process may train several models
        self.label = ""
        threads = [
            threading.Thread(target=loop, args=(self._shared,), name="horovod_sparse.ddp", daemon=True)
            for loop in (_begin_batches, _end_batches)
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _end_threads, self._shared, threads)

    def _begin(self, batch: Batch) -> None:
        self._shared.waiting.put(batch)

    def set_topology(self, topology: Topology | None) -> None:
        for lane in self._shared.lanes:
            lane.topology = topology

    def wait(self, tasks: Iterable[Task]) -> None:
        """Waits for tasks; errors that all ranks share stay in their tasks, others are raised."""
        awaited, shared = [task for task in tasks if not task.done], self._shared
        if isinstance(shared.failure, DeadlineError):  # its thread may wait for the lost rank for ever
            raise shared.failure
        since, idle_before = time.perf_counter(), shared.idle_seconds
        while True:
            with shared.changed:
                shared.changed.wait_for(lambda: all(task.done for task in awaited), _CHECK_SECONDS)
            if (pending := next((task for task in awaited if not task.done), None)) is None:
                break
            try:
                self._deadline.check(time.perf_counter() - since, self.label + pending.name, 0)
            except DeadlineError as error:
                idle = shared.working.acquire(timeout=_END_SECONDS)
                shared.failure = error  # the next `wait` raises it
                if idle:
                    shared.working.release()
                raise
        self._deadline.saw_progress()
        self.idle_seconds += min(shared.idle_seconds - idle_before, time.perf_counter() - since)
        for task in awaited:
            task.waited_seconds = time.perf_counter() - since
        if shared.failure is not None:
            raise shared.failure


def _end_threads(shared: _ThreadState, threads: Sequence[threading.Thread]) -> None:
    """Ends the threads before the interpreter does, since a group must not be freed later."""
    shared.waiting.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_END_SECONDS)


def _run_batch(lane: Carrier, batch: Batch) -> _Running:
    """Runs tasks side by side in a lane; yields for each collective a function that waits for it."""
    lane.name, answer = batch[0][0].name, None
    coroutine = translate_requests(side_by_side(batch, lane.size), lane.in_messages)
    with contextlib.suppress(StopIteration):
        while True:
            answer = yield lane.begin(coroutine.send(answer))


def _begin_batches(shared: _ThreadState) -> None:
    for lane in itertools.cycle(shared.lanes):
        if (batch := shared.waiting.get()) is None:
            break
        shared.free_lanes.acquire()
        running, wait, failure = _run_batch(lane, batch), None, None
        try:
            wait = shared.advance(running)
        except BaseException as error:
            failure = error
        shared.begun.put((batch, running, wait, failure))
        del batch, running, wait, failure
    shared.begun.put(None)


def _end_batches(shared: _ThreadState) -> None:
    while (begun := shared.begun.get()) is not None:
        (batch, running, wait, failure), answer = begun, None
        try:
            while wait is not None:
                since = time.perf_counter()
                answer = wait()
                shared.idle_seconds += time.perf_counter() - since
                wait = shared.advance(running, answer)
        except BaseException as error:
            running.close()
            failure = error
        with shared.changed:
            for task, _ in batch:
                task.error = task.error or failure
                if task.error is not None and not isinstance(task.error, COLLECTIVE_ERRORS):
                    shared.failure = task.error
                task.done = True
            shared.changed.notify_all()
        shared.free_lanes.release()
        del begun, batch, running, wait, answer, task, failure


#: a group of torch.distributed has one start
_START = object()


class DistributedEngine:
    """The `Engine` for a model's trained parameters over torch.distributed."""

    name = "horovod_sparse.ddp"

    def __init__(
        self,
        model: torch.nn.Module,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer | None,
        group: dist.ProcessGroup | None,
        deadline_seconds: float | None,
        delay: int = 0,
    ) -> None:
        self.model, self._recipe, self.optimizer, self._group = model, recipe, optimizer, group
        trained: Any = trained_by(optimizer, model).values()
        shards = [one for one in trained if hasattr(one, "device_mesh")]
        mesh = shards[0].device_mesh if shards else None
        #: number of this rank's shard, and number of shards; equal on all ranks that synchronize
        self.shard: tuple[int, int] | None = mesh and (mesh.get_local_rank(), mesh.size())
        #: group of ranks with the other shards of the same parameters, which skip or apply the same steps
        self.within = Carrier(mesh.get_group()) if mesh else None
        self.communicator: Communicator | None = None
        #: a lane is free again after two latencies, of which `delay` passes wait for one
        self._deadline_seconds, self._num_lanes = deadline_seconds, 2 * max(1, delay)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that exchange; raises before torch.distributed is initialized."""
        return dist.group.WORLD if self._group is None else self._group

    def running(self) -> Communicator:
        """The communicator; made at first use, which waits for all ranks' first step."""
        if self.communicator is None:
            deadline = await_first_step(self.group, self._deadline_seconds)
            self.communicator = Communicator(Carrier.lanes(self.group, self._num_lanes), deadline)
        return self.communicator

    def rank_and_size(self) -> tuple[int, int]:
        return dist.get_rank(self.group), dist.get_world_size(self.group)

    def placement(self) -> Placement:
        return Placement.of_torchrun(*self.rank_and_size(), dist.get_rank())

    def start_token(self) -> object:
        return _START

    def facts(self, known: Facts) -> Facts:
        have, groups = {id(one) for _, one in known.values()}, getattr(self.optimizer, "param_groups", ())
        if groups and all(id(one) in have for group in groups for one in group["params"]):
            return {}
        names = {one: name for name, one in trained_by(self.optimizer, self.model).items()}
        return new_facts(self.optimizer, known, names, self._recipe.rules)

    def carry_out(
        self, coroutine: Synchronization[Any], topology: Topology | None, name: str = "agreement"
    ) -> Any:
        communicator = self.running()
        communicator.set_topology(topology)
        task = communicator.start(name, coroutine)
        communicator.wait([task])
        return task.value()

    def begin(self, training: Any) -> None:
        communicator = self.running()
        communicator.label = training.label
        communicator.set_topology(training.topology)

    def declared(self) -> Mapping[str, object]:
        return {"shard": self.shard, "optimizer": type(self.optimizer).__name__}

    def to_array(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())
