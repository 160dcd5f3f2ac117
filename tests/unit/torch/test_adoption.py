"""The user's AdamW behind `feedback="adam"`: it goes on being what it is, and applies steps."""

import copy
from typing import Any

import pytest
import torch

hvd = pytest.importorskip("horovod_sparse.torch")

from horovod_sparse.errors import ArgumentError, UnsupportedError  # noqa: E402
from horovod_sparse.feedback import parse_recipe  # noqa: E402
from horovod_sparse.plans.plan import Plan  # noqa: E402
from horovod_sparse.tensors.adoption import adopt  # noqa: E402

STEPS = 6


@pytest.fixture(autouse=True)
def one_rank() -> None:
    hvd.init()


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


def adamw(model: torch.nn.Module, beta1: float = 0.0, **more: Any) -> torch.optim.AdamW:
    """Two groups, of their own rates, moments and decays."""
    first, second = model[0], model[2]
    groups: list[dict[str, Any]] = [
        {"params": [*first.parameters()], "weight_decay": 0.1, "betas": (beta1, 0.9)},
        {"params": [*second.parameters()], "lr": 0.03, "eps": 1e-3},
    ]
    return torch.optim.AdamW(groups, lr=0.02, betas=(beta1, 0.95), weight_decay=0.0, **more)


def train(
    model: torch.nn.Module, optimizer: Any, schedule: Any, steps: int = STEPS, scaler: Any = None
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = torch.randn(4, 7, dtype=torch.float64, generator=generator)
        loss = model(inputs).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        schedule.step()


def scheduled(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[0.02, 0.03], total_steps=2 * STEPS, cycle_momentum=False
    )


def wrapped(model: torch.nn.Module, optimizer: Any, **more: Any) -> Any:
    compression = hvd.Compression.topk(density=1.0, feedback="adam")
    return hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=compression, tensor_selection="all", **more
    )


def expected() -> torch.nn.Module:
    """AdamW of PyTorch without a first moment."""
    model = model_of()
    optimizer = adamw(model)
    train(model, optimizer, scheduled(optimizer))
    return model


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12) for mine, theirs in pairs)


@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_all_that_is_sent_is_adamw(scale: float | None) -> None:
    """With its groups, their decays, and a schedule; moments are not allocated."""
    model = model_of()
    optimizer = wrapped(model, adamw(model, beta1=0.9))
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    train(model, optimizer, scheduled(optimizer), scaler=scaler)
    assert same(model, expected())
    assert isinstance(optimizer, torch.optim.AdamW) and not optimizer.state
    assert not optimizer.state_dict()["state"]


def test_resume_goes_on_and_moments_of_others_are_left_out() -> None:
    model, later = model_of(), model_of()
    optimizer = wrapped(model, adamw(model))
    schedule = scheduled(optimizer)
    train(model, optimizer, schedule)
    second = wrapped(later, adamw(later))
    again = scheduled(second)
    again.load_state_dict(schedule.state_dict())
    later.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, schedule)
    train(later, second, again)
    assert same(model, later)
    stock, fresh = adamw(model_of()), model_of()
    train(fresh, plain := adamw(fresh), scheduled(plain))
    second.load_state_dict(plain.state_dict())
    assert not second.state
    stock.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("early", [True, False], ids=["a schedule before", "a schedule after"])
def test_the_very_optimizer_is_adopted(early: bool) -> None:
    """As `ddp.attach` does: with a schedule that has wrapped its step, hooks, and a closure."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if early else None
    adopt(optimizer, parse_recipe("topk:density=0.01,feedback=adam"))
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    weights = model.weight.data.fill_(1.0)

    def closure() -> float:
        model.weight.grad = torch.full((1, 1), 0.25)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert float(weights) == pytest.approx(0.95 - 0.25) and seen == [1]
    schedule.step()
    optimizer.step(closure)
    assert float(weights) == pytest.approx(0.7 * 0.975 - 0.25) and not optimizer.state


def test_the_best_is_found_for_the_optimizer() -> None:
    """SGD's momentum is left out, its pace kept; AdamW makes its own steps."""
    model = model_of()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    adopted = (
        adopt(sgd, parse_recipe("best:density=0.5")),
        adopt(adamw(model), parse_recipe("best:density=0.5")),
    )
    assert [one.describe() for one in adopted] == ["topk:density=0.5", "topk:density=0.5,feedback=adam"]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    sgd.step()
    for parameter, before in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(parameter.detach(), before - 0.1 * (1 + 0.1 * before))
    assert not sgd.state
    assert adopt(torch.optim.SGD(model.parameters(), lr=1.0), parse_recipe("best")) == parse_recipe("topk")
    assert hvd.Compression.best(density=0.5).recipe == hvd.Compression.parse("best:density=0.5").recipe


def test_rmsprop_goes_as_far_without_momentum(caplog: Any) -> None:
    """Its steps are stock's without momentum at ``lr / (1 - momentum)``, which is said once."""
    models = [model_of() for _ in range(3)]
    stock = torch.optim.RMSprop(models[0].parameters(), lr=0.04, alpha=0.9)
    train(models[0], stock, torch.optim.lr_scheduler.StepLR(stock, 2, 0.5))
    for model in models[1:]:
        own = torch.optim.RMSprop(model.parameters(), lr=0.01, alpha=0.9, momentum=0.75)
        made = hvd.Compression.best(density=1.0)
        optimizer = hvd.DistributedOptimizer(own, model.named_parameters(), compression=made)
        train(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
        assert same(model, models[0]) and not optimizer.state
    assert sum("momentum 0.75 is left out" in one.message for one in caplog.records) == 1


def test_sgd_keeps_its_momentum_while_all_gradients_are_dense() -> None:
    stock, model = model_of(), model_of()
    optimizer, own = (torch.optim.SGD(one.parameters(), lr=0.02, momentum=0.9) for one in (model, stock))
    adopt(optimizer, parse_recipe("best:density=0.01"))
    optimizer.keeps_momentum = True
    train(stock, own, torch.optim.lr_scheduler.StepLR(own, 3))
    train(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))
    assert torch.equal(model[0].weight, stock[0].weight)
    optimizer.keeps_momentum = False
    optimizer.step()
    assert not optimizer.state, "a residual is the momentum from now on"


def test_sgd_of_a_small_model_that_stays_dense_is_stock_sgd() -> None:
    stock, model = model_of(), model_of()
    optimizer, own = (torch.optim.SGD(one.parameters(), lr=0.02, momentum=0.9) for one in (model, stock))
    plan = Plan((), tuple(name for name, _ in model.named_parameters()))
    best = hvd.Compression.best(density=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=best, plan=plan)
    train(stock, own, torch.optim.lr_scheduler.StepLR(own, 3))
    train(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))
    assert torch.equal(model[0].weight, stock[0].weight)


@pytest.mark.parametrize(("density", "warnings"), [(0.01, 1), (0.1, 0)])
def test_moments_behind_error_feedback_are_warned_of(density: float, warnings: int, caplog: Any) -> None:
    model = model_of()
    for base in (adamw(model), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)):
        caplog.clear()
        compression = hvd.Compression.topk(density=density)
        hvd.DistributedOptimizer(base, model.named_parameters(), compression=compression)
        assert sum("Compression.best(density=0.01)" in one.message for one in caplog.records) == warnings


def test_what_cannot_be_adopted_is_refused_with_the_line_to_write() -> None:
    model = model_of()
    parameters = list(model.parameters())
    sgd, adam = torch.optim.SGD(parameters, lr=0.1), torch.optim.Adam(parameters, weight_decay=0.1)
    rmsprop, adagrad = torch.optim.RMSprop(parameters), torch.optim.Adagrad(parameters)
    line = "optimizer='Adagrad' is not allowed: give torch.optim.AdamW.*, Adam, RMSprop or SGD"
    with pytest.raises(ArgumentError, match=line):
        hvd.DistributedOptimizer(adagrad, compression=hvd.Compression.best(density=0.1))
    for optimizer, more, complaint in (
        (sgd, {}, "optimizer='SGD' is not allowed: give torch.optim.AdamW"),
        (adam, {}, "weight_decay=0.1 is not allowed: give 0 with Adam"),
        (rmsprop, {}, "optimizer='RMSprop' is not allowed: give torch.optim.AdamW"),
        (adamw(model, amsgrad=True), {}, "amsgrad"),
        (adamw(model, maximize=True), {}, "maximize"),
        (adamw(model), {"op": hvd.Sum}, "Average"),
        (adamw(model), {"max_grad_norm": 1.0}, r"adam\(clip_norm=1\)"),
    ):
        with pytest.raises(ArgumentError, match=complaint):
            wrapped(model, optimizer, **more)
    patched = adamw(model)
    patched.step = lambda: None  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match="replaced"):
        adopt(patched, parse_recipe("topk:density=0.01,feedback=adam"))
