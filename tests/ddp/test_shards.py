"""FSDP2 within a host, our sums between hosts: four ranks are two hosts of two."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import horovod_sparse.ddp
from horovod_sparse import ddp
from horovod_sparse.errors import ArgumentError, NonFiniteGradientError, StateMismatchError
from horovod_sparse.simulation import SimulatedCluster
from support.cases import on_ranks
from support.documents import blocks
from support.linear import LinearModel, dyadic
from support.passes import adamw, backward, batches, net_of
from support.replicas import same_on_all_replicas
from support.sampling import rows_by

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(dist.get_world_size() != 4, reason="for two hosts of two ranks: --nproc-per-node 4"),
]
#: rows of some are not divisible by two: one rank's shard is padded, or empty
SHAPES = {"first": {"weight": (40, 30), "bias": (7,)}, "second": {"kernel": (3, 5, 11), "one": (1,)}}
NAMES = [f"{layer}.{name}" for layer, inner in SHAPES.items() for name in inner]


class _Net(torch.nn.Module):
    """Layers whose gradients a test chooses, each a group of FSDP, and two parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (LinearModel(inner) for inner in SHAPES.values())
        for layer in (self.first, self.second):
            layer.forward = layer.loss
        self.own = torch.nn.Parameter(torch.ones(6, 2))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, gradients, layers=("first", "second"), times=1):
        loss = (self.own * torch.from_numpy(gradients["own"]).float()).sum().double()
        for _ in range(times):
            for layer in layers:
                loss = loss + getattr(self, layer)(
                    {name: gradients[f"{layer}.{name}"] for name in SHAPES[layer]}
                )
        return loss


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    shapes = {f"{layer}.{name}": shape for layer, inner in SHAPES.items() for name, shape in inner.items()}
    return {name: dyadic(shape, rank, step, name) for name, shape in (shapes | {"own": (6, 2)}).items()}


@pytest.fixture(name="mesh", scope="module")
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


class _Host:
    """A model of four ranks and what synchronizes it; without compression FSDP's own dense sums."""

    def __init__(self, mesh, compression, *, plan=None, lr=0.5, inner=None, **policy) -> None:
        self.net = _Net()
        self.net.unused.requires_grad_(False)
        inner = inner or (mesh if compression is None else mesh["shard"])
        for module in (self.net.first, self.net.second, self.net):
            fully_shard(module, mesh=inner, mp_policy=MixedPrecisionPolicy(**policy))
        self.optimizer = torch.optim.SGD((p for p in self.net.parameters() if p.requires_grad), lr=lr)
        self.sync = None
        if compression is not None:
            self.sync = ddp.attach(
                self.net, compression, self.optimizer, replicas=mesh["replicate"], plan=plan
            )

    def step(self, given, **how) -> dict[str, torch.Tensor]:
        """Backward, step; returns this rank's shards of the synchronized gradients."""
        self.net(given, **how).backward()
        self.optimizer.step()
        found = {
            name: p.grad.to_local().clone() for name, p in self.net.named_parameters() if p.grad is not None
        }
        self.optimizer.zero_grad()
        return found

    def weights(self) -> list[torch.Tensor]:
        return [parameter.full_tensor() for parameter in self.net.parameters()]


def shard_of(values: np.ndarray, shard: int) -> np.ndarray:
    """One of two, as FSDP cuts: by rows, the first shard is the longer one."""
    rows = -(-values.shape[0] // 2)
    return values[shard * rows : (shard + 1) * rows]


TEXTS = ["topk:density=1.0", "exdyna:density=1.0", "topk:density=1.0,dense=('own',)"]


@rows_by("text,times", TEXTS, [1, 2])
def test_density_one_equals_dense_training(text, times, mesh, rank):
    """Of one pass, then of two, whose gradients add up; also where modules run twice."""
    dense, sparse = (_Host(mesh, one) for one in (None, text))
    for host in (dense, sparse):
        host.net.set_reduce_scatter_unused_params(times == 2)  # it then reduces once for each run
    for step in range(4):
        for host in (dense, sparse):
            if step == 3:
                host.net(gradients(rank, 9)).backward()
        one, other = (host.step(gradients(rank, step), times=times) for host in (dense, sparse))
        assert all(torch.equal(one[name], other[name]) for name in [*NAMES, "own"]), step
    assert sparse.sync.step == 4
    assert same_on_all_replicas(*sparse.weights())


@pytest.mark.parametrize("case", on_ranks("topk", "exdyna", "oktopk", "qsgd"))
def test_equals_the_simulator_bit_for_bit(case, mesh, rank):
    """Hosts are its ranks, and it is given the means of theirs: so every law that holds there holds here."""
    host = _Host(mesh, case.at(0.1))
    shard, replica = rank % 2, rank // 2
    plan, clusters = None, {}
    for step in range(5):
        found = host.step(gradients(rank, step))
        if plan is None:
            plan = host.sync.plan
            assert len(plan.buckets) == 1
            for number, names in enumerate(plan.buckets):
                length = sum(found[name].numel() for name in names)
                clusters[names] = SimulatedCluster(case.at(0.1), length, 2, number=number)
        for names, cluster in clusters.items():
            pairs = [(gradients(2 * host, step), gradients(2 * host + 1, step)) for host in range(2)]
            inputs = [
                np.concatenate([shard_of((a[n] + b[n]) / 2, shard).ravel() for n in names], dtype=np.float32)
                for a, b in pairs
            ]
            wanted = cluster.step(inputs, 0.5) * np.float32(0.5)
            np.testing.assert_array_equal(np.concatenate([found[n].numpy().ravel() for n in names]), wanted)
    held = host.sync.state_dict()
    for names, cluster in clusters.items():
        own = np.concatenate([held["residuals"][name].numpy().ravel() for name in names])
        np.testing.assert_array_equal(own, cluster.residuals()[replica])
    assert same_on_all_replicas(*host.weights())
    assert host.sync.rank_and_size == (replica, 2)


def test_a_layer_that_one_host_does_not_use(mesh, rank):
    host = _Host(mesh, "topk:density=0.2")
    host.step(gradients(rank, 0))
    for step in range(1, 5):
        layers = ("first",) if rank >= 2 or step == 4 else ("first", "second")
        found = host.step(gradients(rank, step), layers=layers)
        assert ("second.kernel" in found) == (step < 4)
    assert same_on_all_replicas(*host.weights())


@pytest.mark.parametrize("text", ["topk:density=0.1", "oktopk:density=0.1"])
@pytest.mark.parametrize("bad", [0, 2])
def test_a_nan_on_one_rank_raises_on_all_and_training_goes_on(text, bad, mesh, rank):
    host = _Host(mesh, text)
    for step in range(4):
        mine = gradients(rank, step)
        if step == bad:
            if rank == 3:
                mine["first.weight"][2, 0] = np.nan  # of the first shard: ranks 1 and 3 have none of it
            host.net(mine).backward()
            with pytest.raises(NonFiniteGradientError) as caught:
                host.optimizer.step()
            assert caught.value.where == {1: "first.weight"}
            for parameter in host.net.parameters():
                assert parameter.grad is None or not parameter.grad.to_local().any()
            host.optimizer.zero_grad()
        else:
            host.step(mine)
    assert host.sync.step == 3
    before, scaler = host.weights(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for overflows in (True, False):  # a scaler skips such a step on all
        mine = gradients(rank, 5)
        if overflows and rank == 0:
            mine["second.kernel"][0, 0, 0] = np.inf
        scaler.scale(host.net(mine)).backward()
        scaler.step(host.optimizer)
        scaler.update()
        host.optimizer.zero_grad()
        unchanged = all(torch.equal(one, other) for one, other in zip(before, host.weights(), strict=True))
        assert unchanged == overflows
    assert scaler.get_scale() == 2.0**9
    assert same_on_all_replicas(*host.weights())


@pytest.mark.parametrize("text", ["exdyna:density=0.1", "dgc:density=0.1,feedback=momentum"])
def test_what_was_saved_goes_on_bit_for_bit(text, mesh, rank):
    whole = _Host(mesh, text)
    for step in range(3):
        whole.step(gradients(rank, step))
    saved = copy.deepcopy(whole.sync.state_dict())
    weights = [parameter.to_local().detach().clone() for parameter in whole.net.parameters()]
    assert saved["shard"] == [rank % 2, 2]
    later = _Host(mesh, text)
    with torch.no_grad():
        for parameter, values in zip(later.net.parameters(), weights, strict=True):
            parameter.to_local().copy_(values)
    other = {**saved, "shard": [1 - rank % 2, 2]}
    with pytest.raises(StateMismatchError, match="shard"):
        later.sync.load_state_dict(other)
    later.sync.load_state_dict(saved)
    for step in range(3, 6):
        one, two = whole.step(gradients(rank, step)), later.step(gradients(rank, step))
        assert all(torch.equal(one[name], two[name]) for name in one), step
    entries = [{**saved, "rank": number} for number in range(2)]
    alone = ddp.redistribute(entries, 0, 1)
    assert torch.equal(alone["residuals"]["first.weight"], saved["residuals"]["first.weight"])
    with pytest.raises(StateMismatchError, match="several shards"):
        ddp.redistribute([{**saved, "rank": 0}, {**other, "rank": 1}], 0, 1)


def test_what_cannot_be_sharded_sparsely_is_refused(mesh, rank):
    def sharded(over):
        net = fully_shard(torch.nn.Linear(4, 4), mesh=over)
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    net, optimizer = sharded(mesh)
    with pytest.raises(ArgumentError, match="has sharded over mesh"):
        ddp.attach(net, "topk:density=0.1", optimizer, replicas=mesh["replicate"])
    net, optimizer = sharded(mesh["shard"])
    for replicas in (None, mesh, "replicate"):
        with pytest.raises(ArgumentError, match="replicas="):
            ddp.attach(net, "topk:density=0.1", optimizer, replicas=replicas)
    for more, words in (({"levels": "host"}, "levels"), ({"optimizer": None}, "optimizer")):
        with pytest.raises(ArgumentError, match=words):
            arguments = {"optimizer": optimizer, "replicas": mesh["replicate"], **more}
            ddp.attach(net, "topk:density=0.1", **arguments)
    with pytest.raises(ArgumentError, match="has sharded over mesh"):  # the ranks of a host
        ddp.attach(net, "topk:density=0.1", optimizer, replicas=mesh["shard"])
    for _ in range(2):  # the second takes the place of the first
        sync = ddp.attach(net, "topk:density=0.1", optimizer, replicas=mesh["replicate"].get_group())
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert sync.step == 1


def test_what_is_documented(mesh, rank):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
    torch.manual_seed(rank)
    given = {
        "init_device_mesh": init_device_mesh,
        "fully_shard": fully_shard,
        "horovod_sparse": horovod_sparse,
        "torch": torch,
        "device": "cpu",
        "num_hosts": 2,
        "ranks_per_host": 2,
        "model": model,
    }
    exec(next(one.text for one in blocks() if "test_shards.py" in one.what), given)
    for _ in range(5):
        given["optimizer"].zero_grad()
        torch.nn.functional.cross_entropy(model(torch.randn(8, 20)), torch.randint(5, (8,))).backward()
        given["optimizer"].step()
    assert given["sync"].step == 5
    assert same_on_all_replicas(*(parameter.full_tensor() for parameter in model.parameters()))


@pytest.mark.parametrize("compression", [None, "sparseloco"])
def test_local_steps_exchange_shards_between_hosts(compression, mesh, rank):
    """Each shard as a model of its own would be, whose two ranks have the means of their hosts' gradients."""
    host = _Host(mesh, None, inner=mesh["shard"])
    given = {"every": 2, "compression": compression, "process_group": mesh["replicate"].get_group()}
    with pytest.raises(ArgumentError, match="with the same shard"):
        ddp.LocalSteps(host.optimizer, host.net, **given | {"process_group": None})
    local = ddp.LocalSteps(host.optimizer, host.net, **given)
    alone = _Host(mesh, None, inner=mesh["shard"])
    starts = [p.to_local().clone() for p in alone.net.parameters()]
    for step in range(4):
        for one in (host, alone):
            one.step(gradients(rank, step))
        if step % 2 == 0:
            assert not same_on_all_replicas(*host.weights())
        elif compression is None:  # by hand
            for parameter, start in zip(alone.net.parameters(), starts, strict=True):
                moved = start - parameter.detach().to_local()
                dist.all_reduce(moved, group=given["process_group"])
                start.sub_(moved * 0.5)
                with torch.no_grad():
                    parameter.to_local().copy_(start)
            assert same_on_all_replicas(*host.weights())
            assert all(map(torch.equal, host.weights(), alone.weights()))
    assert same_on_all_replicas(*host.weights())
    if rank == 0:  # of the first host, and of one shard
        with torch.no_grad():
            host.net.first.weight.to_local()[0, 0] = torch.nan
    host.step(gradients(rank, 4))
    with pytest.raises(NonFiniteGradientError, match="not finite"):
        host.step(gradients(rank, 5))
    assert (local.step, local.taken) == (2, 0)


@pytest.mark.parametrize("delay", [0, 1])
def test_shards_of_one_model_step_alike(delay, rank, size):
    """FSDP2 within a host: a NaN in one shard alone gives the exchange up for the other, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = fully_shard(net_of(), mesh=mesh["shard"])
    optimizer = adamw(net)
    sync = ddp.attach(net, "best:density=0.1", optimizer, delay=delay, replicas=mesh["replicate"])
    raised = []
    for step, batch in enumerate(batches(rank, 8)):
        backward(net, batch)
        if step == 3 and rank == 1:
            net[0].weight.grad.to_local()[0, 0] = float("nan")
        try:
            optimizer.step()
        except NonFiniteGradientError:
            raised.append(step)
    sync.finish()
    assert raised == [3 + delay]
    shards = [one.detach().to_local() for one in net.parameters()]
    everyone = [None] * size
    dist.all_gather_object(everyone, [one.sum().item() for one in shards])
    assert everyone[0] == everyone[2] and everyone[1] == everyone[3]
    assert all(torch.isfinite(one).all() for one in shards)
