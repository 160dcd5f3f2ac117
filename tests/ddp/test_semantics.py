"""What DistributedDataParallel does beside a plain step: with the hook, and what is refused."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from conformance.engine import Ledger, given, replicas_agree
from conformance.engine_ddp import ENGINES, HookTraining
from horovod_sparse import ddp
from horovod_sparse.errors import (
    ArgumentError,
    DriftError,
    StateMismatchError,
    UnknownNameError,
    UnsupportedError,
)
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.merging import Plan
from support.dyadic import gradients_for
from support.replicas import Replica, same_on_all_replicas

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11), "one": (1,)}
gradients = gradients_for(SHAPES)
ENGINE = ENGINES[0]


@pytest.mark.controllers
@pytest.mark.parametrize("text", ["exdyna:density=0.1", "spardl:density=0.1"])
def test_ranks_may_have_fewer_batches_than_others(text, rank, size):
    """`join` fills in for ranks that have none left: what they hold back is applied meanwhile."""
    training, ledger = ENGINE.train(text), Ledger(ENGINE)
    with training.replica.model.join():
        for step in range(5 + 3 * rank):
            ledger.enter(given(rank, step))
            training.step(given(rank, step))
    # the model of the last rank goes to all others in the end
    ledger.balance(training)
    assert training.replica.sync.step == 5 + 3 * (size - 1)


@pytest.mark.parametrize("arguments", [{}, {"static_graph": True}])
@pytest.mark.parametrize("whole", [True, False])
def test_uneven_batches_are_divided_as_dense_ones(whole, arguments, rank, size):
    """With divide_by_initial_world_size=False by the number of ranks that have a batch left."""
    found = []
    for text in (None, "topk:density=1.0"):
        replica = Replica(SHAPES, text, **arguments)
        with replica.model.join(divide_by_initial_world_size=whole):
            for step in range(3 + 2 * rank):
                replica.step(gradients(rank, step))
        found.append([parameter.detach() for parameter in replica.net.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0 if size == 2 else 1e-5)


def test_a_rank_that_has_joined_is_no_drift(rank, size):
    """It steps no more while others do: nobody shall raise."""
    found = []
    for attached in ({"check_every": 0}, {"check_every": 2}):
        replica = Replica(SHAPES, "topk:density=0.1", attached=attached)
        with replica.model.join():
            for step in range(3 + 4 * rank):
                replica.step(gradients(rank, step))
        found.append([parameter.detach() for parameter in replica.net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    with torch.no_grad():  # all are back: now it is one
        replica.net.get_parameter("first")[0, 0] += rank
    with pytest.raises(DriftError, match="first differs"):
        for step in range(2):
            replica.step(gradients(rank, step))


def test_a_model_of_another_type_is_no_longer_synchronized_and_says_so(rank):
    """PyTorch forgets DistributedDataParallel's hooks then: every rank would train alone."""
    replica = Replica(SHAPES, "topk:density=0.1")
    for step in range(2):
        replica.step(gradients(rank, step))
    replica.net.double().float()
    with pytest.raises(UnsupportedError, match="wrap it again"):
        replica.step(gradients(rank, 2))


def test_groups_of_parameters_have_buckets_of_their_own(rank):
    replica = Replica(SHAPES, None)
    parameters = dict(replica.net.named_parameters())
    groups = ("one", "first"), ("bias", "second")
    optimizer = torch.optim.SGD([{"params": [parameters[one] for one in group]} for group in groups], lr=0.1)
    replica.optimizer, replica.sync = optimizer, ddp.attach(replica.model, "topk:density=0.1", optimizer)
    for step in range(5):
        replica.step(gradients(rank, step))
    assert all(any({*bucket} <= {*group} for group in groups) for bucket in replica.sync.plan.buckets)
    assert same_on_all_replicas(*replica.net.parameters())


def test_what_cannot_be_loaded_is_refused(rank):
    replica = Replica(SHAPES, "topk:density=0.1")
    fresh = replica.sync.state_dict()
    for _ in range(2):
        replica.step(gradients(rank, 0))
    entry = replica.sync.state_dict()
    for shapes, words in (({"other": (3,)}, "another model"), (SHAPES | {"bias": (9,)}, "shape")):
        with pytest.raises(StateMismatchError, match=words):
            Replica(shapes, "topk:density=0.1").sync.load_state_dict(entry)
    for nothing in (fresh, None):  # from the beginning
        replica.sync.load_state_dict(nothing)
        assert not any(residual.any() for residual in replica.held().values())
        replica.step(gradients(rank, 1))
        assert replica.sync.step == 1


def test_what_is_no_model_or_no_sparsifier_is_refused(rank, caplog):
    replica = Replica(SHAPES, "topk:density=0.1")
    with pytest.raises(UnsupportedError, match="already"):
        ddp.attach(replica.model, "topk:density=0.1")
    with pytest.raises(ArgumentError, match="model="):
        ddp.attach(replica.net, "topk:density=0.1")
    plain = Replica(SHAPES, None)
    for none in ("none", 0.1, None):
        with pytest.raises(ArgumentError, match="leave the hook out"):
            ddp.attach(plain.model, none)
    with pytest.raises(ArgumentError, match=r"give a density such as 0\.01"):
        ddp.attach(plain.model, "topk:density=0.1", network_share=0.05)
    with pytest.raises(ArgumentError, match="optimizer="):
        ddp.attach(plain.model, "topk:density=0.1", plain.net.parameters())
    with pytest.raises(ArgumentError, match=r"model\._orig_mod"):
        ddp.attach(torch.compile(plain.model), "topk:density=0.1")
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(UnsupportedError, match="weight is complex"):
        ddp.State("topk:density=0.1", named_parameters=[("weight", weight)])
    with pytest.raises(UnknownNameError, match="topkk"):
        ddp.attach(plain.model, "topkk")
    with pytest.raises(ArgumentError, match="state="):
        ddp.hook(None, None)
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        ddp.State("topk:density=0.1,feedback=error(scale_residual=true)")
    assert "optimizer=optimizer" in caplog.text
    with pytest.raises(ArgumentError, match="momentum"):
        momentum = torch.optim.SGD(plain.net.parameters(), lr=0.1, momentum=0.9)
        ddp.attach(plain.model, "dgc:density=0.1,feedback=momentum", momentum)


def test_other_hooks_are_refused_by_name(rank):
    plain = Replica(SHAPES, None, dtype=torch.float32)
    state = ddp.State("topk:density=0.1")
    plain.model.register_comm_hook(state, default_hooks.fp16_compress_wrapper(ddp.hook))
    with pytest.raises(UnsupportedError, match="fp16_compress_wrapper"):
        plain.model(gradients(rank, 0)).backward()
    with pytest.raises(UnsupportedError, match="python_reducer"):
        ddp.hook(state, (torch.zeros(1), torch.zeros(1)))


def test_a_state_serves_one_model(rank):
    state = ddp.State("topk:density=0.1")
    first, second = Replica(SHAPES, None), Replica(SHAPES, None)
    for replica in (first, second):
        replica.model.register_comm_hook(state, ddp.hook)
    first.step(gradients(rank, 0))
    with pytest.raises(UnsupportedError, match="one state serves one model"):
        second.step(gradients(rank, 0))


def test_a_copy_of_a_model_has_no_hook(rank, caplog):
    """As of any model of DistributedDataParallel: averages of weights are copies."""
    replica = Replica(SHAPES, "topk:density=0.1")
    replica.step(gradients(rank, 0))
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        twin = copy.deepcopy(replica.model)
    assert "not synchronized sparsely" in caplog.text
    sync = ddp.attach(twin, "topk:density=1.0")
    twin(gradients(rank, 1)).backward()
    assert sync.step == replica.sync.step == 1
    with pytest.raises(UnsupportedError, match="already"):
        ddp.attach(twin, "topk:density=0.1")


def test_embeddings_with_coo_gradients_are_refused(rank):
    net = torch.nn.Embedding(10, 3, sparse=True)
    model = DistributedDataParallel(net)
    ddp.attach(model, "topk:density=0.1")
    with pytest.raises(UnsupportedError, match="sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


def test_a_plan_that_does_not_fit_raises_on_all_ranks(rank):
    replica = Replica(SHAPES, "topk:density=0.1", plan=Plan((("first",),)))
    with pytest.raises(ArgumentError, match="nothing for"):
        replica.model(gradients(rank, 0)).backward()
    assert not any(parameter.grad.any() for parameter in replica.net.parameters())


def test_a_plan_of_one_rank_is_refused(rank):
    replica = Replica(SHAPES, "topk:density=0.1", plan=Plan((tuple(SHAPES),)) if rank else None)
    with pytest.raises(StateMismatchError, match=r"plan differs: ranks \[0.*\] have none, .* given"):
        replica.step(gradients(rank, 0))


def test_a_compiled_module_trains(rank):
    """DistributedDataParallel around it: the hook sees buckets as ever."""
    net = torch.nn.Linear(20, 10)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.compile(net, backend="eager"))
    sync = ddp.attach(model, "topk:density=0.1")
    for _ in range(4):
        model(torch.ones(3, 20) * (rank + 1)).sum().backward()
    assert sync.step == 4
    assert same_on_all_replicas(*(parameter.grad for parameter in net.parameters()))
    assert sorted(sync.state_dict()["residuals"]) == ["_orig_mod.bias", "_orig_mod.weight"]


WAYS = {
    "as it is": {},
    "unused looked for": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
}


@pytest.mark.parametrize("arguments", WAYS.values(), ids=WAYS)
def test_residuals_outlive_the_buckets(arguments, rank):
    """DistributedDataParallel changes its buckets after the first iteration: nothing is lost by that."""
    training, ledger = (
        HookTraining("exdyna:density=0.1,densities={'second': 0.3}", merging=None, **arguments),
        Ledger(ENGINE),
    )
    plans = []
    for step in range(8):
        ledger.enter(given(rank, step))
        training.step(given(rank, step))
        plans.append(training.replica.sync.plan)
        assert replicas_agree(ENGINE, training), step
    if "find_unused_parameters" not in arguments:
        assert plans[0] != plans[-1]
    assert len(plans[-1].buckets) > 1
    assert plans[5] == plans[-1]
    assert any(values.any() for values in training.held().values())
    ledger.balance(training)


def test_the_raw_pair_does_the_same(rank):
    attached = Replica(SHAPES, "exdyna:density=0.1")
    plain = Replica(SHAPES, None)
    state = ddp.State(parse_recipe("exdyna:density=0.1"), named_parameters=plain.net.named_parameters())
    plain.model.register_comm_hook(state, ddp.hook)
    unnamed = Replica(SHAPES, None)
    other = ddp.State("exdyna:density=0.1")
    unnamed.model.register_comm_hook(other, ddp.hook)
    for step in range(5):
        one, two = attached.step(gradients(rank, step)), plain.step(gradients(rank, step))
        three = unnamed.step(gradients(rank, step))
        for name in SHAPES:
            assert torch.equal(one[name], two[name])
        assert same_on_all_replicas(*three.values())
    assert state.telemetry.last.bytes_sent == attached.sync.telemetry.last.bytes_sent
    assert sorted(other.state_dict()["residuals"]) == [f"allreduce.noname.0.{i}" for i in range(len(SHAPES))]


def test_a_model_that_is_gone_leaves_no_thread(rank):
    def threads() -> int:
        return sum(thread.name == "horovod_sparse.ddp" for thread in threading.enumerate())

    gc.collect()
    before = threads()
    replica = Replica(SHAPES, "topk:density=0.1")
    replica.step(gradients(rank, 0))
    assert threads() == before + 1
    gone = weakref.ref(replica.sync)
    del replica
    gc.collect()
    assert gone() is None
    assert threads() == before
