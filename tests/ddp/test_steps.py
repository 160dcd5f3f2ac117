"""The laws of a pass: the exchange belongs to `optimizer.step()`; every rank runs the same tests.

References are plain loops of torch: a test of a law knows nothing of buckets, messages or moves.
"""

import contextlib
import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist

from horovod_sparse import ddp
from horovod_sparse.ddp.collectives import Carrier
from horovod_sparse.errors import ArgumentError, NonFiniteGradientError, StateMismatchError, UnsupportedError
from horovod_sparse.merging import Plan
from support.passes import adamw, backward, batches, begun, flat, momentum, muon, net_of, sick, train
from support.replicas import common_are_equal, same_on_all_replicas
from support.sampling import rest_nightly, rows_by

SCHEDULES = [(1, 0), (1, 1), (1, 3), (4, 0), (3, 1)]
schedules = pytest.mark.parametrize(("every", "delay"), SCHEDULES)


TEXTS = ["best:density=0.05", "chunk_topk:density=0.05,feedback=best,chunk=64"]


@rows_by("schedule,text,missing,make", SCHEDULES, TEXTS, [False, True], [adamw, momentum], each=2)
def test_common_parameters_are_equal_bit_for_bit_after_every_pass(schedule, text, missing, make, rank):
    """Also where one rank has no gradient of a parameter in some passes."""
    net, optimizer, sync = begun(*schedule, text, make=make, weight_decay=0.1)

    def between(step: int) -> None:
        if missing and step % 3 == 1 and rank == 0:
            net[0].weight.grad = None

    def look(step: int) -> None:
        own = flat(net)
        common_are_equal(net, sync)
        assert torch.equal(flat(net), own)  # this rank's own moves are back, bit for bit

    train(net, optimizer, rank, between=between, each=look)
    sync.finish()
    assert same_on_all_replicas(*net.parameters())


@rows_by("schedule,values,make", SCHEDULES, ["exact", "2bit"], [momentum, muon])
def test_what_ranks_computed_is_applied_or_held_back(schedule, values, make, rank, size):
    """Parameters and mean residual are where PyTorch's own steps end, averaged over ranks."""
    net, plain = net_of(), net_of()
    optimizer, alone = make(net), make(plain)
    text = f"topk:density=0.05,feedback=best,values={values},indices=gaps"
    every, delay = schedule
    sync = ddp.attach(net, text, optimizer, every=every, delay=delay)
    for batch in batches(rank):
        backward(net, batch)
        for one, other in zip(plain.parameters(), net.parameters(), strict=True):
            one.grad = other.grad.clone()
        alone.step()
        optimizer.step()
        for one, other in zip(plain.parameters(), net.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
    sync.finish()
    held = sync.state_dict()["residuals"]
    held = [held.get(name, torch.zeros_like(one)).reshape(-1) for name, one in net.named_parameters()]
    ended = flat(plain) + torch.cat(held)
    dist.all_reduce(ended)
    torch.testing.assert_close(flat(net), ended / size, rtol=0, atol=2e-6)


def test_exchanges_of_four_buckets_are_one_message_each_and_in_flight_together(rank, size, monkeypatch):
    """The last rank sends each message once the first rank has begun the next one."""
    net = net_of()
    net.register_buffer("statistics", torch.full((3,), float(rank)))
    plan, optimizer = Plan(tuple((name,) for name, _ in net.named_parameters())), adamw(net)
    sync = ddp.attach(net, "best:density=0.1", optimizer, plan=plan, delay=2)
    train(net, optimizer, rank, 3)  # in the first step ranks agree
    begin, sent, store = Carrier.begin, [], dist.distributed_c10d._get_default_store()

    def begin_late(*given):
        sent.append(given)
        if rank == 0:
            store.set(f"exchange {len(sent)} has begun", "")
        elif rank == size - 1 and len(sent) < 4:
            store.wait([f"exchange {len(sent) + 1} has begun"])
        return begin(*given)

    monkeypatch.setattr(Carrier, "begin", begin_late)
    train(net, optimizer, rank, 4)
    sync.settle()
    assert len(sent) == 4
    lanes = {id(lane): lane for lane, _ in sent}.values()
    assert all(lane._from[one].offered for lane in lanes for one in range(size) if one != rank)
    assert len(lanes) == 4 and same_on_all_replicas(*net.parameters())


@pytest.mark.parametrize(("make", "ahead"), [(adamw, 0), (momentum, 10)])
def test_ranks_of_sgd_step_ahead(make, ahead, rank):
    """A rank moves by what it has sent, and SGD by the largest unsent elements beside it, a 64th of all."""
    net, optimizer, sync = begun(delay=1, make=make)

    def look(step: int) -> None:
        own = flat(net)
        with sync.common():
            assert int((flat(net) != own).sum()) == 64 + ahead
        (part,) = sync.parts
        for move in part.moves.ahead:
            left = np.abs(part.bucket.accumulator.values())
            left[part.moves.moves[-1].indices] = 0  # what was sent has left a rounding error alone
            assert set(move.indices) == set(np.argsort(-left)[:ahead])

    train(net, optimizer, rank, each=look)
    sync.settle()
    assert same_on_all_replicas(*net.parameters())


@schedules
def test_every_pass_teaches_how_alike_gradients_are(every, delay, rank):
    """Parameters that stand still have the same gradients at every schedule, and so the same estimate."""
    learned = []
    for schedule in [(1, 0), (every, delay)]:
        net, optimizer, sync = begun(*schedule, lr=1e-12)
        train(net, optimizer, rank)
        sync.finish()
        learned += [part.bucket.progress.leans for part in sync.parts]
    known, found = learned
    assert 0 < known[0] < known[1]
    assert found == pytest.approx(known, rel=1e-3)


@rows_by("schedule,make", SCHEDULES, [adamw, muon])
def test_a_nan_on_one_rank_leaves_nothing_on_any(schedule, make, rank):
    """The exchange that holds the pass is given up on all ranks; later ones go on, and nobody keeps a NaN."""
    net, optimizer, sync = begun(*schedule, make=make)
    raised = 0
    for step, batch in enumerate(batches(rank, 20)):
        backward(net, sick(6, rank)(step, batch))
        try:
            optimizer.step()
        except NonFiniteGradientError as error:
            raised += 1
            assert list(error.where) == [1]
        common_are_equal(net, sync)
    sync.finish()
    assert raised == 1
    assert torch.isfinite(flat(net)).all()
    held = sync.state_dict()
    for values in [*held["residuals"].values(), *held["companions"][0].values()]:
        assert torch.isfinite(values).all()


@rows_by("schedule,how", SCHEDULES, ["no gradient", "frozen", "rate 0"])
def test_what_has_no_gradient_or_no_rate_does_not_move(schedule, how, rank):
    net, (every, delay) = net_of(), schedule
    groups = [{"params": list(net[0].parameters())}, {"params": list(net[2].parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    sync = ddp.attach(net, "best:density=0.05", optimizer, every=every, delay=delay)
    train(net, optimizer, rank, 6)
    sync.finish()
    before, held = net[0].weight.detach().clone(), sync.state_dict()["residuals"]["0.weight"].clone()
    moved = net[2].weight.detach().clone()
    if how == "rate 0":
        optimizer.param_groups[0]["lr"] = 0.0
    for batch in batches(rank, 6):
        if how == "frozen":
            net[0].requires_grad_(False)
        backward(net, batch)
        if how == "no gradient":
            net[0].weight.grad = net[0].bias.grad = None
        optimizer.step()
    sync.finish()
    assert torch.equal(net[0].weight, before)
    assert torch.equal(sync.state_dict()["residuals"]["0.weight"], held)
    assert not torch.equal(net[2].weight, moved)


def test_what_has_no_exchange_of_steps_is_refused_by_name(rank):
    net, other, words = net_of(), torch.nn.Linear(2, 2), torch.nn.Embedding(9, 4, sparse=True)
    with pytest.raises(ArgumentError, match=r"parameter 4 of shape \[2, 2\]"):
        ddp.attach(net, "best", torch.optim.AdamW([*net.parameters(), *other.parameters()]))
    for name in ("exdyna", "micro", "oktopk", "gtopk", "spardl", "cltk"):
        with pytest.raises(ArgumentError, match=f"delay=0 with {name}"):
            ddp.attach(net, f"{name}:density=0.1,feedback=best", adamw(net), delay=1)
    with pytest.raises(ArgumentError, match=r"delay=65 .* 0 to 64"):
        ddp.attach(net, "best", adamw(net), delay=65)
    for text in ("best", "topk:density=0.5"):
        with pytest.raises(ArgumentError, match="optimizer='SparseAdam'"):
            ddp.attach(words, text, torch.optim.SparseAdam(words.parameters()))


#: one sparsifier of each kind of exchange
BY_DAY = ["exdyna", "oktopk", "gtopk", "cltk", "dgc"]


@pytest.mark.parametrize(
    "name", rest_nightly(["micro", "spardl", "randomk", "sidco", "mstopk", *BY_DAY], BY_DAY)
)
def test_every_sparsifier_trains_in_every_pass(name, rank):
    net, optimizer, sync = begun(text=f"{name}:density=0.1,feedback=best")
    train(net, optimizer, rank, 6)
    assert same_on_all_replicas(*net.parameters())
    assert sync.step == 6


def test_exchanges_of_two_optimizers_cross_on_the_wire(rank):
    trainings = [begun(delay=1), begun(delay=1, seed=1)]
    for step, batch in enumerate(batches(rank, 8)):
        turn = [0, 1] if step < 3 or rank == 0 else [1, 0]  # ranks meet at first, and compare replicas
        for number in turn:
            net, optimizer, _ = trainings[number]
            backward(net, batch)
            optimizer.step()
    for net, _, sync in trainings:
        sync.finish()
        assert same_on_all_replicas(*net.parameters())


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Muon]
)
def test_the_optimizers_own_state_suffices(kind, rank, size):
    """What any trainer saves: second moments under PyTorch's names, and the residual."""

    def trained(model):
        return [one for one in model.parameters() if one.ndim == 2 or kind is not torch.optim.Muon]

    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    net = net_of()
    optimizer = kind(trained(net), lr=1e-2, **more)
    sync = ddp.attach(net, "best:density=0.1", optimizer)
    train(net, optimizer, rank, 10)
    saved = copy.deepcopy(optimizer.state_dict())
    moments = sync.state_dict()["companions"][0]
    names = [name for name, _ in net.named_parameters() if name in moments]
    for number, parameter in enumerate(names):
        (name,) = {"momentum_buffer", "square_avg", "exp_avg_sq"} & set(saved["state"][number])
        assert torch.equal(saved["state"][number][name], moments[parameter])

    again = net_of()
    again.load_state_dict(net.state_dict())
    other = kind(trained(again), lr=1e-2, **more)
    new = ddp.attach(again, "best:density=0.1", other)
    other.load_state_dict(saved)
    for model, stepping in ((net, optimizer), (again, other)):
        train(model, stepping, rank, 5)
    assert torch.equal(flat(net), flat(again))
    held = (one.state_dict()["residuals"].values() for one in (sync, new))
    assert all(map(torch.equal, *held))


@rows_by("schedule,dtype", SCHEDULES, [torch.float16, torch.bfloat16, torch.float64])
def test_parameters_of_every_float_type_train(schedule, dtype, rank):
    net, (every, delay) = net_of().to(dtype), schedule
    optimizer = adamw(net, weight_decay=0.0)  # steps alone change weights
    sync = ddp.attach(net, "best:density=0.1", optimizer, every=every, delay=delay)
    train(net, optimizer, rank, before=lambda _, batch: [one.to(dtype) for one in batch])
    sync.finish()
    assert same_on_all_replicas(*(one.detach().double() for one in net.parameters()))
    assert not torch.equal(net[0].weight, net_of().to(dtype)[0].weight)


@rows_by("schedule,how", SCHEDULES, ["thawed", "added"])
def test_parameters_join_while_moves_are_under_way(schedule, how, rank):
    net, (every, delay) = net_of(), schedule
    net[2].requires_grad_(how == "added")
    optimizer = torch.optim.AdamW((net[0] if how == "added" else net).parameters(), lr=1e-2)
    sync = ddp.attach(net, "best:density=0.1", optimizer, every=every, delay=delay)
    before = net[2].weight.detach().clone()

    def join(step: int, batch):
        if step == 6:
            net[2].requires_grad_(True)
            if how == "added":
                optimizer.add_param_group({"params": net[2].parameters()})
        return batch

    train(net, optimizer, rank, before=join, each=lambda _: common_are_equal(net, sync))
    assert all("exp_avg_sq" in one for one in optimizer.state_dict()["state"].values())
    sync.finish()
    assert same_on_all_replicas(*net.parameters())
    assert not torch.equal(net[2].weight, before)


def test_a_parameter_with_gaps_in_memory_is_refused(rank):
    """Steps went into a copy of it, and it never moved."""
    net = torch.nn.Module()
    net.gaps = torch.nn.Parameter(torch.randn(8, 3)[::2])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ddp.attach(net, "topk:density=1.0,feedback=best", optimizer)
    net.gaps.sum().backward()
    with pytest.raises(UnsupportedError, match="gaps in memory"):
        optimizer.step()


@pytest.mark.parametrize("delay", [0, 1])
def test_an_interrupt_on_one_rank_alone_is_named_by_the_next_step(delay, rank, monkeypatch):
    """The other ranks have applied what this one has given up: they must not train on side by side."""
    net, optimizer, sync = begun(delay=delay)
    train(net, optimizer, rank, 4)
    backward(net, next(batches(rank)))
    wait = sync.starter.wait

    def interrupted(tasks):
        wait(tasks)
        if rank == 0 and len(tasks) > 1:  # of an exchange
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(sync.starter, "wait", interrupted)
        optimizer.step()
    with pytest.raises(StateMismatchError, match=r"not at the same (exchange|step)"):
        train(net, optimizer, rank, 3)
