"""Changes of gradients: where they count, and that none is lost without a word."""

import pytest
import torch

from horovod_sparse.errors import EditedGradientError
from horovod_sparse.merging import Plan
from support.dyadic import gradients_for
from support.linear import LinearModel, same_on_all_ranks
from support.optimizers import gradients_of, make
from support.passes import flat
from support.sampling import rows_by

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11)}
gradients = gradients_for(SHAPES)


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


EDITS = {
    "clip_grad_norm_": clip,
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
        assert same_on_all_ranks(flat(model))


def clipped_by_hand(given):
    """This rank's gradients with a norm of 0.5, and read as local ones until they are synchronized."""
    norm = torch.stack([torch.tensor(value).square().sum() for value in given.values()]).sum().sqrt()
    return {name: value * (0.5 / float(norm)) for name, value in given.items()}


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("how", ["backward", "closure"])
def test_synchronization_at_the_step_takes_gradients_as_they_are_then(how, kind, rank):
    """Clipping of a rank's own gradients, as Lightning and Hugging Face's Trainer do it, between the two."""
    results = []
    for at in ("backward", "step"):
        model = LinearModel(SHAPES)
        optimizer = make(model, "topk:density=0.1", synchronize_at=at, **PLANS[kind])
        for step in range(4):
            given = gradients(rank, step)
            given = clipped_by_hand(given) if at == "backward" else given

            def closure(model=model, optimizer=optimizer, given=given, at=at):
                optimizer.zero_grad()
                model.backward(given)
                for name, found in gradients_of(model).items():
                    torch.testing.assert_close(found, torch.tensor(given[name], dtype=torch.float32))
                if at == "step":
                    clip(model)
                return 1.0

            if how == "closure":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        results.append(flat(model))
    assert same_on_all_ranks(results[1])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


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
        results.append(flat(model))
    assert torch.equal(*results)
    assert same_on_all_ranks(results[1])
