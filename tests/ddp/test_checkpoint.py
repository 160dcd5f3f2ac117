"""All ranks save to a folder and go on from it, with DistributedDataParallel and with local steps."""

import copy
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse import ddp
from horovod_sparse.errors import ArgumentError, CheckpointError, StateMismatchError, UnsupportedError
from support.passes import batches, flat, momentum, net_of
from support.replicas import same_on_all_replicas
from support.sampling import rest_nightly

MOST = 12


def made(way: str, group=None, seed: int = 0):
    """A model with statistics of batches, and what trains it."""
    net = net_of(seed).insert(1, torch.nn.BatchNorm1d(40))
    model = DistributedDataParallel(net, process_group=group)
    kind, *numbers = way.split()
    every, delay = map(int, numbers or (1, 0))
    if kind == "gradients":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        return model, optimizer, ddp.attach(model, "exdyna:density=0.1", optimizer)
    optimizer = momentum(net) if kind == "sgd" else torch.optim.AdamW(net.parameters(), lr=1e-2)
    if kind == "local":
        text = "topk:density=0.1,values=2bit"
        return model, optimizer, ddp.LocalSteps(optimizer, model, every=every, delay=delay, compression=text)
    text = "topk:density=0.1,feedback=best,values=2bit"
    return model, optimizer, ddp.attach(model, text, optimizer, every=every, delay=delay)


def trained(model, optimizer, rank: int, steps: range) -> None:
    for step, (inputs, targets) in enumerate(batches(rank, MOST)):
        if step in steps:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


def parts(way: str, model, optimizer, sync) -> list:
    """What a loop saves: moments of `best` are in the entry, those of local steps are the optimizer's."""
    return [model, *([optimizer] if "local" in way else []), sync]


WAYS = ["gradients", "steps 1 0", "steps 4 0", "sgd 1 1", "steps 3 2", "local 4 0", "local 3 2"]
ways = pytest.mark.parametrize("way", rest_nightly(WAYS, ["gradients", "sgd 1 1", "steps 3 2", "local 4 0"]))


@pytest.mark.parametrize("how", ["folder", "entry"])
@ways
def test_it_goes_on_bit_for_bit(way, how, folder, rank):
    """Saved between two exchanges, with what is in flight: to a folder, or as any loop saves an entry."""
    ends, memory = [], io.BytesIO()
    for interrupted in (False, True):
        model, optimizer, sync = made(way)
        trained(model, optimizer, rank, range(7))
        saved = sync.step if how == "entry" else ddp.save(folder, sync, model=model)
        if interrupted:
            torch.save([one.state_dict() for one in parts(way, model, optimizer, sync)], memory)
            model, optimizer, sync = made(way, seed=1)
            if how == "folder":
                assert ddp.load(folder, sync, model=model) == saved
            else:
                memory.seek(0)
                states = torch.load(memory, weights_only=True)
                for one, state in zip(parts(way, model, optimizer, sync), states, strict=True):
                    one.load_state_dict(state)
            assert sync.step == saved
        trained(model, optimizer, rank, range(7, MOST))
        entry = sync.state_dict()
        ends.append([flat(model), *model.buffers(), *entry["residuals"].values()])
    assert [number for number, pair in enumerate(zip(*ends, strict=True)) if not torch.equal(*pair)] == []


@ways
def test_what_is_wrong_on_one_rank_is_an_error_on_all_and_the_one_before_loads(way, folder, rank):
    model, optimizer, sync = made(way)
    for last in (6, MOST):
        trained(model, optimizer, rank, range(last - 6, last))
        last = ddp.save(folder, sync, model=model)
    own = flat(model)
    names = sorted(one.name for one in Path(folder).iterdir())
    file = Path(folder) / names[-1] / "rank-00001.npz"
    dist.barrier()
    if rank == 1:
        file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"rank-00001\.npz"):
        ddp.load(folder, sync, model=model)
    assert torch.equal(flat(model), own)
    trained(model, optimizer, rank, range(3))  # and goes on
    (fresh, _, again), first = made(way, seed=1), int(names[0][5:15])
    with pytest.raises(StateMismatchError, match="another model"):
        ddp.load(folder, again, first, model=net_of() if rank == 0 else torch.nn.Linear(2, 2))
    assert ddp.load(folder, again, first, model=fresh) == first < last


@pytest.mark.parametrize("way", rest_nightly(WAYS[:5], ["gradients", "sgd 1 1", "steps 3 2"]))
def test_one_rank_goes_on_with_the_mean_of_what_two_held_back(way, folder, rank, size):
    """What ranks hold back and have moved by: common parameters less its mean are the same."""

    def common(model, sync) -> tuple[torch.Tensor, torch.Tensor]:
        names = [name for name, _ in model.module.named_parameters()]
        if way == "gradients":
            residuals = sync.state_dict()["residuals"]
            return flat(model), torch.cat([residuals[name].reshape(-1) for name in names])
        with sync.common():
            states = sync.optimizer.state_dict()["state"].values()
            waiting = torch.cat([one["horovod_sparse_residual"].reshape(-1) for one in states])
            return flat(model), waiting.clone()

    model, optimizer, sync = made(way)
    trained(model, optimizer, rank, range(7))
    ddp.save(folder, sync, model=model)
    before, waiting = common(model, sync)
    dist.all_reduce(waiting)
    alone = [dist.new_group([one]) for one in range(size)][rank]
    model, optimizer, again = made(way, alone, seed=1)
    ddp.load(folder, again, model=model)
    again.agree()
    after, waits = common(model, again)
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(waits, waiting / size)
    trained(model, optimizer, rank, range(7, MOST))


@pytest.mark.parametrize("way", rest_nightly(WAYS[1:5], ["sgd 1 1", "steps 3 2"]))
def test_common_parameters_are_saved_with_moves_in_the_residual(way, folder, rank):
    model, optimizer, sync = made(way)
    trained(model, optimizer, rank, range(7))
    own = flat(model)
    with sync.common():
        ddp.save(folder, sync, model=model)
        before, kept = flat(model), copy.deepcopy(optimizer.state_dict()["state"])
    assert torch.equal(flat(model), own)
    sync.roll_back()
    assert torch.equal(flat(model), before)
    residuals = sync.state_dict()["residuals"]
    for number, one in enumerate(model.parameters()):
        held = optimizer.state[one]["horovod_sparse_residual"]
        torch.testing.assert_close(kept[number]["horovod_sparse_residual"], held)
    model, optimizer, sync = made(way, seed=1)
    ddp.load(folder, sync, model=model)
    assert torch.equal(flat(model), before)
    for name, one in sync.state_dict()["residuals"].items():
        torch.testing.assert_close(one, residuals[name])
    trained(model, optimizer, rank, range(7, MOST))


def test_local_steps_are_saved_with_this_ranks_parameters(folder, rank):
    model, optimizer, sync = made("local 4 0")
    trained(model, optimizer, rank, range(7))
    with sync.common(), pytest.raises(UnsupportedError, match="outside"):
        ddp.save(folder, sync, model=model)


@pytest.mark.parametrize("later", [(1, 0), (4, 0), (1, 1)], ids=str)
def test_a_schedule_may_change(later, folder, rank):
    model, optimizer, sync = made("steps 3 2")
    trained(model, optimizer, rank, range(7))
    ddp.save(folder, sync, model=model)
    with sync.common():
        before = flat(model)
    model, optimizer, sync = made("steps {} {}".format(*later), seed=1)
    ddp.load(folder, sync, model=model)
    with sync.common():
        assert torch.equal(flat(model), before)
    ddp.save(folder, sync, model=model)  # before any step
    ddp.load(folder, sync, model=model)
    trained(model, optimizer, rank, range(7, MOST))
    sync.finish()
    assert same_on_all_replicas(*model.parameters())


def test_what_is_no_training_is_refused(folder):
    model, optimizer, _ = made("gradients")
    for wrong in (model, optimizer):
        with pytest.raises(ArgumentError, match="attach"):
            ddp.save(folder, wrong)
