"""Carrying out the requests of a sparsifier on a process group of torch.distributed."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from horovod_sparse.carriers.exchanges import among, by_exchanges
from horovod_sparse.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    ReduceScatter,
    Request,
)
from horovod_sparse.errors import CollectiveMismatchError
from horovod_sparse.tensors.layout import readable_tensor
from horovod_sparse.topology import Topology
from horovod_sparse.training.engine import carry_out

#: messages under way between two ranks have different tags; tags are used again after so many
_NUM_TAGS = 2**20
#: words before each message: its length, and what it belongs to
_HEADER = 2
#: words that are summed behind each sum are below this
_NUM_SUMMED = 2**12
#: words that any message may have before its receiver knows how many it has
_LEAST_ROOM = 1024


@dataclass
class _Line:
    """What both ends know of the messages from one rank to another.

    How many there have been: their tags come from it, as other pairs may have had more. And words that the
    next one may have before its receiver knows how many it has.
    """

    number: int = 0
    room: int = _LEAST_ROOM

    def next_tag(self) -> int:
        """Of the next message; what follows it has the tag behind."""
        self.number += 1
        return 2 * self.number % _NUM_TAGS

    def expect_after(self, length: int) -> None:
        """A message had so many words: half more, and no fall at once where buckets differ."""
        self.room = max(_LEAST_ROOM, length + length // 2, self.room - self.room // 8)


class Carrier:
    """Carries out requests, one after the other; all ranks of a group give the same kinds in the same order.

    Messages of k elements are on the host, so they travel through a Gloo group of their own, whatever the
    model's own group is: torch.distributed tells collectives of a group apart by their order alone, and
    DistributedDataParallel has its own on the other (buffers, unused parameters).

    Lengths differ from rank to rank, which no all-gather of torch.distributed takes. So messages go from
    each rank to each other: as many bytes as in a ring, and one latency instead of P - 1. Each says its own
    length in its first word, and in its second one what it belongs to: ranks out of step are told apart. So
    does an element behind each sum. A receiver has to offer memory before: as much as both ends expect
    after the messages that went between them before (Gloo takes a shorter one); what is longer follows in a
    second one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group: dist.ProcessGroup = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._host = _host_group(self.group)
        #: what requests belong to, the same on all ranks; and all that there have been, by their word
        self.name, self._names = "", dict[int, str]()
        #: which ranks share a host, where requests are of single levels
        self.topology: Topology | None = None
        self._from = [_Line() for _ in range(self.size)]
        self._to = [_Line() for _ in range(self.size)]

    def __call__(self, request: Request) -> Any:
        """What comes back for a request; waits for it."""
        if request.level != "all":
            return self._within(request)
        if isinstance(request, AllGather):
            everyone = range(self.size)
            received = self._exchange(dict.fromkeys(everyone, request.buffer), everyone)
            return np.concatenate([received[rank] for rank in everyone])
        if isinstance(request, AllReduce):
            return self._reduce(request.buffer)
        if isinstance(request, Broadcast):
            tensor = torch.from_numpy(request.buffer.copy())
            self._host.broadcast(tensor, request.root).wait()
            return tensor.numpy()
        if isinstance(request, AllToAll):
            received = self._exchange(dict(enumerate(request.buffers)), range(self.size))
            return [received[rank] for rank in range(self.size)]
        if isinstance(request, ReduceScatter):
            return carry_out(by_exchanges(request, self.rank, self.size), self)
        return self._exchange(request.sends, request.sources)

    def _within(self, request: Request) -> Any:
        """A request among the ranks of a host, or of a column, by messages between them."""
        if self.topology is None:
            raise CollectiveMismatchError(f"a request of level {request.level!r} needs a topology")
        if isinstance(request, ReduceScatter) and isinstance(request.buffer, torch.Tensor):
            total = self._within(replace(request, buffer=request.buffer.cpu().numpy()))
            return torch.from_numpy(total).to(request.buffer.device)
        ranks = self.topology.group(request.level, self.rank)
        return carry_out(among(request, ranks, self.rank), self)

    def starts_on_device(self, request: Request) -> Any:
        """Starts the sum of a tensor on an accelerator where it is, in the model's group, and does not wait.

        To be called where DistributedDataParallel starts its own, so that their order is the same on all
        ranks. The tensor holds the sum when what comes back has been waited for.
        """
        buffer = getattr(request, "buffer", None)
        if not isinstance(buffer, torch.Tensor) or buffer.device.type == "cpu":
            return None
        return dist.all_reduce(buffer, group=self.group, async_op=True)

    def _reduce(self, buffer: Any) -> Any:
        word = self._word() % _NUM_SUMMED  # sums of them are exact in float32
        if isinstance(buffer, torch.Tensor):
            flat = buffer.detach().cpu()
            total = torch.cat([flat, flat.new_full((1,), word)])
        else:
            total = torch.from_numpy(np.append(buffer, buffer.dtype.type(word)))
        self._host.allreduce(total).wait()
        if total[-1] != word * self.size:
            raise self._out_of_step("other ranks", None)
        return total[:-1].to(buffer.device) if isinstance(buffer, torch.Tensor) else total[:-1].numpy()

    def _word(self) -> int:
        word = zlib.crc32(self.name.encode()) & 0x7FFFFFFF
        self._names[word] = self.name
        return word

    def _out_of_step(self, who: str, word: int | None) -> CollectiveMismatchError:
        theirs = "something else" if word is None else self._names.get(word, "something unknown here")
        return CollectiveMismatchError(
            f"ranks are out of step: this one is at {self.name or 'a request'}, {who} at {theirs}. All ranks "
            "have to take the same steps, and make and attach their models in the same order"
        )

    def _exchange(self, sends: Mapping[int, np.ndarray], sources: Iterable[int]) -> dict[int, np.ndarray]:
        """Messages of int32 words between pairs of ranks, of any length each."""
        coming, own = [], self._word()
        for rank in sources:
            if rank != self.rank:
                line = self._from[rank]
                head, tag = torch.empty(_HEADER + line.room, dtype=torch.int32), line.next_tag()
                coming.append((rank, tag, head, self._receive(head, rank, tag)))
        # what is sent is kept until it is sent
        sent = []
        for rank, words in sends.items():
            if rank != self.rank:
                sent += self._begin(words, rank)
        messages, following = {}, []
        for rank, tag, head, work in coming:
            work.wait()
            length, word, room = int(head[0]), int(head[1]), head.numel() - _HEADER
            if word != own:
                raise self._out_of_step(f"rank {rank}", word)
            self._from[rank].expect_after(length)
            if length <= room:
                messages[rank] = head[_HEADER : _HEADER + length]
            else:
                messages[rank] = torch.empty(length, dtype=torch.int32)
                messages[rank][:room] = head[_HEADER:]
                following.append(self._receive(messages[rank][room:], rank, tag + 1))
        for work in [*following, *(work for _, work in sent)]:
            work.wait()
        received = {rank: message.numpy() for rank, message in messages.items()}
        if self.rank in sources:
            received[self.rank] = sends[self.rank].copy()
        return received

    def _begin(self, words: np.ndarray, rank: int) -> list[tuple[torch.Tensor, Any]]:
        """Starts to send a message; each part of it, and its work."""
        line = self._to[rank]
        tag, room, whole = line.next_tag(), line.room, readable_tensor(words)
        line.expect_after(words.size)
        head = torch.empty(_HEADER + min(words.size, room), dtype=torch.int32)
        head[0], head[1] = words.size, self._word()
        head[_HEADER:] = whole[:room]
        parts = [(head, self._send(head, rank, tag))]
        if words.size > room:
            parts.append((whole[room:], self._send(whole[room:], rank, tag + 1)))
        return parts

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        return self._host.send([tensor], rank, tag)

    def _receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        return self._host.recv([tensor], rank, tag)


#: how many groups there have been beside a group of this name
_num_made: Counter[str] = Counter()


def _host_group(group: dist.ProcessGroup) -> Any:
    """A Gloo group of the same ranks, for this process alone to know.

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
    """As long as a group waits for its ranks; None, which is PyTorch's own, where it does not say."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None
