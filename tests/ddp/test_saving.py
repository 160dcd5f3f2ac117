"""Loops that people write around `optimizer.step()`, and that what they save is enough to go on."""

import copy
import logging
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse import ddp
from horovod_sparse.errors import DriftError, UnsupportedError
from support.passes import adamw, backward, batches, begun, flat, net_of, train
from support.replicas import common_are_equal, same_on_all_replicas
from support.sampling import rows_by

schedules = pytest.mark.parametrize(("every", "delay"), [(1, 0), (1, 1), (4, 0)])
TEXT = "best:density=0.1"
alone = pytest.mark.parametrize(("every", "delay"), [(1, 1), (4, 0)])


def loss_of(net) -> float:
    """The loss of what the first two ranks train with."""
    given = [batch for rank in range(2) for batch in batches(rank, 20)]
    with torch.no_grad():
        return sum(float(mse_loss(net(inputs), targets)) for inputs, targets in given) / len(given)


def save(model, optimizer, sync, folder) -> None:
    with sync.common():
        named, state = get_state_dict(model, optimizer)
        dcp.save({"model": named, "optimizer": state}, checkpoint_id=folder)


def load(model, optimizer, folder) -> None:
    named, state = get_state_dict(model, optimizer)
    dcp.load({"model": named, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=named, optim_state_dict=state)


@rows_by("schedule,ranks", [(1, 0), (1, 1), (4, 0)], ["as many", "one alone"])
def test_a_distributed_checkpoint_suffices(schedule, ranks, folder, rank):
    """Ranks have the same batches, so that one alone trains as all do."""
    (every, delay), losses = schedule, []
    own = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    for saves in (False, True):
        net = net_of()
        model = DistributedDataParallel(net)
        optimizer = adamw(net)
        sync = ddp.attach(model, TEXT, optimizer, every=every, delay=delay)
        for _ in range(5):
            train(net, optimizer, 0, 20)
        if saves:
            save(model, optimizer, sync, folder)
            net = net_of(1)
            optimizer = adamw(net)
            group = own if ranks == "one alone" else None
            sync = ddp.attach(net, TEXT, optimizer, every=every, delay=delay, replicas=group)
            load(net, optimizer, folder)
        train(net, optimizer, 0, 20)
        sync.finish()
        losses.append(loss_of(net))
    assert abs(losses[0] - losses[1]) < 0.01
    assert losses[0] < 0.8 * loss_of(net_of())


def test_the_first_rank_alone_may_ask_for_a_distributed_checkpoint(rank):
    """PyTorch steps an optimizer without a state, as it does here: with gradients of zeros, in step()."""
    net, optimizer, sync = begun()
    if rank == 0:
        _, state = get_state_dict(net, optimizer)
        assert "horovod_sparse_residual" in state["state"]["0.weight"]
    assert torch.equal(flat(net), flat(net_of()))
    train(net, optimizer, rank, 2)
    assert sync.step == 2


@pytest.mark.controllers
@pytest.mark.parametrize("delay", [0, 1])
def test_a_distributed_checkpoint_of_shards_suffices(delay, folder, rank, size):
    if size != 4:
        pytest.skip("for two shards on two hosts")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    losses = []

    def made(seed: int):
        net = fully_shard(net_of(seed), mesh=mesh["shard"])
        optimizer = adamw(net)
        return net, optimizer, ddp.attach(net, TEXT, optimizer, delay=delay, replicas=mesh["replicate"])

    for saves in (False, True):
        net, optimizer, sync = made(0)
        train(net, optimizer, rank, 14)
        if saves:
            save(net, optimizer, sync, folder)
            net, optimizer, sync = made(1)
            load(net, optimizer, folder)
            residuals = (optimizer.state[one]["horovod_sparse_residual"] for one in net.parameters())
            assert all(one.full_tensor().any() for one in residuals)
        train(net, optimizer, rank, 20)
        sync.finish()
        whole = net_of()
        whole.load_state_dict({name: one.full_tensor() for name, one in net.state_dict().items()})
        losses.append(loss_of(whole))
    assert abs(losses[0] - losses[1]) < 0.01


@rows_by("kind,first", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop], ["plain", "ours"])
def test_plain_pytorch_goes_on_and_we_go_on_from_it(kind, first, rank, size):
    """Gradients of plain PyTorch are averaged by DistributedDataParallel."""
    more = {"momentum": 0.9, "lr": 0.02} if kind is torch.optim.SGD else {"lr": 5e-3}
    losses = []
    for changes in (False, True):
        net = net_of()
        state = None
        for ours in (first == "ours", (first == "ours") is not changes):
            model = DistributedDataParallel(net)
            optimizer = kind(net.parameters(), **more)
            if state is not None:
                optimizer.load_state_dict(state)
            if ours:
                ddp.attach(model, "best:density=0.3", optimizer)
            for _ in range(3 if state is None else 1):
                train(model, optimizer, rank, 20)
            found = [optimizer.state_dict()]
            dist.broadcast_object_list(found)  # what a trainer's first rank saves
            state = found[0]
        losses.append(loss_of(net))
        assert same_on_all_replicas(*net.parameters())
    assert abs(losses[0] - losses[1]) < 0.01


def test_nothing_is_cast_down_where_parameters_are_half(rank):
    net = net_of().bfloat16()
    optimizer = adamw(net)
    sync = ddp.attach(net, TEXT, optimizer)
    for inputs, targets in batches(rank, 6):
        backward(net, (inputs.bfloat16(), targets.bfloat16()))
        optimizer.step()
    held, moments = sync.state_dict()["residuals"], sync.state_dict()["companions"][0]
    other = net_of().bfloat16()
    again = adamw(other)
    new = ddp.attach(other, TEXT, again)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    backward(other, [one.bfloat16() for one in next(batches(rank))])
    new.ensure_parts()
    for name in held:
        assert held[name].dtype == moments[name].dtype == torch.float32
        assert torch.equal(new.state_dict()["residuals"][name], held[name])
        assert torch.equal(new.state_dict()["companions"][0][name], moments[name])


@schedules
def test_an_optimizers_state_that_is_loaded_again_changes_nothing(every, delay, rank):
    net, optimizer, sync = begun(every, delay)
    train(net, optimizer, rank, 6)
    ends = []
    for _ in range(2):
        with sync.common():
            states = copy.deepcopy(optimizer.state_dict())["state"].values()
            ends.append([flat(net), *(one["horovod_sparse_residual"] for one in states)])
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for before, after in zip(*ends, strict=True):
        torch.testing.assert_close(after, before)


def test_replicas_of_a_short_training_are_compared_in_the_end(rank):
    net, optimizer, _ = begun(3, 2)
    train(net, optimizer, rank, 5)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))  # not of common parameters
    net, optimizer, sync = begun(3, 2)
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(net, optimizer, rank, 5)
    with pytest.raises(DriftError):
        sync.finish()


@schedules
def test_saving_while_ranks_differ_warns(every, delay, rank, caplog):
    net, optimizer, sync = begun(every, delay)
    train(net, optimizer, rank, 6)
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        with sync.common():
            optimizer.state_dict()
        assert "sync.common()" not in caplog.text
        optimizer.state_dict()
    assert ("sync.common()" in caplog.text) is (every > 1 or delay > 0)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, lambda net: net], ids=["DDP", "module"])
def test_the_optimizers_state_has_the_residual_of_exchanged_gradients(wrap, rank):
    saved, ends = None, []
    for _ in range(2):
        net = net_of()
        model, optimizer = wrap(net), torch.optim.SGD(net.parameters(), lr=0.1)
        ddp.attach(model, "topk:density=0.1", optimizer)
        if saved is None:
            train(model, optimizer, rank, 6)
            saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        else:
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        train(model, optimizer, rank, 6)
        ends.append(flat(net))
    assert torch.equal(*ends)


@pytest.mark.parametrize(("every", "delay", "fewer"), [(1, 0, 0), (1, 0, 7), (2, 1, 3), (4, 0, 0), (2, 3, 7)])
def test_a_rank_with_fewer_batches_meets_the_others_in_finish(every, delay, fewer, rank, size):
    """In one exchange more, in which statistics become equal, too; before, they stay near each other."""
    # dragonn's messages have room for what is selected in one pass
    text = "dragonn:density=0.1,feedback=best" if delay else "best:density=0.1"
    net, optimizer, sync = begun(every, delay, text)
    net.register_buffer("statistics", torch.zeros(3))
    train(net, optimizer, rank, fewer if rank else 10, each=lambda _: net.statistics.add_(rank + 0.1))
    sync.finish()
    assert sync._num_begun == 10 // every + 1
    assert same_on_all_replicas(*net.parameters(), net.statistics)
    train(net, optimizer, rank, 60, each=lambda _: net.statistics.mul_(0.9).add_(rank / 10))
    assert abs(net.statistics[0] - (size - 1) / 2) < 1  # of its mean over ranks
    sync.finish()
    sync.finish()
    assert same_on_all_replicas(*net.parameters())
    ddp.attach(DistributedDataParallel(net, broadcast_buffers=False), text, optimizer)
    train(net, optimizer, rank, 2, between=lambda _: net.statistics.fill_(rank))
    assert net.statistics[0] == rank


@alone
def test_parameters_that_are_edited_between_steps_are_an_error(every, delay, rank):
    """Own moves are put back at their places, where edits would be undone, and a step's moves lost."""
    net, optimizer, sync = begun(every, delay)
    train(net, optimizer, rank, 5)
    with sync.common():
        for one in net.parameters():
            one.data.clamp_(-0.1, 0.1)
        for refused in (optimizer.step, sync.finish, lambda: sync.load_state_dict(None)):
            with pytest.raises(UnsupportedError, match="which hides moves"):
                refused()
    train(net, optimizer, rank, 1)
    common_are_equal(net, sync)
    for one in net.parameters():
        one.data.mul_(0.5)
    with pytest.raises(UnsupportedError, match=r"within `with sync.common\(\):`"):
        train(net, optimizer, rank, 1)


@schedules
def test_a_model_that_is_loaded_is_what_training_goes_on_from(every, delay, rank):
    net, optimizer, sync = begun(every, delay)
    train(net, optimizer, rank, 6)
    net.load_state_dict(net_of(5).state_dict())
    sync.finish()
    assert torch.equal(flat(net), flat(net_of(5)))
    train(net, optimizer, rank, 6)
    sync.finish()
    assert same_on_all_replicas(*net.parameters())


def test_a_step_that_raises_leaves_gradients(rank):
    net, optimizer, sync = begun()
    backward(net, next(batches(rank)))

    def refuse(*_) -> None:
        raise RuntimeError("mine")

    handle = optimizer.register_step_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="mine"):
        optimizer.step()
    assert net[0].weight.grad is not None
    handle.remove()
    with pytest.raises(RuntimeError, match="mine"):
        optimizer.step(lambda: refuse())
    optimizer.step()
    assert sync.step == 1
    assert same_on_all_replicas(*net.parameters())


@rows_by("schedule,how", [(1, 0), (1, 1), (4, 0)], ["detached", "copied", "pickled"])
def test_an_optimizer_goes_on_without_us(schedule, how, rank, caplog):
    net, optimizer, sync = begun(*schedule)
    train(net, optimizer, rank, 5)
    moment = sync.state_dict()["companions"][0]["0.weight"]
    if how == "detached":
        sync.finish()
        sync.detach()
    else:
        given = pickle.dumps((net, optimizer)) if how == "pickled" else None
        net, optimizer = pickle.loads(given) if given else copy.deepcopy((net, optimizer))
    assert torch.equal(optimizer.state[net[0].weight]["exp_avg_sq"], moment)
    assert ("moments differ from rank to rank" in caplog.text) == (how == "detached")
    before = flat(net)
    train(net, optimizer, rank, 2)
    assert 0.0 < (flat(net) - before).abs().max() < 0.1


@pytest.mark.parametrize(("outside", "text"), [(True, TEXT), (False, TEXT), (False, "topk:density=0.1")])
def test_a_compiled_wrapper_and_what_it_wraps_have_the_parameters_names(outside, text, rank):
    net = net_of()
    inner = net if outside else torch.compile(net, backend="eager")
    wrapper = DistributedDataParallel(inner)
    model = torch.compile(wrapper, backend="eager") if outside else wrapper
    optimizer = adamw(net)
    sync = ddp.attach(model, text, optimizer)
    train(model, optimizer, rank, 3)
    assert sync.step == 3
    assert set(sync.state_dict()["residuals"]) == {name for name, _ in net.named_parameters()}
    assert same_on_all_replicas(*net.parameters())
