"""Loops that people write around `optimizer.step()`; every rank runs the same tests."""

import copy
import pickle

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse import ddp
from horovod_sparse.errors import UnsupportedError
from support.passes import adamw, backward, batches, begun, flat, net_of, train
from support.replicas import common_are_equal, same_on_all_replicas
from support.sampling import rows_by

schedules = pytest.mark.parametrize(("every", "delay"), [(1, 0), (1, 1), (4, 0)])
TEXT = "best:density=0.1"
alone = pytest.mark.parametrize(("every", "delay"), [(1, 1), (4, 0)])


@pytest.mark.parametrize(("every", "delay", "fewer"), [(1, 0, 0), (1, 0, 7), (2, 1, 3), (4, 0, 0), (4, 0, 7)])
def test_a_rank_with_fewer_batches_meets_the_others_in_finish(every, delay, fewer, rank):
    # dragonn's messages have room for what is selected in one pass
    text = "dragonn:density=0.1,feedback=best" if delay else "best:density=0.1"
    net, optimizer, sync = begun(every, delay, text)
    train(net, optimizer, rank, fewer if rank else 10)
    sync.finish()
    assert same_on_all_replicas(*net.parameters())
    train(net, optimizer, rank, 3)
    sync.finish()
    sync.finish()
    assert same_on_all_replicas(*net.parameters())


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
    best = copy.deepcopy(net_of(5).state_dict())
    net.load_state_dict(best)
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
