"""Every sparsifier on TensorFlow's tensors, eagerly and in a graph, against the simulated cluster."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

from horovod_sparse.collectives import AllToAll, Broadcast, Exchange
from horovod_sparse.feedback import recipe
from horovod_sparse.sparsifiers import Traffic
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer

pytestmark = pytest.mark.tensorflow


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ring(type(recipe("topk").sparsifier)):  # type: ignore[misc]
    """Top-k whose messages go around in pairs, or all to all: the requests that no sparsifier here makes."""

    kind: str = "exchange"

    def synchronize(self, accumulator, state, info):
        mine = np.full(info.rank + 1, info.rank, np.int32)
        if self.kind == "exchange":
            after, before = (info.rank + 1) % info.size, (info.rank - 1) % info.size
            inbox = yield Exchange({after: mine}, (before,))
            assert {peer: message.tolist() for peer, message in inbox.items()} == {
                before: [before] * (before + 1)
            }
        else:
            arrived = yield AllToAll(tuple(mine + peer for peer in range(info.size)))
            assert [message.tolist() for message in arrived] == [
                [peer + info.rank] * (peer + 1) for peer in range(info.size)
            ]
        root = (state.step + 1) % info.size
        seen = yield Broadcast(np.full(3, info.rank + 0.5), root)
        assert seen.tolist() == [root + 0.5] * 3
        return (yield from super().synchronize(accumulator, state, info))

    def traffic(self, info, counts, step=0):
        kind = Exchange if self.kind == "exchange" else AllToAll
        return (Traffic(kind, 0), Traffic(Broadcast, 0), *super().traffic(info, counts, step))


@pytest.mark.controllers
@pytest.mark.parametrize("kind", ["exchange", "alltoall"])
def test_every_kind_of_request_is_carried_out(rank, size, kind):
    chosen = dataclasses.replace(recipe("topk"), sparsifier=_Ring(density=1.0, kind=kind))
    variable = tf.Variable(tf.zeros([5]))
    synchronizer = GradientSynchronizer(chosen, average=False, name=f"kinds.{kind}")
    synchronize = tf.function(lambda gradient: synchronizer.synchronize([gradient], [variable])[0])
    for _ in range(3):  # the root moves on
        total = synchronize(tf.fill([5], float(rank + 1)))
        assert total.numpy().tolist() == [math.comb(size + 1, 2)] * 5
