"""What DistributedDataParallel does beside a plain step: with the hook, and what is refused."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse import ddp
from horovod_sparse.errors import (
    ArgumentError,
    DriftError,
    NonFiniteGradientError,
    StateMismatchError,
    UnknownNameError,
    UnsupportedError,
)
from horovod_sparse.merging import Plan
from support.dyadic import gradients_for
from support.merging_models import share_that_changes
from support.replicas import Replica, same_on_all_replicas

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11), "one": (1,)}
gradients = gradients_for(SHAPES)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}])
def test_no_sync_accumulates_first(arguments, rank):
    single, double = (Replica(SHAPES, "exdyna:density=0.1", **arguments) for _ in range(2))
    for step in range(5):
        one, two = gradients(rank, 2 * step), gradients(rank, 2 * step + 1)
        found = single.step({name: one[name] + two[name] for name in one})
        with double.model.no_sync():
            double.model(one).backward()
        assert same(double.step(two), found)
    assert double.sync.step == 5


@pytest.mark.controllers
@pytest.mark.parametrize("text", ["exdyna:density=0.1", "spardl:density=0.1"])
def test_ranks_may_have_fewer_batches_than_others(text, rank, size):
    """`join` fills in for ranks that have none left: what they hold back is applied meanwhile."""
    replica = Replica(SHAPES, text)
    given = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    steps = [5 + 3 * r for r in range(size)]
    for r in range(size):
        for step in range(steps[r]):
            for name, gradient in gradients(r, step).items():
                given[name] += gradient / size
    with replica.model.join():
        for step in range(steps[rank]):
            replica.step(gradients(rank, step))
    # the model of the last rank goes to all others in the end
    held = replica.held()
    for name, parameter in replica.net.named_parameters():
        mean = held[name].double().reshape(parameter.shape).clone()
        dist.all_reduce(mean)
        applied = (1.0 - parameter.detach().double()) / 0.5
        torch.testing.assert_close(applied + mean / size, torch.from_numpy(given[name]), rtol=1e-4, atol=1e-4)
    assert replica.sync.step == max(steps)


def test_the_networks_share_changes_plans_alike_and_loses_nothing(rank, size, monkeypatch):
    """Dense at first, then sparse, dense and in halves, as ranks find out together."""
    share_that_changes(monkeypatch, SHAPES)
    text = "topk:density=auto(least=0.02,most=0.5)"
    replica = Replica(SHAPES, text, attached={"network_share": 0.05})
    given = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    seen = []
    for step in range(22):
        for r in range(size):
            for name, gradient in gradients(r, step).items():
                given[name] += gradient / size
        replica.step(gradients(rank, step))
        seen.append((bool(replica.sync.plan.buckets), replica.sync.plan.values))
    assert [step for step in range(1, 22) if seen[step] != seen[step - 1]] == [6, 12, 18]
    held = replica.held()
    for name, parameter in replica.net.named_parameters():
        mean = torch.zeros(parameter.shape, dtype=torch.float64)
        if name in held:
            mean += held[name].double().reshape(parameter.shape)
        dist.all_reduce(mean)
        applied = (1.0 - parameter.detach().double()) / 0.5
        torch.testing.assert_close(applied + mean / size, torch.from_numpy(given[name]), rtol=1e-4, atol=1e-4)
    assert same_on_all_replicas(*replica.net.parameters())
    assert "network_share=0.05: as the test says" in replica.sync.telemetry.summary()


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


@pytest.mark.parametrize("policy", ["raise", "resync"])
def test_a_rank_that_has_joined_is_no_drift(policy, rank, size):
    """It steps no more while others do: nobody shall raise, or go on with what it has."""
    found = []
    for attached in ({"check_every": 0}, {"check_every": 2, "on_drift": policy}):
        replica = Replica(SHAPES, "topk:density=0.1", attached=attached)
        with replica.model.join():
            for step in range(3 + 4 * rank):
                replica.step(gradients(rank, step))
        found.append([parameter.detach() for parameter in replica.net.parameters()])
        assert replica.sync.telemetry.num_drifts == 0
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    with torch.no_grad():  # all are back: now it is one
        replica.net.get_parameter("first")[0, 0] += rank
    if policy == "raise":
        with pytest.raises(DriftError, match="first differs"):
            for step in range(2):
                replica.step(gradients(rank, step))
    else:
        for step in range(2):
            replica.step(gradients(rank, step))
        assert replica.sync.telemetry.num_drifts == 1
        assert same_on_all_replicas(*replica.net.parameters())


def test_a_refused_momentum_takes_whole_steps_back(rank, size):
    """Buckets are folded in beside the backward pass, before the refusal: it has to wait for them."""
    replica = Replica(SHAPES, "topk:density=0.1,feedback=momentum")
    for step in range(20):
        replica.optimizer.param_groups[0]["momentum"] = momentum = 0.9 if step in (9, 12, 15) else 0.0
        if momentum:
            with pytest.raises(ArgumentError, match="momentum"):
                replica.model(gradients(rank, step)).backward()
            replica.optimizer.zero_grad()
        else:
            replica.step(gradients(rank, step))
    assert replica.sync.step == 17
    assert same_on_all_replicas(*replica.net.parameters())


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}])
def test_unused_parameters_lose_nothing(arguments, rank, size):
    """Some on one rank, some on none: what is held back for them may come while nobody uses them."""
    replica = Replica(SHAPES, "topk:density=0.1", find_unused_parameters=True, **arguments)
    given = {name: np.zeros(shape) for name, shape in SHAPES.items()}

    def used(r: int, step: int) -> list[str]:
        names = ["first", "bias"] + (["one"] if (step + r) % 3 else [])
        return names + (["second"] if step < 4 else [])

    for step in range(12):
        for r in range(size):
            for name in used(r, step):
                given[name] += gradients(r, step)[name] / size
        mine = gradients(rank, step)
        replica.model(mine, used(rank, step)).backward()
        replica.optimizer.step()
        replica.optimizer.zero_grad()
    held = replica.held()
    for name, parameter in replica.net.named_parameters():
        mean = held[name].double().reshape(parameter.shape).clone()
        dist.all_reduce(mean)
        applied = (1.0 - parameter.detach().double()) / 0.5
        torch.testing.assert_close(applied + mean / size, torch.from_numpy(given[name]), rtol=1e-4, atol=1e-4)
    assert same_on_all_replicas(*replica.net.parameters())


@pytest.mark.parametrize("text", ["topk:density=0.1", "topk:density=0.1,dense_below=10"])
@pytest.mark.parametrize("bad", [0, 3])
def test_a_nan_on_one_rank_raises_on_all_of_a_static_graph(text, bad, rank, size):
    replica, other = (Replica(SHAPES, text, static_graph=True) for _ in range(2))
    for step in range(6):
        mine = gradients(rank, step)
        if step == bad:
            if rank == size - 1:
                mine["bias"][2] = np.nan
            with pytest.raises(NonFiniteGradientError) as caught:
                replica.model(mine).backward()
            assert list(caught.value.where.values()) == ["bias"]
            assert list(caught.value.where) == [size - 1]
            assert not any(parameter.grad.any() for parameter in replica.net.parameters())
            replica.optimizer.zero_grad()
        else:
            assert same_on_all_replicas(*replica.step(mine).values())
        other.step(gradients(rank, step))
    assert replica.sync.step == other.sync.step - 1
    if rank < size - 1 and "dense" not in text:  # its gradient of that step waits in the residual
        assert any(residual.any() for residual in replica.held().values())


@pytest.mark.parametrize("arguments", [{}, {"static_graph": True}])
def test_a_scaled_loss_changes_nothing_and_overflow_skips_on_all(arguments, rank, size):
    plain, scaled = (Replica(SHAPES, "topk:density=0.1", **arguments) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for step in range(6):
        plain.step(gradients(rank, step))
        for attempt in ("bad", "good") if step == 4 else ("good",):
            mine = gradients(rank, step)
            if attempt == "bad" and rank == 0:
                mine["one"][0] = np.inf
            scaler.scale(scaled.model(mine)).backward()
            scaler.step(scaled.optimizer)
            scaler.update()
            scaled.optimizer.zero_grad()
            if attempt == "bad":
                assert scaler.get_scale() == 2.0**9
                assert scaled.sync.step == 4
        assert same(dict(plain.net.named_parameters()), dict(scaled.net.named_parameters()))
    assert same_on_all_replicas(*scaled.net.parameters())


def test_a_model_of_another_type_is_no_longer_synchronized_and_says_so(rank):
    """PyTorch forgets DistributedDataParallel's hooks then: every rank would train alone."""
    replica = Replica(SHAPES, "topk:density=0.1")
    for step in range(2):
        replica.step(gradients(rank, step))
    replica.net.double().float()
    with pytest.raises(UnsupportedError, match="wrap it again"):
        replica.step(gradients(rank, 2))


@pytest.mark.parametrize("feedback", ["error", "momentum(momentum=0.5,masking=false)"])
def test_density_1_is_dense_training_through_three_overflows(feedback, rank):
    """A step that one rank's scaler skips is given up whole: no rank applies its gradient later."""
    dense, sparse = Replica(SHAPES, None), Replica(SHAPES, f"topk:density=1.0,feedback={feedback}")
    dense.optimizer.param_groups[0]["momentum"] = 0.0 if feedback == "error" else 0.5
    for replica in (dense, sparse):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        for step in range(9):
            mine = gradients(rank, step)
            if step in (2, 5, 6) and rank == step % 2:
                mine["one"][0] = np.inf
            scaler.scale(replica.model(mine)).backward()
            scaler.step(replica.optimizer)
            scaler.update()
            replica.optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**7
    assert same(dict(dense.net.named_parameters()), dict(sparse.net.named_parameters()))


def test_a_residual_follows_the_learning_rate(rank, caplog):
    text = "topk:density=0.1,feedback=error(scale_residual=true)"
    steady, falling = (Replica(SHAPES, text) for _ in range(2))
    for step, rate in enumerate([1.0, 0.5, 0.25, 0.125, 0.125, 0.25]):
        falling.optimizer.param_groups[0]["lr"] = rate
        wanted = steady.step({name: rate * gradient for name, gradient in gradients(rank, step).items()})
        found = falling.step(gradients(rank, step))
        for name in SHAPES:
            assert torch.equal(rate * found[name], wanted[name]), (step, name)
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        ddp.State(text)
    assert "optimizer=optimizer" in caplog.text


def test_steps_that_somebody_clips_are_told_of_once(rank, caplog):
    model = DistributedDataParallel(torch.nn.Linear(30, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ddp.attach(model, "topk:density=0.1,feedback=adam", optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(40):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 30)).square().sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if step >= 20 else 1e6)
        scaler.step(optimizer)
        scaler.update()
        assert step >= 20 or not caplog.text
    assert caplog.text.count("clip_grad_norm_()") == 1


def test_groups_of_parameters_have_buckets_of_their_own(rank):
    replica = Replica(SHAPES, None)
    parameters = dict(replica.net.named_parameters())
    optimizer = torch.optim.SGD(
        [
            {"params": [parameters["one"], parameters["first"]]},
            {"params": [parameters["bias"], parameters["second"]]},
        ],
        lr=0.1,
    )
    replica.optimizer, replica.sync = optimizer, ddp.attach(replica.model, "topk:density=0.1", optimizer)
    for step in range(5):
        replica.step(gradients(rank, step))
    group = {"one": 0, "first": 0, "bias": 1, "second": 1}
    assert all(len({group[name] for name in bucket}) == 1 for bucket in replica.sync.plan.buckets)
    assert same_on_all_replicas(*replica.net.parameters())


@pytest.mark.parametrize("arguments", [{"static_graph": True}, {"find_unused_parameters": True}])
def test_what_was_saved_goes_on_bit_for_bit(arguments, rank):
    text = "exdyna:density=0.1"
    whole = Replica(SHAPES, text, **arguments)
    for step in range(7):
        whole.step(gradients(rank, step))
    saved = copy.deepcopy((whole.net.state_dict(), whole.sync.state_dict()))
    later = Replica(SHAPES, text, **arguments)
    fresh = later.sync.state_dict()
    later.sync.load_state_dict(fresh)
    later.step(gradients(rank, 0))
    later.sync.load_state_dict(fresh)
    assert not any(residual.any() for residual in later.held().values())
    later = Replica(SHAPES, text, **arguments)
    later.net.load_state_dict(saved[0])
    later.sync.load_state_dict(saved[1])
    assert later.sync.state_dict()["step"] == 7
    for step in range(7, 13):
        assert same(whole.step(gradients(rank, step)), later.step(gradients(rank, step))), step
    assert later.sync.step == 13


def test_what_cannot_be_loaded_is_refused(rank, size):
    replica = Replica(SHAPES, "topk:density=0.1")
    for step in range(4):
        replica.step(gradients(rank, step))
    entry = replica.sync.state_dict()
    with pytest.raises(StateMismatchError, match="exdyna"):
        Replica(SHAPES, "exdyna:density=0.1").sync.load_state_dict(entry)
    with pytest.raises(StateMismatchError, match="another model"):
        Replica({"other": (3,)}, "topk:density=0.1").sync.load_state_dict(entry)
    with pytest.raises(StateMismatchError, match="shape"):
        Replica(SHAPES | {"bias": (9,)}, "topk:density=0.1").sync.load_state_dict(entry)
    # only one rank has it: all start anew at its step, and keep their residuals
    later = Replica(SHAPES, "topk:density=0.1")
    if rank == 0:
        later.sync.load_state_dict(entry)
    found = later.step(gradients(rank, 4))
    assert same_on_all_replicas(*found.values())
    assert later.sync.step == 5
    # nothing: from the beginning
    later.sync.load_state_dict(None)
    later.step(gradients(rank, 5))
    assert later.sync.step == 1


def test_what_is_no_model_or_no_sparsifier_is_refused(rank):
    replica = Replica(SHAPES, "topk:density=0.1")
    with pytest.raises(UnsupportedError, match="already"):
        ddp.attach(replica.model, "topk:density=0.1")
    with pytest.raises(ArgumentError, match="model="):
        ddp.attach(replica.net, "topk:density=0.1")
    plain = Replica(SHAPES, None)
    for none in ("none", 0.1, None):
        with pytest.raises(ArgumentError, match="leave the hook out"):
            ddp.attach(plain.model, none)
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
