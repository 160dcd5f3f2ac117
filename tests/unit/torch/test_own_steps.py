"""What each optimizer of PyTorch makes of a gradient on its own rank: rules, refusals, and one rank alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import AdamFeedback, BestFeedback, RMSpropFeedback, VelocityFeedback
from horovod_sparse.tensors.own_steps import feedback_for, kind_of, own_step

OPTIM = torch.optim


@pytest.fixture(autouse=True)
def one_rank() -> Any:
    hvd.init()


def net_of() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(9, 20), torch.nn.Tanh(), torch.nn.Linear(20, 2))


def trained(
    net: torch.nn.Module, optimizer: Any, count: int = 12, schedule: Any = None
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        optimizer.zero_grad()
        net(torch.randn(6, 9, generator=generator)).square().sum().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return [one.detach() for one in net.parameters()]


CASES = [
    (OPTIM.SGD, {"lr": 0.01}),
    (OPTIM.SGD, {"lr": 0.01, "weight_decay": 0.1}),
    (OPTIM.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    (OPTIM.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    (OPTIM.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.3}),
    (OPTIM.SGD, {"lr": 1e-4, "momentum": 0.9, "maximize": True}),
    (OPTIM.AdamW, {"lr": 0.01, "betas": (0.0, 0.9), "weight_decay": 0.1}),
    (OPTIM.Adam, {"lr": 0.01, "betas": (0.0, 0.9), "weight_decay": 0.1}),
    (OPTIM.Adam, {"lr": 0.01, "betas": (0.0, 0.9), "eps": 1e-3, "maximize": True}),
    (OPTIM.RMSprop, {"lr": 0.01, "alpha": 0.9, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("kind", "settings"), CASES)
@pytest.mark.parametrize("schedule", [{}, {"delay": 1}, {"every": 3}])
def test_one_rank_that_sends_everything_is_the_optimizer(kind: type, settings: Any, schedule: Any) -> None:
    """AdamW without a first moment is its rule; its decay comes with the mean, which may be late."""
    if schedule and kind is OPTIM.AdamW:
        settings = {**settings, "weight_decay": 0.0}
    net, plain = net_of(), net_of()
    optimizer: Any = kind(net.parameters(), **settings)
    made = hvd.DistributedOptimizer(
        optimizer, net.named_parameters(), compression="topk:density=1.0,feedback=best", **schedule
    )
    assert made is optimizer and type(made) is kind
    found = trained(net, made)
    for one, other in zip(found, trained(plain, kind(plain.parameters(), **settings)), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def test_a_schedule_of_rate_and_momentum_is_followed() -> None:
    found = []
    for sends in (True, False):
        net = net_of()
        optimizer = OPTIM.SGD(net.parameters(), lr=0.01, momentum=0.9)
        schedule = OPTIM.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
        if sends:
            hvd.DistributedOptimizer(optimizer, compression="topk:density=1.0,feedback=best")
        found.append(trained(net, optimizer, schedule=schedule))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "settings", "schedule"),
    [
        (OPTIM.Adam, {"betas": (0.0, 0.98)}, {}),
        (OPTIM.Adam, {"betas": (0.0, 0.98), "weight_decay": 0.1}, {"delay": 1}),
        (OPTIM.Adam, {"betas": (0.0, 0.98), "maximize": True}, {"every": 2}),
        (OPTIM.RMSprop, {"weight_decay": 0.1}, {}),
        (OPTIM.SGD, {"momentum": 0.9, "weight_decay": 0.1}, {}),
    ],
)
@pytest.mark.parametrize("missing", [lambda step: step < 9, lambda step: step % 3 > 0], ids=["late", "rare"])
def test_a_parameter_that_is_used_late_or_rarely_moves_as_in_pytorch(
    missing: Any, kind: Any, settings: Any, schedule: Any
) -> None:
    """Its second moment has an age of its own; without a gradient nothing moves it, nor its momentum."""
    found = []
    for sends in (True, False):
        net = net_of().double()
        optimizer = kind(net.parameters(), lr=0.01, **settings)
        if sends:
            hvd.DistributedOptimizer(optimizer, compression="topk:density=1.0,feedback=best", **schedule)
        generator = torch.Generator().manual_seed(1)
        for step in range(30):
            optimizer.zero_grad()
            net(torch.randn(6, 9, generator=generator).double()).square().sum().backward()
            if missing(step):
                net[2].weight.grad = None
            optimizer.step()
        state = optimizer.state_dict()["state"]
        moments = ["step", "exp_avg_sq"] if kind is OPTIM.Adam else []
        found.append([*net.parameters(), *(state[i][name] for i in range(4) for name in moments)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("schedule", [{}, {"delay": 1}])
@pytest.mark.parametrize("kind", [OPTIM.AdamW, OPTIM.SGD])
def test_a_skipped_step_leaves_moments_and_their_age(kind: type, schedule: Any) -> None:
    """Of parameters with a gradient, and of those without one."""
    found = []
    for bad in (False, True):
        net = net_of()
        more = {"momentum": 0.9} if kind is OPTIM.SGD else {"betas": (0.0, 0.9)}
        optimizer: Any = kind(net.parameters(), lr=0.01, **more)
        hvd.DistributedOptimizer(
            optimizer, compression="topk:density=1.0,feedback=best", on_nonfinite="skip", **schedule
        )
        generator = torch.Generator().manual_seed(1)
        for step in range(8):
            optimizer.zero_grad()
            net(torch.randn(6, 9, generator=generator)).square().sum().backward()
            if step > 2:
                net[2].weight.grad = None
            gradients = [one.grad for one in net.parameters()]
            for spoilt in (True, False) if bad and step in (0, 1, 4) else (False,):
                for one, gradient in zip(net.parameters(), gradients, strict=True):
                    one.grad = None if gradient is None else gradient * (float("nan") if spoilt else 1.0)
                optimizer.step()
        optimizer.finish()
        found.append([*net.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_best_is_found_by_the_optimizer() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    wanted = {
        OPTIM.AdamW: AdamFeedback,
        OPTIM.Adam: AdamFeedback,
        OPTIM.RMSprop: RMSpropFeedback,
        OPTIM.SGD: VelocityFeedback,
    }
    for kind, feedback in wanted.items():
        optimizer: Any = kind(parameters, lr=0.1)
        assert type(feedback_for(optimizer, BestFeedback())) is feedback
        assert kind_of(optimizer) is kind
    with pytest.raises(ArgumentError, match="'best' or 'adam' with AdamW"):
        feedback_for(OPTIM.AdamW(parameters), RMSpropFeedback())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda given: OPTIM.AdamW(given, amsgrad=True), "amsgrad=False"),
        (lambda given: OPTIM.RMSprop(given, centered=True), "centered=False"),
        (lambda given: OPTIM.RMSprop(given, momentum=0.9), "0 with RMSprop"),
        (lambda given: OPTIM.Adagrad(given), "Adagrad: its second moment never forgets"),
        (lambda given: OPTIM.NAdam(given), "NAdam: its first moment looks ahead"),
        (lambda given: OPTIM.LBFGS(given), "LBFGS: it searches along a line"),
    ],
)
def test_what_has_no_rule_is_refused_with_the_reason(make: Any, words: str) -> None:
    optimizer = make([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(ArgumentError, match=words):
        hvd.DistributedOptimizer(optimizer, compression="best:density=0.1")


def test_momentum_that_comes_later_is_refused() -> None:
    optimizer = OPTIM.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    feedback = feedback_for(optimizer, BestFeedback())
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ArgumentError, match="0, as when the model was attached"):
        own_step(OPTIM.SGD, feedback, optimizer.param_groups[0], 3)


@pytest.mark.parametrize("setting", ["merging", "max_grad_norm", "tensor_selection"])
def test_settings_of_the_backward_pass_are_refused(setting: str) -> None:
    given = {"merging": "optimal", "max_grad_norm": 1.0, "tensor_selection": "all"}[setting]
    optimizer = OPTIM.AdamW([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(ArgumentError, match=setting):
        hvd.DistributedOptimizer(optimizer, compression="best:density=0.1", **{setting: given})
    with pytest.raises(ArgumentError, match="gradients are exchanged in every step"):
        hvd.DistributedOptimizer(optimizer, compression="topk:density=0.1", delay=1)


def test_a_subclass_counts_unless_it_replaces_the_step() -> None:
    class Named(OPTIM.AdamW):
        """Replaces nothing."""

    class Mine(OPTIM.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    assert kind_of(Named(parameters)) is OPTIM.AdamW
    with pytest.raises(ArgumentError, match="Mine: it is not known what its step is"):
        kind_of(Mine(parameters))
