"""Loss scaling by torch.amp.GradScaler, in the loops that its users write."""

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from horovod_sparse.errors import NonFiniteGradientError
from horovod_sparse.tensors.loss_scale import scaled_by, watch_scalers
from support.dyadic import gradients_for
from support.linear import LinearModel, dyadic, same_on_all_ranks
from support.optimizers import make, residuals_of
from support.sampling import rows_by

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11)}
#: a scale that grows and falls, at the ends of steps
SCALES = [2.0**10, 2.0**11, 2.0**11, 2.0**9, 2.0**16, 2.0**16, 2.0**8, 2.0**9]
RECIPES = ["topk:density=0.05", "micro:density=0.05", "hard_threshold:threshold=0.5", "topk:density=1.0"]
gradients = gradients_for(SHAPES)


def backward(model, given, scaler=None):
    loss = model.loss(given)
    (loss if scaler is None else scaler.scale(loss)).backward()


def unscaling(model, optimizer, given, scaler):
    backward(model, given, scaler)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    scaler.step(optimizer)


def recipe_of_horovod(model, optimizer, given, scaler):
    backward(model, given, scaler)
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


LOOPS = {"unscale_": unscaling, "synchronize": recipe_of_horovod}


def own(model, text, **arguments):
    return make(model, text, bucket_bytes=700, **arguments)


def train(wrap, text, loop, rank, *, scales=SCALES, bad=(), size=2):
    """Weights after every step; without a loop, in steps that are not scaled."""
    model = LinearModel(SHAPES)
    optimizer = wrap(model, text)
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], growth_interval=10**6)
    history = []
    for step, _ in enumerate(scales):
        optimizer.zero_grad()
        given = gradients(rank, step)
        if step in bad and rank == size - 1:
            given["second"].reshape(-1)[3] = torch.inf
        if loop is None:
            with contextlib.suppress(NonFiniteGradientError):
                backward(model, given)
                optimizer.step()
        else:
            LOOPS[loop](model, optimizer, given, scaler)
            if step in bad:
                scaler.update()
                assert scaler.get_scale() == scales[step] / 2
            scaler.update(scales[min(step + 1, len(scales) - 1)])
        history.append(torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()]))
    return history, optimizer


@rows_by("text,loop", RECIPES, LOOPS)
def test_a_scale_that_changes_changes_no_update(text, loop, rank, size):
    """And an overflow on one rank skips the step on all, as if it had been refused and caught."""
    expected, unscaled = train(own, text, None, rank, bad=[3], size=size)
    scales = [3.0 * scale for scale in SCALES] if text == RECIPES[-1] else SCALES
    found, optimizer = train(own, text, loop, rank, scales=scales, bad=[3], size=size)
    assert torch.equal(found[3], found[2])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, values in residuals_of(optimizer).items():
        torch.testing.assert_close(values, residuals_of(unscaled)[name], rtol=1e-5, atol=1e-5)
    assert same_on_all_ranks(found[-1])


def test_clipping_and_passes_in_true_units(rank):
    results = []
    for scaled in (False, True):
        model = LinearModel(SHAPES)
        optimizer = own(model, "topk:density=0.1", max_grad_norm=0.25, backward_passes_per_step=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=scaled)
        for step in range(4):
            optimizer.zero_grad()
            for number in range(2):
                backward(model, gradients(rank, 2 * step + number), scaler)
            scaler.step(optimizer)
            scaler.update(2.0 ** (8 + step))
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_only_the_scaled_of_two_losses_counts_as_scaled(rank):
    """A generator that is not scaled, after a discriminator that is, with a pass within its pass."""
    results = []
    for scaled in (False, True):
        models = [LinearModel(SHAPES), LinearModel(SHAPES)]
        optimizers = [own(model, "topk:density=0.1") for model in models]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=scaled)
        for step in range(3):
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                if number == 0:
                    loss = checkpoint(
                        lambda one, model=model, step=step: one * model.loss(gradients(rank, step)),
                        torch.ones((), requires_grad=True),
                        use_reentrant=True,
                    )
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    backward(model, gradients(rank, step))
                    optimizer.step()
        results.append([p.detach().clone() for model in models for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("later", ["scaled", "plain"])
def test_a_rank_without_gradients_takes_part_after_a_step_that_its_scaler_skipped(later, rank):
    model, other = LinearModel(SHAPES), LinearModel({"other": (3,)})
    optimizer = own(model, "topk:density=1.0")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        given = gradients(rank, step)
        if step == 1:
            given["second"].reshape(-1)[3] = torch.inf
        used = scaler if step < 2 or later == "scaled" else None
        if step in (0, 2) and rank:
            backward(other, {"other": dyadic((3,), rank, step, "other")}, used)
        else:
            backward(model, given, used)
        if used is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 512.0
    assert optimizer.telemetry.last.step == 3
    assert same_on_all_ranks(*model.parameters())


def test_a_scaled_backward_pass_that_fails_leaves_no_scale_behind():
    def fail(gradient):
        raise MemoryError

    layer = torch.nn.Linear(2, 1)
    layer.weight.register_hook(fail)
    scaler = torch.amp.GradScaler("cpu")
    watch_scalers()
    with pytest.raises(MemoryError):
        scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
    assert scaled_by() is None
