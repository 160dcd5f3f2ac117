"""Changes of gradients: where they count, and that none is lost without a word."""

from __future__ import annotations

import horovod.torch as stock
import pytest
import torch

from horovod_sparse.errors import EditedGradientError, NonFiniteGradientError
from horovod_sparse.merging import Plan
from support.dyadic import gradients_for
from support.linear import LinearModel, same_on_all_ranks
from support.optimizers import gradients_of, make, residuals_of, train_step
from support.sampling import rows_by

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11)}
gradients = gradients_for(SHAPES)


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def replace(model):
    model.bias.grad = model.bias.grad * 2


def through_data(model):
    for parameter in model.parameters():
        parameter.grad.data.mul_(0.5)


def new_data(model):
    model.first.grad.data = model.first.grad.data * 0.5


EDITS = {
    "clip_grad_norm_": clip,
    "another tensor": replace,
    "through .data": through_data,
    "other .data": new_data,
    "none": lambda model: model.zero_grad(),
    "one parameter": lambda model: model.first.grad.add_(1.0),
}
PLANS = {
    "buckets": {"bucket_bytes": 700},
    "dense": {"plan": Plan((("second", "first"),), ("scalar", "bias"))},
    "dense last": {"plan": Plan((("first", "bias"),), ("scalar", "second"))},
}


@rows_by("kind,who", PLANS, ["one", "all"])
def test_an_edit_between_backward_and_step_is_an_error_on_every_rank(kind, who, rank, size):
    """Also where a single rank has changed something; and training goes on after it."""
    for edit in EDITS.values():
        model = LinearModel(SHAPES)
        optimizer = make(model, "topk:density=0.1", **PLANS[kind])
        model.backward(gradients(rank, 0))
        if who == "all" or rank == size - 1:
            edit(model)
        with pytest.raises(EditedGradientError, match=f"rank {size - 1}: .*synchronize_at"):
            optimizer.step()
        assert all(bool((parameter == 1).all()) for parameter in model.parameters())
        optimizer.zero_grad()
        model.backward(gradients(rank, 1))
        optimizer.step()
        assert same_on_all_ranks(*weights(model))


@pytest.mark.parametrize("kind", PLANS)
def test_gradients_read_as_local_ones_until_they_are_synchronized(kind, rank):
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1", **PLANS[kind])
    for step in range(2):
        given = gradients(rank, step)
        model.backward(given)
        for name, found in gradients_of(model).items():
            torch.testing.assert_close(found, torch.tensor(given[name], dtype=torch.float32))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["buckets", "dense"])
def test_synchronization_at_the_step_takes_gradients_as_they_are_then(kind, rank):
    """Clipping of a rank's own gradients, as Lightning and Hugging Face's Trainer do it, between the two."""
    results = []
    for how in ("by hand", "at the step"):
        model = LinearModel(SHAPES)
        optimizer = make(
            model,
            "topk:density=0.1",
            synchronize_at="step" if how == "at the step" else "backward",
            **PLANS[kind],
        )
        for step in range(4):
            given = {name: torch.tensor(value) for name, value in gradients(rank, step).items()}
            if how == "by hand":
                norm = torch.stack([value.square().sum() for value in given.values()]).sum().sqrt()
                given = {name: value * (0.5 / norm) for name, value in given.items()}
                model.backward({name: value.numpy() for name, value in given.items()})
            else:
                model.backward(gradients(rank, step))
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
    assert same_on_all_ranks(*results[1])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_closure_that_clips(rank):
    """As Lightning has it: the optimizer's step is given a closure, and clips in it."""
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1", bucket_bytes=700, synchronize_at="step")

    def closure():
        optimizer.zero_grad()
        model.backward(gradients(rank, 0))
        clip(model)
        return 1.0

    optimizer.step(closure)
    applied = torch.cat([1 - parameter.detach().reshape(-1) for parameter in model.parameters()]) / 0.5
    assert 0 < float(applied.norm()) <= 0.5
    assert same_on_all_ranks(*weights(model))


@pytest.mark.parametrize("kind", [*PLANS, "single"])
def test_max_grad_norm_is_clip_grad_norm_after_synchronize(kind, rank):
    results = []
    for max_grad_norm in (None, 0.25):
        model = LinearModel(SHAPES)
        arguments = PLANS.get(kind, {})
        optimizer = make(model, "topk:density=0.1", max_grad_norm=max_grad_norm, **arguments)
        for step in range(4):
            optimizer.zero_grad()
            assert not any(p.grad is not None and p.grad.count_nonzero() for p in model.parameters())
            model.backward(gradients(rank, step))
            if max_grad_norm is None:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        results.append(weights(model))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert same_on_all_ranks(*results[1])


@rows_by("feedback,kind", ["error", "momentum(momentum=0.5)", "error(clip_norm=20.0)"], PLANS, each=2)
def test_a_step_with_a_bad_gradient_is_dropped_whole(kind, feedback, rank, size):
    """Inf in one bucket, and values of 1e30 beside it and in the others: nothing of it arrives later."""
    sick, model = size - 1, LinearModel(SHAPES)
    text = f"topk:density=0.1,feedback={feedback}"
    optimizer = make(model, text, op=stock.Sum, **PLANS[kind])
    applied = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(6):
        given = gradients(rank, step)
        if step == 3:
            if rank == sick:
                for name in given:
                    given[name].reshape(-1)[:1] = 1e30
                given["second"].reshape(-1)[3] = torch.inf
            model.backward(given)
            with pytest.raises(NonFiniteGradientError, match=f"rank {sick}: second"):
                optimizer.step()
            optimizer.zero_grad()
            continue
        for name, found in train_step(model, optimizer, given).items():
            applied[name] += found
    assert same_on_all_ranks(*weights(model))
    assert all(float(values.abs().max()) < 100 for values in weights(model))
    if feedback != "error":
        return
    held = residuals_of(optimizer)
    for name in sorted(set(SHAPES) & set(held)):
        total = sum(gradients(r, step)[name] for r in range(size) for step in range(6) if step != 3)
        waiting = stock.allreduce(held[name], op=stock.Sum, name=f"held.{name}").reshape(SHAPES[name])
        # where 1e30 was added what waited is lost in its rounding
        found, wanted = (applied[name] + waiting).reshape(-1)[1:], torch.tensor(total).reshape(-1)[1:]
        torch.testing.assert_close(found, wanted.float())
