"""Parameters that the optimizer comes to train after it was wrapped: added groups, thawed layers."""

import copy

import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from support.linear import LinearModel, dyadic, same_on_all_ranks
from support.optimizers import residuals_of
from support.sampling import rows_by

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11), "late": (6, 8)}


def gradients(rank: int, step: int, names) -> dict[str, np.ndarray]:
    return {name: dyadic(SHAPES[name], rank, step, name) for name in names}


def thaw(model, optimizer):
    model.late.requires_grad_(True)
    model.bias.requires_grad_(True)


def add_named(model, optimizer):
    optimizer.add_param_group({"params": [model.late, model.bias], "lr": 0.25})


def frozen(how, compression="topk:density=0.1", named=True, **arguments):
    """A model of which two parameters do not train yet, and its optimizer."""
    model = LinearModel(SHAPES)
    parameters = [model.first, model.second]
    if how is thaw:
        model.late.requires_grad_(False)
        model.bias.requires_grad_(False)
        parameters = model.parameters()
    base = torch.optim.SGD(parameters, lr=0.5)
    names = model.named_parameters() if named else None
    return model, hvd.DistributedOptimizer(base, names, hvd.Compression.parse(compression), **arguments)


def stepped(model, optimizer, rank, step, names):
    """Unlike `train_step` where parameters have no gradient yet."""
    model.backward(gradients(rank, step, names))
    optimizer.step()
    optimizer.zero_grad()


@rows_by("how,named", [thaw, add_named], [True, False])
def test_parameters_that_join_within_a_step_are_synchronized_from_then_on(how, named, rank, size):
    """With everything sent, weights are those of dense training on all ranks' gradients."""
    model, optimizer = frozen(how, "topk:density=1.0", named, bucket_bytes=700, op=hvd.Sum)
    expected = {name: np.ones(shape) for name, shape in SHAPES.items()}
    for step in range(5):
        names = ["first", "second"]
        if step == 2:
            model.backward(gradients(rank, 100, ["second"]))  # and its first bucket is under way
            expected["second"] -= 0.5 * sum(gradients(r, 100, ["second"])["second"] for r in range(size))
            names = ["first"]
            how(model, optimizer)
        if step >= 2:
            names += ["late", "bias"]
        # on one rank some parameters have no gradient
        mine = names if rank else [name for name in names if name != "bias"]
        stepped(model, optimizer, rank, step, mine)
        for name in names:
            rate = 0.25 if how is add_named and name in ("late", "bias") else 0.5
            for r in range(size):
                if r or name != "bias":
                    expected[name] -= rate * gradients(r, step, names)[name]
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], rtol=1e-6, atol=1e-5)
    assert same_on_all_ranks(*model.parameters())
    assert len(optimizer.plan.names()) == 4


@pytest.mark.parametrize("how", [thaw, add_named])
def test_a_new_process_loads_what_was_saved_with_parameters_that_had_joined(how, rank):
    """Before its first step; and goes on as if it had never stopped."""
    results, saved, weights = [], None, None
    for resumed in (False, True):
        model, optimizer = frozen(how, "exdyna:density=0.05")
        if resumed:
            how(model, optimizer)
            model.load_state_dict(weights)
            optimizer.load_state_dict(saved)
        for step in range(4 if resumed else 0, 6):
            if step == 2:
                how(model, optimizer)
            if step == 4 and not resumed:
                saved = copy.deepcopy(optimizer.state_dict())
                weights = copy.deepcopy(model.state_dict())
            stepped(model, optimizer, rank, step, SHAPES if step >= 2 else ["first", "second"])
        results.append([p.detach().clone() for p in model.parameters()] + [*residuals_of(optimizer).values()])
        assert optimizer.telemetry.last.step == 6
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
