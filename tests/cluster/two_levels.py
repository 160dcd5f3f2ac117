"""One rank of a test of two levels across hosts: rank 0 prints who shares a host, and what was lost."""

import json

import horovod.torch as stock
import torch

import horovod_sparse.torch as hvd

NUM_ELEMENTS, STEPS = 40_001, 4

hvd.init()
weight = torch.nn.Parameter(torch.zeros(NUM_ELEMENTS))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD([weight], lr=1.0),
    [("weight", weight)],
    "topk:density=0.01",
    op=hvd.Sum,
    tensor_selection="all",
    levels="host",
)
given = torch.zeros(NUM_ELEMENTS)
for step in range(STEPS):
    gradient = torch.randint(
        -8, 9, (NUM_ELEMENTS,), generator=torch.Generator().manual_seed(9 * step + hvd.rank())
    )
    given += gradient
    optimizer.zero_grad()
    (weight * gradient).sum().backward()
    optimizer.step()
held = optimizer.state_dict()["horovod_sparse"]["residuals"]["weight"]
both = stock.allreduce(torch.stack([given, held]), op=stock.Sum, name="law")
last = optimizer.telemetry.last.buckets[0].step
facts = {
    "hosts": [list(ranks) for ranks in optimizer._synchronizer.topology.hosts],
    "local_size": hvd.local_size(),
    "lost": float((both[0] - both[1] + weight.detach()).abs().max()),
    "applied": float(weight.detach().abs().max()),
    "bytes_inside": last.bytes_inside,
    "bytes_sent": last.bytes_sent,
}
everyone = hvd.allgather_object(facts, name="facts")
if hvd.rank() == 0:
    print(json.dumps(everyone))
hvd.shutdown()
