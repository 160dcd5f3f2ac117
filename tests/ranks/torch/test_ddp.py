"""The hook of DistributedDataParallel beside our optimizer for Horovod, in the same processes."""

import pytest
import torch

from horovod_sparse.merging import Plan
from support.dyadic import gradients_for
from support.linear import LinearModel
from support.optimizers import make, train_step

pytestmark = pytest.mark.usefixtures("process_group")
SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11), "one": (1,)}
PLAN = Plan((("one", "second"), ("scalar", "bias"), ("first",)))
gradients = gradients_for(SHAPES)


@pytest.mark.parametrize(
    "text", ["topk:density=0.1", "exdyna:density=0.1", "dgc:density=0.1,feedback=momentum"]
)
def test_each_loads_what_the_other_has_saved(text, rank, size):
    from support.replicas import Replica

    model, replica = LinearModel(SHAPES), Replica(SHAPES, text, plan=PLAN)
    optimizer = make(model, text, plan=PLAN)
    for step in range(3):
        train_step(model, optimizer, gradients(rank, step))
    replica.net.load_state_dict(model.state_dict())
    replica.sync.load_state_dict(optimizer.state_dict()["horovod_sparse"])
    for step in range(3, 6):
        one, other = train_step(model, optimizer, gradients(rank, step)), replica.step(gradients(rank, step))
        assert all(torch.equal(one[name], other[name]) for name in SHAPES), step
    later = LinearModel(SHAPES)
    again = make(later, text, plan=PLAN)
    later.load_state_dict(replica.net.state_dict())
    again.load_state_dict(again.state_dict() | {"horovod_sparse": replica.sync.state_dict()})
    for step in range(6, 9):
        one, other = train_step(later, again, gradients(rank, step)), replica.step(gradients(rank, step))
        assert all(torch.equal(one[name], other[name]) for name in SHAPES), step
    assert replica.sync.step == 9
