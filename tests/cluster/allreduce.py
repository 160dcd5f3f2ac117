"""One rank of a test of `scripts/cluster run`: rank 0 prints what every rank knows about itself."""

import json
import socket

import horovod.torch as hvd
import torch

NUM_ELEMENTS = 500_000

hvd.init()
total = hvd.allreduce(torch.full((NUM_ELEMENTS,), float(hvd.rank() + 1)), name="test", op=hvd.Sum)
facts = {
    "rank": hvd.rank(),
    "size": hvd.size(),
    "local_size": hvd.local_size(),
    "cross_size": hvd.cross_size(),
    "cross_rank": hvd.cross_rank(),
    "host": socket.gethostname(),
    "address": socket.gethostbyname(socket.gethostname()),
    "smallest": total.min().item(),
    "largest": total.max().item(),
}
everyone = hvd.allgather_object(facts, name="facts")
if hvd.rank() == 0:
    print(json.dumps(everyone))
hvd.shutdown()
