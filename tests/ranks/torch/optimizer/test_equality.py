"""Our DistributedOptimizer: equal to the simulator, to dense training at density 1, and over ranks."""

from __future__ import annotations

import horovod.torch as stock
import numpy as np
import pytest
import torch

from horovod_sparse.merging import Plan
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.torch import Compression, SparseCompressor
from support.cases import CASES, case_id
from support.linear import LinearModel, dyadic, same_on_all_ranks
from support.optimizers import flat, in_bucket_order, make, residuals_of, train_step

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11), "one": (1,)}
BYTES = {"one bucket": 2**20, "three buckets": 680, "layer-wise": 1}


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    return {name: dyadic(shape, rank, step, name) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_the_simulator_bit_for_bit(case, rank, size):
    model = LinearModel(SHAPES)
    optimizer = make(model, SparseCompressor(case.at(0.1)), op=stock.Sum, bucket_bytes=680)
    assert len(optimizer.plan.buckets) == 3
    clusters = {
        names: SimulatedCluster(
            case.at(0.1), sum(int(np.prod(SHAPES[n])) for n in names), size, name=f"bucket{i}.{names[0]}"
        )
        for i, names in enumerate(optimizer.plan.buckets)
    }
    for step in range(6):
        found = train_step(model, optimizer, gradients(rank, step))
        for names, cluster in clusters.items():
            inputs = [in_bucket_order(gradients(r, step), names) for r in range(size)]
            np.testing.assert_array_equal(flat(found, names), cluster.step(inputs, 0.5))
    for names, cluster in clusters.items():
        np.testing.assert_array_equal(flat(residuals_of(optimizer), names), cluster.residuals()[rank])


@pytest.mark.parametrize("bucket_bytes", BYTES.values(), ids=BYTES)
@pytest.mark.parametrize("text", ["topk:density=1.0", "exdyna:density=1.0", "randomk:density=1.0"])
def test_density_one_equals_stock_dense_training(text, bucket_bytes, rank, size):
    """Sums are exact, so bits are equal; an average by 3 rounds every rank's value (of at most 4)."""
    for arguments in ({"op": stock.Sum}, {}, {"gradient_predivide_factor": 4.0}):
        steps, weights = [], []
        for dense in (True, False):
            model = LinearModel(SHAPES)
            if dense:
                base = torch.optim.SGD(model.parameters(), lr=0.5)
                optimizer = stock.DistributedOptimizer(base, model.named_parameters(), **arguments)
            else:
                optimizer = make(model, text, bucket_bytes=bucket_bytes, **arguments)
            steps.append([train_step(model, optimizer, gradients(rank, step)) for step in range(3)])
            weights.append([parameter.detach().clone() for parameter in model.parameters()])
        exact = arguments.get("op") == stock.Sum or size in (1, 2, 4)
        tolerance = 0.0 if exact else 1e-6
        for one, other in zip(*steps, strict=True):
            for name in SHAPES:
                torch.testing.assert_close(other[name], one[name], rtol=0.0, atol=tolerance)
        for one, other in zip(*weights, strict=True):
            torch.testing.assert_close(other, one, rtol=0.0, atol=3 * tolerance)


@pytest.mark.parametrize("algorithm", ["topk", "exdyna", "micro", "randomk"])
def test_nothing_is_lost_and_replicas_agree_in_any_order(algorithm, rank, size):
    """50 steps; every rank uses its own parameters in its own order; some parameters on no rank at all."""
    model = LinearModel(SHAPES)
    optimizer = make(model, f"{algorithm}:density=0.1", bucket_bytes=680)
    assert len(optimizer.plan.buckets) == 3
    applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    given = {name: np.zeros(shape) for name, shape in SHAPES.items()}

    def used(r: int, step: int) -> list[str]:
        shuffled = np.random.default_rng([7, r, step]).permutation(list(SHAPES))
        return [str(name) for name in shuffled[: 2 + (r + step) % 4]]

    for step in range(50):
        for r in range(size):
            for name in used(r, step):
                given[name] += gradients(r, step)[name] / size
        mine = gradients(rank, step)
        order = used(rank, step)
        found = train_step(model, optimizer, {name: mine[name] for name in order}, order)
        for name in SHAPES:
            applied[name] += found[name].double()
        assert same_on_all_ranks(*found.values()), step
    assert same_on_all_ranks(*model.parameters())
    held = residuals_of(optimizer)
    assert any(tensor.count_nonzero() for tensor in held.values())
    for name in SHAPES:
        mean = stock.allreduce(held[name].double(), name=f"held.{name}")
        torch.testing.assert_close(
            applied[name] + mean.reshape(applied[name].shape),
            torch.from_numpy(given[name]),
            rtol=1e-5,
            atol=1e-5,
        )


def test_backward_passes_per_step_accumulate_first(rank):
    results = []
    for passes in (1, 2):
        model = LinearModel(SHAPES)
        optimizer = make(model, "exdyna:density=0.1", backward_passes_per_step=passes, bucket_bytes=680)
        steps = []
        for step in range(4):
            one, two = gradients(rank, 2 * step), gradients(rank, 2 * step + 1)
            if passes == 2:
                model.backward(one)
                steps.append(train_step(model, optimizer, two))
            else:
                steps.append(train_step(model, optimizer, {name: one[name] + two[name] for name in one}))
        results.append(steps)
    for single, double in zip(*results, strict=True):
        for name in SHAPES:
            assert torch.equal(single[name], double[name]), name


def test_groups_and_plans_make_the_buckets_they_name(rank, size):
    """However a bucket is asked for, it does the same."""
    names = [("one",), ("second",), ("scalar", "first"), ("bias",)]
    results = []
    for kind in ("groups", "plan"):
        model = LinearModel(SHAPES)
        arguments = {
            "groups": {"groups": [[model.first, model.scalar], [model.bias]]},
            "plan": {"plan": Plan(tuple(names))},
        }[kind]
        optimizer = make(model, Compression.topk(density=0.1), **arguments)
        assert optimizer.plan == Plan(tuple(names))
        results.append([train_step(model, optimizer, gradients(rank, step)) for step in range(3)])
    for one, other in zip(*results, strict=True):
        for name in SHAPES:
            assert torch.equal(one[name], other[name])
    model = LinearModel(SHAPES)
    assert [len(b) for b in make(model, "topk", groups=2).plan.buckets] == [3, 2]


def test_a_process_set_trains_alone(rank, size, process_set):
    """Ranks of the set agree with a simulation of their number; the others step with their own gradients."""
    members = process_set(range(1, size)) if size > 2 else process_set([size - 1])
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1", process_set=members, op=stock.Sum)
    inside = range(1, size) if size > 2 else [size - 1]
    names = ("one", "second", "scalar", "bias", "first")
    cluster = SimulatedCluster(Compression.topk(density=0.1).recipe, 1374, len(inside))
    for step in range(3):
        found = train_step(model, optimizer, gradients(rank, step))
        expected = cluster.step([in_bucket_order(gradients(r, step), names) for r in inside], 0.5)
        if rank not in inside:
            expected = in_bucket_order(gradients(rank, step), names)
        np.testing.assert_array_equal(flat(found, names), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_types_lose_nothing_but_the_last_unit(dtype, rank, size):
    dtypes = {name: torch.float32 if name == "bias" else dtype for name in SHAPES}
    model = LinearModel(SHAPES, dtypes)
    optimizer = make(model, "topk:density=0.2", op=stock.Sum)
    assert len(optimizer.plan.buckets) == 2
    applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(5):
        found = train_step(model, optimizer, gradients(rank, step))
        assert same_on_all_ranks(*found.values())
        for name in SHAPES:
            assert found[name].dtype == dtypes[name]
            applied[name] += found[name].double()
            for r in range(size):
                given[name] += torch.from_numpy(gradients(r, step)[name]).to(dtypes[name]).double()
    for name, values in residuals_of(optimizer).items():
        assert values.dtype == (torch.float64 if dtypes[name] == torch.float64 else torch.float32)
        held = stock.allreduce(values.double(), op=stock.Sum, name=f"held.{name}").reshape(SHAPES[name])
        unit = torch.finfo(dtypes[name]).eps
        torch.testing.assert_close(applied[name] + held, given[name], rtol=0.0, atol=20 * size * unit)


def test_a_plan_with_dense_parameters(rank, size):
    """Dense ones are averaged exactly; a parameter that becomes dense takes its residual along."""
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1", plan=Plan((("second", "first"),), ("bias", "scalar", "one")))
    found = train_step(model, optimizer, gradients(rank, 0))
    for name in ("bias", "scalar", "one"):
        mean = sum(gradients(r, 0)[name] for r in range(size)) / size
        np.testing.assert_allclose(found[name].numpy(), mean, rtol=3e-7)
    sums = {name: tensor.double() for name, tensor in found.items()}
    optimizer.replan(Plan((("first", "bias"),), ("second", "scalar", "one")))
    for step in (1, 2):
        found = train_step(model, optimizer, gradients(rank, step))
        assert same_on_all_ranks(*found.values())
        for name, tensor in found.items():
            sums[name] += tensor.double()
    held = residuals_of(optimizer)
    assert sorted(held) == ["bias", "first"]
    for name in SHAPES:
        mean = sum(gradients(r, step)[name] for r in range(size) for step in range(3)) / size
        if name in held:
            sums[name] += stock.allreduce(held[name].double(), name=f"held.{name}")
        torch.testing.assert_close(sums[name], torch.tensor(mean), rtol=1e-5, atol=1e-6)
    assert optimizer.telemetry.last.num_union >= SHAPES["first"][0] * 30 // 10
