"""The hook: equal to the simulator, to dense training at density 1, and over ranks."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from horovod_sparse import ddp
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.merging import Plan
from horovod_sparse.simulation import SimulatedCluster
from support.cases import CASES, case_id
from support.linear import dyadic
from support.memories import choose_memory
from support.optimizers import flat, in_bucket_order
from support.replicas import Replica, same_on_all_replicas

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11), "one": (1,)}
PLAN = Plan((("one", "second"), ("scalar", "bias"), ("first",)))
WAYS = {
    "as it is": {},
    "unused looked for": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
}


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    return {name: dyadic(shape, rank, step, name) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_the_simulator_bit_for_bit(case, rank, size):
    """So every law that holds there holds here; the engine over Horovod equals it, too."""
    replica = Replica(SHAPES, case.at(0.1), plan=PLAN)
    clusters = {
        names: SimulatedCluster(
            case.at(0.1), sum(int(np.prod(SHAPES[n])) for n in names), size, name=f"bucket{i}.{names[0]}"
        )
        for i, names in enumerate(PLAN.buckets)
    }
    for step in range(6):
        found = replica.step(gradients(rank, step))
        for names, cluster in clusters.items():
            inputs = [in_bucket_order(gradients(r, step), names) for r in range(size)]
            wanted = cluster.step(inputs, 0.5) * np.float32(1.0 / size)
            if size in (2, 4):
                np.testing.assert_array_equal(flat(found, names), wanted)
            else:  # the simulator sums up what a rank multiplies by 1/P one by one
                np.testing.assert_allclose(flat(found, names), wanted, rtol=1e-6, atol=1e-7)
    for names, cluster in clusters.items():
        np.testing.assert_array_equal(flat(replica.held(), names), cluster.residuals()[rank])
    assert same_on_all_replicas(*replica.net.parameters())


@pytest.mark.parametrize("arguments", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("text", ["topk:density=1.0", "exdyna:density=1.0", "randomk:density=1.0"])
def test_density_one_equals_dense_training(text, arguments, rank, size):
    """Sums are exact, so bits are equal; an average by 3 rounds every rank's value (of at most 4)."""
    dense = Replica(SHAPES, None, **arguments)
    sparse = Replica(SHAPES, text, **arguments)
    tolerance = 0.0 if size in (2, 4) else 1e-6
    for step in range(5):
        one, other = dense.step(gradients(rank, step)), sparse.step(gradients(rank, step))
        for name in SHAPES:
            torch.testing.assert_close(other[name], one[name], rtol=0.0, atol=tolerance)
    for one, other in zip(dense.net.parameters(), sparse.net.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=0.0, atol=5 * tolerance)


@pytest.mark.parametrize("arguments", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("text", ["topk:density=0.1", "exdyna:density=0.1,densities={'second': 0.3}"])
def test_residuals_outlive_the_buckets(text, arguments, rank, size):
    """DistributedDataParallel changes its buckets after the first iteration: nothing is lost by that."""
    replica = Replica(SHAPES, text, **arguments)
    applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    given = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    plans = []
    for step in range(8):
        found = replica.step(gradients(rank, step))
        plans.append(replica.sync.plan)
        for name in SHAPES:
            applied[name] += found[name].double()
            given[name] += sum(gradients(r, step)[name] for r in range(size)) / size
        assert same_on_all_replicas(*found.values()), step
    if "find_unused_parameters" not in arguments:
        assert plans[0] != plans[-1]
    assert len(plans[-1].buckets) > 1
    assert plans[5] == plans[-1]
    held = replica.held()
    assert any(tensor.count_nonzero() for tensor in held.values())
    for name, shape in SHAPES.items():
        mean = held[name].double().reshape(shape).clone()
        dist.all_reduce(mean)
        total = applied[name] + mean / size
        torch.testing.assert_close(total, torch.from_numpy(np.asarray(given[name])), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "text",
    ["topk:density=0.2,dense=('*bias','scalar')", "dgc:density=0.2,dense_below=20,feedback=momentum"],
)
def test_what_a_rule_leaves_dense_is_the_mean(text, rank, size):
    replica = Replica(SHAPES, text)
    for step in range(4):
        found = replica.step(gradients(rank, step))
        if step == 0:
            for name in ("bias", "scalar"):
                mean = sum(gradients(r, step)[name] for r in range(size)) / size
                np.testing.assert_allclose(found[name].numpy(), mean, rtol=1e-6)
    assert {"bias", "scalar"} <= set(replica.sync.plan.dense)
    assert same_on_all_replicas(*replica.net.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types(dtype, rank, size):
    replica = Replica(SHAPES, "topk:density=0.1", dtype=dtype)
    for step in range(5):
        found = replica.step(gradients(rank, step))
    assert all(gradient.dtype == dtype and gradient.isfinite().all() for gradient in found.values())
    assert same_on_all_replicas(*found.values())
    assert replica.sync.telemetry.last.num_union > 0


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


ON_DEVICES = ["topk", "exdyna", "gtopk", "randomk", "topk:dense_below=8", "dgc:feedback=momentum"]


@pytest.mark.parametrize("text", ON_DEVICES)
def test_gradients_on_a_device_have_the_bits_of_the_hosts(text, rank, monkeypatch):
    """As if a GPU held them: its memory, on tensors of the CPU."""
    found = []
    for memory in ("host", "device"):
        choose_memory(monkeypatch, memory)
        replica = Replica(SHAPES, text + (",density=0.1" if ":" in text else ":density=0.1"))
        for step in range(6):
            replica.step(gradients(rank, step))
        found.append([*replica.net.parameters(), *replica.held().values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


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
