"""Carries out collectives over torch.distributed, one after another, in a thread of their own."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from horovod_sparse import errors
from horovod_sparse.carriers import COLLECTIVE_ERRORS, answer_among, answer_by_exchanges, side_by_side
from horovod_sparse.collectives import AllReduce, Exchange, ReduceScatter, Request, Synchronization
from horovod_sparse.tensors.layout import readable_tensor
from horovod_sparse.topology import Topology
from horovod_sparse.training.deadline import Deadline
from horovod_sparse.training.engine import Task, carry_out

#: number of tags; messages in flight between two ranks have different ones
_NUM_TAGS = 2**20
#: words before each message: its length, and the tag of its request
_HEADER = 2
#: words that are summed behind each sum are below this
_NUM_SUMMED = 2**12
#: words received before a message's length is known, at least
_LEAST_ROOM = 1024


@dataclass
class _Channel:
    """Numbers the messages from one rank to another, and bounds the next one's length, at both ends alike.

    Tags are made of `number`. `room` words are received before the message's length is known; a longer
    message is sent in two parts.
    """

    number: int = 0
    room: int = _LEAST_ROOM
    #: of the next message to receive: memory, tag and handle, offered before it is sent
    offered: tuple[torch.Tensor, int, Any] | None = None

    def next_tag(self) -> int:
        """Returns the tag for the next message; the second part of a long message has that tag plus 1."""
        self.number += 1
        return 2 * self.number % _NUM_TAGS

    def expect_after(self, length: int) -> None:
        """Sets `room`, the words reserved for the next message, by the `length` of the present one."""
        self.room = max(_LEAST_ROOM, length + length // 2, self.room - self.room // 8)


class Carrier:
    """Carries out collectives over torch.distributed, one after another, in the same order on all ranks.

    Messages of k elements are on the host, so they travel through a Gloo group of their own, whatever the
    model's own group is: torch.distributed tells collectives of a group apart by their order alone, and
    DistributedDataParallel has its own on the other (buffers, unused parameters).

    Lengths differ between ranks, which all-gathers of torch.distributed do not support. So each rank sends
    its message to each other rank: as many bytes as in a ring, and one latency instead of P - 1. A message's
    first word is its length, and its second a hash of the collective's name, so that ranks out of step are
    noticed; an element behind each sum does the same. Gloo sends only once the receiver offers memory, so a
    receiver offers it for the next message as soon as one has arrived: as much as both ends compute from the
    messages before (a shorter one fits). A longer message is sent in two parts.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group: dist.ProcessGroup = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._host = _make_gloo_group(self.group)
        #: name of the present task, equal on all ranks; and all names so far, by their hash
        self.name, self._names = "", dict[int, str]()
        #: which ranks share a host, where requests are of single levels
        self.topology: Topology | None = None
        self._from = [_Channel() for _ in range(self.size)]
        self._to = [_Channel() for _ in range(self.size)]

    def __call__(self, request: Request) -> Any:
        """Carries out a collective, and returns its result."""
        with self._naming_lost_rank("another rank"):
            return self._carry_out(request)

    @contextlib.contextmanager
    def _naming_lost_rank(self, who: str) -> Iterator[None]:
        """Returns a context in which Gloo's error, an address only, becomes one that names the lost rank."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, errors.HorovodSparseError):
                raise
            raise errors.CollectiveMismatchError(
                f"{who} ended, or left, before {self.name or 'a request'}; its own output says why ({error})"
            ) from error

    def _carry_out(self, request: Request) -> Any:
        if request.level != "all":
            return self._carry_out_within(request)
        if isinstance(request, AllReduce):
            return self._all_reduce(request.buffer)
        if isinstance(request, Exchange):
            return self._exchange(request.sends, request.sources)
        return carry_out(answer_by_exchanges(request, self.rank, self.size), self)

    def _carry_out_within(self, request: Request) -> Any:
        """Carries out a collective of a host's ranks, or of a column's, by messages between pairs."""
        if self.topology is None:
            raise errors.CollectiveMismatchError(f"a request of level {request.level!r} needs a topology")
        if isinstance(request, ReduceScatter) and isinstance(request.buffer, torch.Tensor):
            total = self._carry_out_within(replace(request, buffer=request.buffer.cpu().numpy()))
            return torch.from_numpy(total).to(request.buffer.device)
        ranks = self.topology.group(request.level, self.rank)
        return carry_out(answer_among(request, ranks, self.rank), self)

    def _all_reduce(self, buffer: Any) -> Any:
        # sums of them are exact in float32, or in float16
        word = self._name_hash() % (_NUM_SUMMED if buffer.itemsize > 2 else max(1, 2048 // self.size))
        flat = buffer.detach().cpu() if isinstance(buffer, torch.Tensor) else readable_tensor(buffer)
        total = torch.cat([flat, flat.new_full((1,), word)])
        self._host.allreduce(total).wait()
        if total[-1] != word * self.size:
            raise self._mismatch_error("other ranks", None)
        return total[:-1].to(buffer.device) if isinstance(buffer, torch.Tensor) else total[:-1].numpy()

    def _name_hash(self) -> int:
        word = zlib.crc32(self.name.encode()) & 0x7FFFFFFF
        self._names[word] = self.name
        return word

    def _mismatch_error(self, who: str, word: int | None) -> errors.CollectiveMismatchError:
        theirs = "something else" if word is None else self._names.get(word, "something unknown here")
        return errors.CollectiveMismatchError(
            f"ranks are out of step: this one is at {self.name or 'a request'}, {who} at {theirs}. All ranks "
            "have to take the same steps, freeze the same parameters, and attach models in the same order"
        )

    def _exchange(self, sends: Mapping[int, np.ndarray], sources: Iterable[int]) -> dict[int, np.ndarray]:
        """Sends messages to some ranks, and returns those of `sources`; their lengths may differ."""
        coming, own = [], self._name_hash()
        for rank in sources:
            if rank != self.rank:
                with self._naming_lost_rank(f"rank {rank}"):
                    coming.append((rank, *(self._from[rank].offered or self._begin_receive(rank))))
                self._from[rank].offered = None
        # buffers stay alive until they are sent
        sent = []
        for rank, words in sends.items():
            if rank != self.rank:
                with self._naming_lost_rank(f"rank {rank}"):
                    sent += [(rank, *part) for part in self._begin_send(words, rank)]
        messages, following = {}, []
        for rank, head, tag, work in coming:
            with self._naming_lost_rank(f"rank {rank}"):
                work.wait()
            length, word, room = int(head[0]), int(head[1]), head.numel() - _HEADER
            if word != own:
                raise self._mismatch_error(f"rank {rank}", word)
            self._from[rank].expect_after(length)
            with contextlib.suppress(RuntimeError):  # a rank may leave after its last message
                self._from[rank].offered = self._begin_receive(rank)
            if length <= room:
                messages[rank] = head[_HEADER : _HEADER + length]
            else:
                messages[rank] = torch.empty(length, dtype=torch.int32)
                messages[rank][:room] = head[_HEADER:]
                following.append((rank, self._host.recv([messages[rank][room:]], rank, tag + 1)))
        for rank, work in [*following, *((rank, work) for rank, _, work in sent)]:
            with self._naming_lost_rank(f"rank {rank}"):
                work.wait()
        received = {rank: message.numpy() for rank, message in messages.items()}
        if self.rank in sources:
            received[self.rank] = sends[self.rank].copy()
        return received

    def _begin_receive(self, rank: int) -> tuple[torch.Tensor, int, Any]:
        """Begins to receive a rank's next message; returns its memory, tag and handle."""
        channel = self._from[rank]
        head, tag = torch.empty(_HEADER + channel.room, dtype=torch.int32), channel.next_tag()
        return head, tag, self._host.recv([head], rank, tag)

    def _begin_send(self, words: np.ndarray, rank: int) -> list[tuple[torch.Tensor, Any]]:
        """Begins to send a message; returns its parts and their handles."""
        channel = self._to[rank]
        tag, room, whole = channel.next_tag(), channel.room, readable_tensor(words)
        channel.expect_after(words.size)
        head = torch.empty(_HEADER + min(words.size, room), dtype=torch.int32)
        head[0], head[1] = words.size, self._name_hash()
        head[_HEADER:] = whole[:room]
        parts = [(head, self._host.send([head], rank, tag))]
        if words.size > room:
            parts.append((whole[room:], self._host.send([whole[room:]], rank, tag + 1)))
        return parts


#: how many groups there have been beside a group of this name
_num_made: Counter[str] = Counter()


def _make_gloo_group(group: dist.ProcessGroup) -> Any:
    """Makes a Gloo group of the same ranks, which torch.distributed does not list.

    `dist.new_group` would want ranks that do not take part, too; or names that it makes of the number of
    groups that a rank has, which may differ.
    """
    number = _num_made[group.group_name]
    _num_made[group.group_name] += 1
    store = dist.PrefixStore(
        f"horovod_sparse.{number}", dist.distributed_c10d._get_process_group_store(group)
    )
    timeout = _timeout_of(group)
    more = {} if timeout is None else {"timeout": timeout}
    return dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), **more)


def _timeout_of(group: dist.ProcessGroup) -> Any:
    """Returns how long a group waits for its ranks, or None for PyTorch's default."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None


#: seconds between checks of the deadline
_LOOK_SECONDS = 0.5
#: seconds to wait for the thread's end; it may itself wait for a rank that is gone
_END_SECONDS = 2.0


#: tasks that run side by side
_Batch: TypeAlias = list[tuple[Task, Synchronization[Any]]]


class _ThreadState:
    """State of a communicator's thread, which holds no reference to the communicator itself."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.waiting: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        #: lock that the thread holds except during requests
        self.working = threading.Lock()
        self._carried: tuple[float, float | None] = 0.0, None

    def carried_seconds(self) -> float:
        """Returns the seconds that the thread has spent in collectives."""
        seconds, began = self._carried
        return seconds if began is None else seconds + time.perf_counter() - began

    def carry(self, request: Request) -> Any:
        """Carries out a collective, and adds its time to `carried_seconds`."""
        before, began = self._carried[0], time.perf_counter()
        self._carried = before, began
        self.working.release()
        try:
            answer = self.carrier(request)
        finally:
            self.working.acquire()
            self._carried = before + time.perf_counter() - began, None
        if self.failure is not None:  # the caller has timed out, and rolled the step back
            raise self.failure
        return answer


class Communicator:
    """Runs coroutines in a thread, in the order of their start, which all ranks share.

    torch.distributed matches collectives by their order, and its messages can only be waited for. So a
    thread carries out everything in that order, folds and selections included, while backward goes on.
    """

    def __init__(self, carrier: Carrier, deadline: Deadline) -> None:
        self._shared, self._deadline = _ThreadState(carrier), deadline
        #: prefix of names: a process may train several models
        self.label = ""
        self._batch: _Batch | None = None
        #: total seconds that `wait` waited for other ranks and the network
        self.idle_seconds = 0.0
        thread = threading.Thread(target=_run, args=(self._shared,), name="horovod_sparse.ddp", daemon=True)
        thread.start()
        weakref.finalize(self, _end_thread, self._shared, thread)

    def start(self, name: str, coroutine: Synchronization[Any]) -> Task:
        task = Task(name)
        if self._batch is None:
            self._shared.waiting.put([(task, coroutine)])
        else:
            self._batch.append((task, coroutine))
        return task

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Returns a context: tasks started within it begin when it ends, as a batch with shared messages."""
        self._batch = []
        try:
            yield
            self._shared.waiting.put(self._batch)
        finally:
            self._batch = None

    def set_topology(self, topology: Topology | None) -> None:
        self._shared.carrier.topology = topology

    def run(self, name: str, coroutine: Synchronization[Any]) -> Any:
        """Waits until the thread has run a coroutine; returns its result or raises its error."""
        task = self.start(name, coroutine)
        self.wait([task])
        return task.value()

    def wait(self, tasks: Iterable[Task]) -> None:
        """Waits for tasks; errors that all ranks share stay in their tasks, others are raised."""
        awaited, shared, since = list(tasks), self._shared, time.perf_counter()
        carried = shared.carried_seconds()
        while (pending := self._first_pending(awaited)) is not None:
            try:
                self._deadline.check(time.perf_counter() - since, self.label + pending.name, 0)
            except errors.DeadlineError as error:
                idle = shared.working.acquire(timeout=_END_SECONDS)
                shared.failure = error  # the next `wait` raises it
                if idle:
                    shared.working.release()
                raise
        self._deadline.saw_progress()
        self.idle_seconds += shared.carried_seconds() - carried
        for task in awaited:
            task.waited_seconds = max(0.0, task.finished - since)
        if shared.failure is not None:
            raise shared.failure

    def _first_pending(self, tasks: Iterable[Task]) -> Task | None:
        """Waits half a second at most for tasks; returns the first that is not done, or None if all are."""
        with self._shared.changed:
            if self._shared.changed.wait_for(lambda: all(task.done for task in tasks), _LOOK_SECONDS):
                return None
        return next((task for task in tasks if not task.done), None)


def _end_thread(shared: _ThreadState, thread: threading.Thread) -> None:
    """Ends the thread before the interpreter does, since a group must not be freed later."""
    shared.waiting.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_SECONDS)


def _run(shared: _ThreadState) -> None:
    while (batch := shared.waiting.get()) is not None:
        failure = None
        try:
            with shared.working:
                if shared.failure is not None:
                    raise shared.failure
                shared.carrier.name = batch[0][0].name
                carry_out(side_by_side(batch), shared.carry)
        except BaseException as error:
            failure = error
        with shared.changed:
            for task, _ in batch:
                task.error = task.error or failure
                if task.error is not None and not isinstance(task.error, COLLECTIVE_ERRORS):
                    shared.failure = task.error
                task.finished, task.done = time.perf_counter(), True
            shared.changed.notify_all()
        del batch, task, failure
