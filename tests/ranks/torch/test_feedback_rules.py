"""Momentum correction, the low-pass filter, clipping and rules under real ranks, with both faces."""

from __future__ import annotations

import horovod.torch as stock
import numpy as np
import pytest
import torch

from horovod_sparse.errors import ArgumentError, StateMismatchError
from horovod_sparse.feedback import MomentumCorrection
from horovod_sparse.merging import Plan
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.torch import Compression
from support.linear import LinearModel, dyadic, same_on_all_ranks
from support.optimizers import flat, in_bucket_order, make, residuals_of, train_step

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11), "scale": (5,)}
_TEXT = "dgc:density=0.1,feedback=momentum(momentum=0.5{}),dense=('bias','scale'),densities={{'first':0.02}}"


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    return {name: dyadic(shape, rank, step, name) for name, shape in SHAPES.items()}


def drop_in(model: LinearModel, compression):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return stock.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, op=stock.Sum
    )


def simulated(names, number: int | None, made, size: int) -> SimulatedCluster:
    """The bucket as it is in our optimizer (with its number), or in the drop-in."""
    name = names[0] if number is None else f"bucket{number}.{names[0]}"
    n = sum(int(np.prod(SHAPES[item])) for item in names)
    return SimulatedCluster(made.for_parameter(names[0], int(np.prod(SHAPES[names[0]]))), n, size, name=name)


@pytest.mark.parametrize("face", ["drop-in", "own"])
@pytest.mark.parametrize("extra", ["", ",nesterov=true", ",masking=false", ",clip_norm=2.0"])
def test_both_faces_do_what_the_simulator_does(face, extra, rank, size):
    compression = Compression.parse(_TEXT.format(extra))
    model = LinearModel(SHAPES)
    if face == "own":
        optimizer = make(model, compression, op=stock.Sum)
        assert sorted(map(sorted, optimizer.plan.buckets)) == [["bias", "scale"], ["first"], ["second"]]
        buckets = [(names, number) for number, names in enumerate(optimizer.plan.buckets)]
    else:
        optimizer = drop_in(model, compression)
        buckets = [((name,), None) for name in SHAPES]
    clusters = {names: simulated(names, number, compression.recipe, size) for names, number in buckets}
    for step in range(5):
        found = train_step(model, optimizer, gradients(rank, step))
        assert same_on_all_ranks(*found.values())
        for names, cluster in clusters.items():
            inputs = [in_bucket_order(gradients(r, step), names) for r in range(size)]
            np.testing.assert_array_equal(flat(found, names), cluster.step(inputs, 0.5))
    if face == "own":
        assert not residuals_of(optimizer)["bias"].count_nonzero(), "dense ones hold nothing back"


def test_dense_parameters_train_with_momentum(rank, size):
    """A plan's dense ones and a rule's: what momentum SGD does with the sum over ranks."""
    for arguments in (
        {"plan": Plan((("second", "first"),), ("bias", "scale"))},
        {"compression": "topk:density=0.1,feedback=momentum(momentum=0.5),dense_below=10"},
    ):
        text = arguments.pop("compression", "topk:density=0.1,feedback=momentum(momentum=0.5)")
        model = LinearModel(SHAPES)
        optimizer = make(model, text, op=stock.Sum, **arguments)
        velocity = {"bias": 0.0, "scale": 0.0}
        for step in range(4):
            found = train_step(model, optimizer, gradients(rank, step))
            for name in velocity:
                total = sum(gradients(r, step)[name] for r in range(size))
                velocity[name] = 0.5 * velocity[name] + total
                np.testing.assert_array_equal(found[name].numpy(), np.asarray(velocity[name], np.float32))


@pytest.mark.parametrize("plan", [None, Plan((("second", "first"),), ("bias", "scale"))])
def test_resume_with_velocity(plan, rank):
    text = "dgc:density=0.05,feedback=momentum(momentum=0.5,clip_norm=4.0)" + (
        ",dense=*i*s*" if not plan else ""
    )
    results, saved, weights = [], None, None
    for resumed in (False, True):
        model = LinearModel(SHAPES)
        optimizer = make(model, text, plan=plan)
        if resumed:
            model.load_state_dict(weights)
            optimizer.load_state_dict(saved)
        for step in range(3 if resumed else 0, 6):
            if step == 3 and not resumed:
                saved = optimizer.state_dict()
                weights = {name: value.clone() for name, value in model.state_dict().items()}
            train_step(model, optimizer, gradients(rank, step))
        companions = optimizer.state_dict()["horovod_sparse"]["companions"]
        assert len(companions) == 1 and sorted(companions[0]) == sorted(SHAPES)
        assert any(values.count_nonzero() for values in companions[0].values())
        results.append([p.detach().clone() for p in model.parameters()] + list(companions[0].values()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


_FILTERED = "cltk:density=0.1,feedback=lowpass(beta=0.25)"


@pytest.mark.parametrize("face", ["drop-in", "own"])
def test_a_filtered_residual_is_the_simulators_and_resumes(face, rank, size):
    """What becomes dense sends all that was held back; what is saved goes on as if never stopped."""
    compression = Compression.parse(_FILTERED + ",dense=bias")
    model = LinearModel(SHAPES)
    optimizer = make(model, compression, op=stock.Sum) if face == "own" else drop_in(model, compression)
    if face == "own":
        buckets = [(names, number) for number, names in enumerate(optimizer.plan.buckets)]
    else:
        buckets = [((name,), None) for name in SHAPES]
    clusters = {names: simulated(names, number, compression.recipe, size) for names, number in buckets}
    for step in range(6):
        if step == 3:
            model = LinearModel(SHAPES)
            if face == "own":
                saved = optimizer.state_dict()
                optimizer = make(model, Compression.parse(_FILTERED + ",dense=bias"), op=stock.Sum)
                optimizer.load_state_dict(saved)
            else:
                saved = compression.state_dict()
                compression = Compression.parse(_FILTERED + ",dense=bias")
                compression.load_state_dict(saved)
                optimizer = drop_in(model, compression)
        found = train_step(model, optimizer, gradients(rank, step))
        assert same_on_all_ranks(*found.values())
        for names, cluster in clusters.items():
            inputs = [in_bucket_order(gradients(r, step), names) for r in range(size)]
            np.testing.assert_array_equal(flat(found, names), cluster.step(inputs, 0.5))
        np.testing.assert_array_equal(
            found["bias"].numpy(), sum(gradients(r, step)["bias"] for r in range(size))
        )
    if face == "own":
        held = optimizer.state_dict()["horovod_sparse"]["companions"][0]
        for names, cluster in clusters.items():
            np.testing.assert_array_equal(flat(held, names), cluster.residuals()[rank])
        norms = [np.linalg.norm(cluster.residuals()[rank]) for cluster in clusters.values()]
        assert optimizer.telemetry.last.residual_norm == pytest.approx(np.linalg.norm(norms), rel=1e-5)


def test_other_buckets_keep_a_filtered_residual(rank, size):
    """Sums and what is held back are all gradients, though a parameter becomes dense on the way."""
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1,feedback=lowpass(beta=0.25)", op=stock.Sum)
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(6):
        if step == 3:
            optimizer.replan(Plan((("second",), ("scale", "first")), ("bias",)))
        for name, values in train_step(model, optimizer, gradients(rank, step)).items():
            total[name] += values
    held = optimizer.state_dict()["horovod_sparse"]["companions"][0]
    for name in SHAPES:
        wanted = sum(gradients(r, step)[name] for r in range(size) for step in range(6))
        mine = stock.allreduce(held[name], op=stock.Sum, name=f"held.{name}")
        np.testing.assert_allclose((total[name] + mine).numpy(), wanted, rtol=0, atol=1e-5)
    assert not held["bias"].any(), "what was held back went with the first dense gradient"


@pytest.mark.parametrize("face", ["drop-in", "own"])
def test_momentum_twice_is_refused(face, rank):
    model = LinearModel(SHAPES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    compression = Compression.dgc(density=0.1, feedback=MomentumCorrection(momentum=0.9))
    if face == "own":
        import horovod_sparse.torch as hvd

        with pytest.raises(ArgumentError, match=r"momentum=0.9.*momentum=0 to the optimizer"):
            hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)
        return
    wrapped = stock.DistributedOptimizer(optimizer, model.named_parameters(), compression)
    with pytest.raises(ArgumentError, match=r"momentum=0.9.*momentum=0 to the optimizer"):
        model.backward(gradients(rank, 0))
    del wrapped


@pytest.mark.parametrize("how", ["a loaded checkpoint", "a schedule"])
@pytest.mark.parametrize("face", ["drop-in", "own"])
def test_momentum_that_comes_later_is_refused_too(face, how, rank):
    model, text = LinearModel(SHAPES), "dgc:density=0.1,feedback=momentum"
    optimizer = (
        make(model, text, bucket_bytes=700) if face == "own" else drop_in(model, Compression.parse(text))
    )
    train_step(model, optimizer, gradients(rank, 0))
    if how == "a schedule":
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10)
    else:
        optimizer.load_state_dict(torch.optim.SGD(LinearModel(SHAPES).parameters(), 0.5, 0.9).state_dict())
    with pytest.raises(ArgumentError, match="momentum=0 to the optimizer"):
        model.backward(gradients(rank, 1))
        optimizer.step()
    if face == "drop-in":
        return  # stock Horovod takes nothing back of a backward pass that has failed
    optimizer.param_groups[0]["momentum"] = 0
    train_step(model, optimizer, gradients(rank, 2))
    assert same_on_all_ranks(*model.parameters())


def test_a_checkpoint_of_another_feedback_is_refused(rank):
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1,feedback=momentum")
    train_step(model, optimizer, gradients(rank, 0))
    saved = optimizer.state_dict()
    for text in ("topk:density=0.1", "topk:density=0.1,feedback=lowpass"):
        other = make(LinearModel(SHAPES), text)
        with pytest.raises(StateMismatchError, match="feedback"):
            other.load_state_dict(saved)
