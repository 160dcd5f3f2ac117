"""Collectives over torch.distributed: messages between pairs of ranks, and sums."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from horovod_sparse import errors
from horovod_sparse.carriers import answer_among, answer_by_exchanges
from horovod_sparse.collectives import AllReduce, Exchange, ReduceScatter, Request, Synchronization
from horovod_sparse.tensors.layout import readable_tensor
from horovod_sparse.topology import Topology
from horovod_sparse.training.engine import carry_out

#: number of a lane's tags; messages in flight between two ranks have different ones
_NUM_TAGS = 2**20
#: words before each message: its length, and the tag of its request
_HEADER = 2
#: words that are summed behind each sum are below this
_NUM_SUMMED = 2**12
#: words received before a message's length is known, at least
_LEAST_ROOM = 1024


#: all tasks' names so far, by their hash
_names: dict[int, str] = {}


@dataclass
class _Channel:
    """Numbers the messages from one rank to another, and bounds the next one's length, at both ends alike.

    Tags are made of `number`. `room` words are received before the message's length is known; a longer
    message is sent in two parts.
    """

    #: first tag of the carrier's lane
    first_tag: int
    number: int = 0
    room: int = _LEAST_ROOM
    #: of the next message to receive: memory, tag and handle, offered before it is sent
    offered: tuple[torch.Tensor, int, Any] | None = None

    def next_tag(self) -> int:
        """Returns the tag for the next message; the second part of a long message has that tag plus 1."""
        self.number += 1
        return self.first_tag + 2 * self.number % _NUM_TAGS

    def expect_after(self, length: int) -> None:
        """Sets `room`, the words reserved for the next message, by the `length` of the present one."""
        self.room = max(_LEAST_ROOM, length + length // 2, self.room - self.room // 8)


class Carrier:
    """Carries out collectives over torch.distributed, in the same order on all ranks.

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

    def __init__(self, group: dist.ProcessGroup | None, lane: int = 0, host: Any = None) -> None:
        self.group: dist.ProcessGroup = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._host: Callable[[], Any] = host or _gloo_group(self.group)
        #: name of the present task, equal on all ranks
        self.name = ""
        #: which ranks share a host, where requests are of single levels
        self.topology: Topology | None = None
        self._from = [_Channel(lane * _NUM_TAGS) for _ in range(self.size)]
        self._to = [_Channel(lane * _NUM_TAGS) for _ in range(self.size)]

    @classmethod
    def lanes(cls, group: dist.ProcessGroup, number: int) -> list[Carrier]:
        """Returns `number` carriers (lanes) of a group, each with message tags and memory of its own.

        So messages of as many batches are in flight at once, and find memory.
        """
        first = cls(group)
        return [first, *(cls(group, lane, first._host) for lane in range(1, number))]

    def __call__(self, request: Request) -> Any:
        """Carries out a collective, and returns its result."""
        return carry_out(self.in_messages(request), lambda one: self.begin(one)())

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

    def in_messages(self, request: Request) -> Synchronization[Any]:
        """Answers a collective by requests that `begin` knows: exchanges between pairs, and sums over all."""
        if request.level == "all":
            if isinstance(request, AllReduce):
                return (yield request)
            return (yield from answer_by_exchanges(request, self.rank, self.size))
        if self.topology is None:
            raise errors.CollectiveMismatchError(f"a request of level {request.level!r} needs a topology")
        if isinstance(request, ReduceScatter) and isinstance(request.buffer, torch.Tensor):
            on_host = replace(request, buffer=request.buffer.cpu().numpy())
            return torch.from_numpy((yield from self.in_messages(on_host))).to(request.buffer.device)
        return (yield from answer_among(request, self.topology.group(request.level, self.rank), self.rank))

    def begin(self, request: Any) -> Callable[[], Any]:
        """Begins an exchange; returns a function that waits for its result. A sum begins in that function."""
        with self._naming_lost_rank("another rank"):
            self._host()
        if not isinstance(request, Exchange):
            return functools.partial(self._all_reduce, request.buffer)
        return self._begin_exchange(request.sends, request.sources)

    def _all_reduce(self, buffer: Any) -> Any:
        # sums of them are exact in float32, or in float16
        word = self._name_hash() % (_NUM_SUMMED if buffer.itemsize > 2 else max(1, 2048 // self.size))
        flat = buffer.detach().cpu() if isinstance(buffer, torch.Tensor) else readable_tensor(buffer)
        total = torch.cat([flat, flat.new_full((1,), word)])
        with self._naming_lost_rank("another rank"):
            self._host().allreduce(total).wait()
        if total[-1] != word * self.size:
            raise self._mismatch_error("other ranks", None)
        return total[:-1].to(buffer.device) if isinstance(buffer, torch.Tensor) else total[:-1].numpy()

    def _name_hash(self) -> int:
        word = zlib.crc32(self.name.encode()) & 0x7FFFFFFF
        _names[word] = self.name
        return word

    def _mismatch_error(self, who: str, word: int | None) -> errors.CollectiveMismatchError:
        theirs = "something else" if word is None else _names.get(word, "something unknown here")
        return errors.CollectiveMismatchError(
            f"ranks are out of step: this one is at {self.name or 'a request'}, {who} at {theirs}. All ranks "
            "have to take the same steps, freeze the same parameters, and attach models in the same order"
        )

    def _begin_exchange(
        self, sends: Mapping[int, np.ndarray], sources: Iterable[int]
    ) -> Callable[[], dict[int, np.ndarray]]:
        """Sends messages to some ranks; the returned function waits for those of `sources`."""
        coming = []
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
        own = {self.rank: sends[self.rank].copy()} if self.rank in sources else {}
        return lambda: self._end_exchange(coming, sent) | own

    def _end_exchange(self, coming: Sequence[Any], sent: Sequence[Any]) -> dict[int, np.ndarray]:
        """Waits until messages have arrived and this rank's are sent; returns {source: message}."""
        own = self._name_hash()
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
                with self._naming_lost_rank(f"rank {rank}"):
                    following.append((rank, self._host().recv([messages[rank][room:]], rank, tag + 1)))
        for rank, work in [*following, *((rank, work) for rank, _, work in sent)]:
            with self._naming_lost_rank(f"rank {rank}"):
                work.wait()
        return {rank: message.numpy() for rank, message in messages.items()}

    def _begin_receive(self, rank: int) -> tuple[torch.Tensor, int, Any]:
        """Begins to receive a rank's next message; returns its memory, tag and handle."""
        channel = self._from[rank]
        head, tag = torch.empty(_HEADER + channel.room, dtype=torch.int32), channel.next_tag()
        return head, tag, self._host().recv([head], rank, tag)

    def _begin_send(self, words: np.ndarray, rank: int) -> list[tuple[torch.Tensor, Any]]:
        """Begins to send a message; returns its parts and their handles."""
        channel = self._to[rank]
        tag, room, whole = channel.next_tag(), channel.room, readable_tensor(words)
        channel.expect_after(words.size)
        head = torch.empty(_HEADER + min(words.size, room), dtype=torch.int32)
        head[0], head[1] = words.size, self._name_hash()
        head[_HEADER:] = whole[:room]
        parts = [(head, self._host().send([head], rank, tag))]
        if words.size > room:
            parts.append((whole[room:], self._host().send([whole[room:]], rank, tag + 1)))
        return parts


#: how many groups there have been beside a group of this name
_num_made: Counter[str] = Counter()


def _gloo_group(group: dist.ProcessGroup) -> Callable[[], Any]:
    """Returns a function that connects a Gloo group of the same ranks, which torch.distributed does not list.

    `dist.new_group` would want ranks that do not take part, too; or names that it makes of the number of
    groups that a rank has, which may differ. The first request connects, so that its deadline counts.
    """
    number = _num_made[group.group_name]
    _num_made[group.group_name] += 1
    store = dist.distributed_c10d._get_process_group_store(group)
    # a store serves one thread at a time, and ours waits; before PyTorch 2.8 so does the deadline, therefore
    store = dist.PrefixStore(f"horovod_sparse.{number}", getattr(store, "clone", lambda: store)())
    more = {}
    for device in ("cuda", "cpu"):
        with contextlib.suppress(RuntimeError, AttributeError):  # the group has no backend for it
            more["timeout"] = group._get_backend(torch.device(device)).options._timeout
    place = dist.get_rank(group), dist.get_world_size(group)
    return functools.cache(lambda: dist.ProcessGroupGloo(store, *place, **more))
