"""What each optimizer of PyTorch makes of a gradient on its own rank: rules, refusals, and one rank alone."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import kind_of, parse_recipe, recipe_for

OPTIM = torch.optim


@pytest.fixture(autouse=True)
def one_rank() -> Any:
    hvd.init()


def net_of() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(9, 20), torch.nn.Tanh(), torch.nn.Linear(20, 2))


def trained(net, optimizer, count=12, schedule=None, missing=None):
    generator = torch.Generator().manual_seed(1)
    for step in range(count):
        optimizer.zero_grad()
        inputs = torch.randn(6, 9, generator=generator).to(net[0].weight.dtype)
        net(inputs).square().sum().backward()
        if missing is not None and missing(step):
            net[2].weight.grad = None
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return [one.detach() for one in net.parameters()]


def check_moves(make, count=12, kept=(), rtol=2e-5, atol=2e-6, **how):
    """One rank that sends everything moves as the optimizer alone does, and keeps the same state."""
    found, schedule, missing = [], how.pop("schedule", None), how.pop("missing", None)
    for sends in (True, False):
        net = net_of().double() if rtol < 1e-5 else net_of()
        optimizer = make(net)
        kind, changes = type(optimizer), schedule and schedule(optimizer)
        if sends:
            compression = "topk:density=1.0,feedback=best"
            made = hvd.DistributedOptimizer(optimizer, net.named_parameters(), compression=compression, **how)
            assert made is optimizer and type(made) is kind
        moved = trained(net, optimizer, count, changes, missing)
        state = [held for _, held in sorted(optimizer.state_dict()["state"].items())]
        found.append([one.double() for one in (*moved, *(held[name] for held in state for name in kept))])
    torch.testing.assert_close(*found, rtol=rtol, atol=atol)


CASES = [
    (OPTIM.SGD, {"lr": 0.01}),
    (OPTIM.SGD, {"lr": 0.01, "weight_decay": 0.1}),
    (OPTIM.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    (OPTIM.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
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
    check_moves(lambda net: kind(net.parameters(), **settings), **schedule)


def test_a_schedule_of_rate_and_momentum_is_followed() -> None:
    one_cycle = functools.partial(OPTIM.lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=20)
    check_moves(lambda net: OPTIM.SGD(net.parameters(), lr=0.01, momentum=0.9), schedule=one_cycle)


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
def test_a_parameter_that_is_used_late_or_rarely_moves_as_in_pytorch(missing, kind, settings, schedule):
    """Its second moment has an age of its own; without a gradient nothing moves it, nor its momentum."""
    moments = ["step", "exp_avg_sq"] if kind is OPTIM.Adam else []
    how = {"missing": missing, "rtol": 1e-6, "atol": 1e-9, **schedule}
    check_moves(lambda net: kind(net.parameters(), lr=0.01, **settings), 30, moments, **how)


@pytest.mark.parametrize("schedule", [{}, {"delay": 1}])
@pytest.mark.parametrize("kind", [OPTIM.AdamW, OPTIM.SGD, OPTIM.Muon])
def test_a_skipped_step_leaves_moments_and_their_age(kind: type, schedule: Any) -> None:
    found = []
    for bad in (False, True):
        net = net_of()
        more = {OPTIM.SGD: {"momentum": 0.9}, OPTIM.AdamW: {"betas": (0.0, 0.9)}}.get(kind, {})
        matrices = [net[0].weight, net[2].weight]
        optimizer: Any = kind(matrices if kind is OPTIM.Muon else net.parameters(), lr=0.01, **more)
        hvd.DistributedOptimizer(
            optimizer, compression="topk:density=1.0,feedback=best", on_nonfinite="skip", **schedule
        )
        generator = torch.Generator().manual_seed(1)
        for step in range(8):
            optimizer.zero_grad()
            net(torch.randn(6, 9, generator=generator)).square().sum().backward()
            if step > 2:
                net[2].weight.grad = None
                optimizer.param_groups[0] |= {"momentum": 0.0} if kind is OPTIM.SGD else {}
            gradients = [one.grad for one in net.parameters()]
            for spoilt in (True, False) if bad and step in (0, 1, 4) else (False,):
                for one, gradient in zip(net.parameters(), gradients, strict=True):
                    one.grad = None if gradient is None else gradient * (float("nan") if spoilt else 1.0)
                optimizer.step()
        optimizer.finish()
        found.append([*net.parameters()])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("entry", [True, False], ids=["exact", "of any trainer"])
@pytest.mark.parametrize("kind", [OPTIM.AdamW, OPTIM.SGD])
def test_a_saved_optimizer_goes_on_with_a_parameter_used_late(kind: type, entry: bool) -> None:
    nets, optimizers = [net_of(), net_of()], list[Any]()
    for net in nets:
        optimizer = kind(net.parameters(), lr=0.01)
        text = "topk:density=1.0,feedback=best"
        optimizers.append(hvd.DistributedOptimizer(optimizer, net.named_parameters(), compression=text))
    trained(nets[0], optimizers[0], 6, missing=lambda step: step < 4)
    saved = optimizers[0].state_dict()
    assert saved["horovod_sparse"] if entry else saved.pop("horovod_sparse")
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers[1].load_state_dict(saved)
    ends = [trained(net, optimizer, 3) for net, optimizer in zip(nets, optimizers, strict=True)]
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-9)
    steps = optimizers[1]._synchronizer
    assert steps.step == optimizers[0]._synchronizer.step == 9
    steps.load_state_dict(None)
    assert not steps.ages


@pytest.mark.parametrize("schedule", [{"delay": 1}, {"every": 3}])
def test_a_training_goes_back_to_what_was_saved_first_the_model(schedule: Any) -> None:
    net = net_of()
    optimizer: Any = OPTIM.AdamW(net.parameters(), lr=0.01)
    hvd.DistributedOptimizer(optimizer, compression="best:density=0.2", **schedule)
    trained(net, optimizer, 5)
    model, state, ends = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict()), []
    for _ in range(2):
        ends.append([one.clone() for one in trained(net, optimizer, 5)])
        for _ in range(2):
            net.load_state_dict(model)
            optimizer.load_state_dict(state)
            assert all(map(torch.equal, net.state_dict().values(), model.values()))
            with optimizer.common():  # an evaluation, before another load or the next step
                pass
    assert all(map(torch.equal, *ends))


def test_best_is_found_by_the_optimizer() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, 2))]
    wanted = {"AdamW": "adam", "Adam": "adam", "RMSprop": "rmsprop", "SGD": "sgd", "Muon": "muon"}
    for kind, feedback in wanted.items():
        optimizer: Any = getattr(OPTIM, kind)(parameters, lr=0.1)
        assert recipe_for(optimizer, parse_recipe("best")).feedback.text_name == feedback
        assert kind_of(optimizer) == kind
    with pytest.raises(ArgumentError, match="'best' or 'adam' with AdamW"):
        recipe_for(OPTIM.AdamW(parameters), parse_recipe("topk:feedback=rmsprop"))
    with pytest.raises(ArgumentError, match=r"^momentum=0\.9 .* give 0 as the optimizer has it"):
        recipe_for(OPTIM.SGD(parameters), parse_recipe("topk:feedback=sgd(momentum=0.9)"))
    with pytest.raises(ArgumentError, match=r"^clip_norm=1\.0 .* None with Muon"):
        recipe_for(OPTIM.Muon(parameters), parse_recipe("topk:feedback=best(clip_norm=1.0)"))
    with pytest.raises(ArgumentError, match=r"feedback='adam'.*'best' or 'sgd' with SGD"):
        recipe_for(OPTIM.SGD(parameters), parse_recipe("best:steps=1000"))

    class Named(OPTIM.AdamW):
        def state_dict(self) -> Any:
            return super().state_dict()

    assert kind_of(Named([torch.nn.Parameter(torch.zeros(2))])) == "AdamW"


def test_more_density_than_adamw_needs_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "horovod_sparse")
    parameters = [torch.nn.Parameter(torch.zeros(2, 2))]
    for optimizer, density in ((OPTIM.AdamW, 0.01), (OPTIM.SGD, 0.05), (OPTIM.AdamW, 1.0)):
        recipe_for(optimizer(parameters), parse_recipe(f"best:density={density}"))
    assert not caplog.records
    recipe_for(OPTIM.AdamW(parameters), parse_recipe("best:density=0.05"))
    assert [record.getMessage()[:23] for record in caplog.records] == ["density 0.05 with AdamW"]


def named(name: str, base: type = OPTIM.Optimizer) -> Any:
    kind = type(name, (base,), {"step": lambda self, closure=None: None, "__module__": "elsewhere"})
    return (lambda given: kind(given, {})) if base is OPTIM.Optimizer else kind


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda given: OPTIM.AdamW(given, amsgrad=True), "AdamW without it: the largest second moment"),
        (
            lambda given: OPTIM.SGD(given, momentum=0.9, dampening=0.5),
            "SGD without it: a parameter's first step",
        ),
        (lambda given: OPTIM.SGD(given, 0.1, differentiable=True), "SGD without it: autograd does not see"),
        (OPTIM.Adagrad, "Adagrad: its second moment never forgets"),
        (OPTIM.SparseAdam, "SparseAdam: its gradients are sparse already"),
        (OPTIM.LBFGS, "LBFGS: it searches along a line"),
        (named("Lion"), "Lion: its steps have one length"),
        (named("SAM"), "SAM: it moves parameters for a while: give the optimizer within it"),
        (named("FusedLAMB"), "FusedLAMB: it scales a layer's step"),
        (named("AdamW8bit"), "AdamW8bit: kernels of its own do the step: give torch.optim.AdamW"),
        (named("Mine"), "Mine: it is not known what its step is"),
        (named("Mine", OPTIM.AdamW), "Mine: it is not known what its step is"),
        (named("AdamW", OPTIM.AdamW), "AdamW: it is not known what its step is"),
        (type("Mine", (OPTIM.NAdam,), {}), "Mine, or|NAdam: its first moment looks ahead"),
    ],
)
def test_what_has_no_rule_is_refused_with_the_reason(make: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        recipe_for(make([torch.nn.Parameter(torch.zeros(2))]), parse_recipe("best:density=0.1"))


def test_every_optimizer_of_pytorch_has_a_rule_or_a_reason() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, 2))]
    for name, kind in vars(OPTIM).items():
        if isinstance(kind, type) and issubclass(kind, OPTIM.Optimizer) and kind is not OPTIM.Optimizer:
            try:
                kind_of(kind(parameters))
            except ArgumentError as error:
                assert "it is not known" not in str(error), name


def test_momentum_that_comes_later_is_refused() -> None:
    optimizer = OPTIM.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    rule: Any = recipe_for(optimizer, parse_recipe("best")).feedback
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ArgumentError, match="0, as when the optimizer was attached"):
        rule.own_step("SGD", optimizer.param_groups[0], 3)


@pytest.mark.parametrize("setting", ["merging", "max_grad_norm", "tensor_selection", "levels"])
def test_settings_of_the_backward_pass_are_refused(setting: str) -> None:
    given = {"merging": "optimal", "max_grad_norm": 1.0, "tensor_selection": "all", "levels": "host"}[setting]
    optimizer = OPTIM.AdamW([torch.nn.Parameter(torch.zeros(2))])
    words = "clip_grad_norm_ before step" if setting == "max_grad_norm" else setting
    with pytest.raises(ArgumentError, match=words):
        hvd.DistributedOptimizer(optimizer, compression="best:density=0.1", **{setting: given})
    with pytest.raises(ArgumentError, match="gradients are exchanged in every step"):
        hvd.DistributedOptimizer(optimizer, compression="topk:density=0.1", delay=1)


@pytest.mark.parametrize(
    "settings",
    [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8, "weight_decay": 0.0}],
)
@pytest.mark.parametrize("schedule", [{}, {"delay": 1}])
def test_muon_that_sends_everything_is_muon(settings: Any, schedule: Any) -> None:
    if schedule:
        settings = {**settings, "weight_decay": 0.0}

    def make(net: Any) -> Any:
        return OPTIM.Muon([net[0].weight, net[2].weight], lr=0.02, **settings)

    how = {"missing": lambda step: step == 4, "rtol": 1e-5, "atol": 1e-6, **schedule}
    check_moves(make, 10, ["momentum_buffer"], **how)


@pytest.mark.parametrize("how", ["foreach", "fused", "capturable", "tensor rate"])
@pytest.mark.parametrize("kind", [OPTIM.AdamW, OPTIM.Adam, OPTIM.SGD, OPTIM.RMSprop])
def test_forms_of_pytorchs_kernels_make_no_difference(kind: Any, how: str) -> None:
    rate = torch.tensor(0.01, dtype=torch.float64)
    asked = {"lr": rate} if how == "tensor rate" else {"lr": 0.01, how: True}
    if how not in kind([torch.nn.Parameter(torch.zeros(2))]).param_groups[0] and how != "tensor rate":
        pytest.skip("has no such form")
    found = []
    for settings in ({"lr": 0.01}, asked):
        net = net_of()
        optimizer = kind(net.parameters(), **settings)
        hvd.DistributedOptimizer(optimizer, compression="topk:density=0.1,feedback=best")
        found.append(trained(net, optimizer))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Changing:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9
            group["betas"] = 0.0, 0.5 + 0.5 * group["betas"][1]


def test_groups_have_settings_of_their_own_and_schedules_change_them() -> None:
    def make(net: Any) -> Any:
        first = {"params": net[0].parameters(), "betas": (0.0, 0.9), "eps": 1e-3}
        second = {"params": net[2].parameters(), "lr": 0.002, "weight_decay": 0.1, "maximize": True}
        return OPTIM.Adam([first, second], lr=0.01, betas=(0.0, 0.8))

    check_moves(make, schedule=Changing)


def test_a_pass_keeps_no_gradient() -> None:
    for schedule in ({}, {"delay": 1}):
        net = net_of()
        optimizer: Any = OPTIM.AdamW(net.parameters())
        hvd.DistributedOptimizer(optimizer, compression="best:density=0.1", **schedule)
        trained(net, optimizer, 2)
        kept = [weakref.ref(one.grad) for one in net.parameters()]
        optimizer.zero_grad()
        assert not any(one() is not None for one in kept)
        optimizer.finish()
        assert not any(part.bucket._gradient for part in optimizer._synchronizer.parts)


def test_a_step_that_is_interrupted_leaves_the_gradients() -> None:
    net = net_of()
    optimizer: Any = OPTIM.AdamW(net.parameters())
    hvd.DistributedOptimizer(optimizer, compression="best:density=0.1")
    net(torch.ones(1, 9)).sum().backward()
    before = [one.grad for one in net.parameters()]
    optimizer._optimizer_step_code = lambda: 1 / 0  # which PyTorch calls after its own update
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert all(one.grad is gradient for one, gradient in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize(("kind", "schedule"), [(OPTIM.AdamW, {}), (OPTIM.SGD, {"delay": 1})])
def test_a_rate_that_is_refused_leaves_all_groups(kind: type, schedule: Any) -> None:
    net = net_of()
    optimizer: Any = kind([{"params": net[number].parameters()} for number in (0, 2)], lr=0.01)
    hvd.DistributedOptimizer(optimizer, compression="topk:density=0.3,feedback=best", **schedule)
    trained(net, optimizer, 3)
    before = optimizer._synchronizer.state_dict()["residuals"]
    for optimizer.param_groups[0]["lr"] in (float("nan"), 1e39):  # its part is folded last
        with pytest.raises(ArgumentError, match="lr="):
            optimizer.step()
    torch.testing.assert_close(optimizer._synchronizer.state_dict()["residuals"], before, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", [{}, {"delay": 1}])
def test_a_fold_that_fails_leaves_all_buckets_and_may_be_repeated(schedule: Any, monkeypatch: Any) -> None:
    ends = []
    for fails in (False, True):
        net = net_of()
        optimizer: Any = OPTIM.AdamW([{"params": net[number].parameters()} for number in (0, 2)], lr=0.01)
        hvd.DistributedOptimizer(optimizer, compression="topk:density=0.3,feedback=best", **schedule)
        trained(net, optimizer, 3)
        net[0].bias.grad = net[2].bias.grad = None
        last = optimizer._synchronizer.parts[-1]
        for _ in range(2 * fails):
            with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(last, "prepare_fold", lambda: 1 / 0)
                optimizer.step()
        optimizer.step()
        trained(net, optimizer, 2)
        optimizer.finish()
        ends.append([*net.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_a_group_that_was_removed_is_named() -> None:
    net = net_of()
    optimizer: Any = OPTIM.AdamW([{"params": net[number].parameters()} for number in (0, 2)])
    hvd.DistributedOptimizer(optimizer, net.named_parameters(), compression="best:density=0.1")
    trained(net, optimizer, 2)
    del optimizer.param_groups[0]
    with pytest.raises(UnsupportedError, match=r"0\.bias has left the optimizer"):
        optimizer.step()


def test_a_new_beginning_has_its_gradient_and_a_frozen_parameter_is_saved(tmp_path: Any) -> None:
    net = net_of()
    optimizer: Any = OPTIM.SGD(net.parameters(), lr=0.01, momentum=0.9)
    trained(net, optimizer, 1)
    saved, before = optimizer.state_dict(), net[2].bias.clone()
    net[0].weight.requires_grad_(False)
    hvd.DistributedOptimizer(optimizer, compression="topk:density=1.0,feedback=best").load_state_dict(saved)
    optimizer._synchronizer.made_for, optimizer._synchronizer._agreed_under = (1, 2), None
    assert not torch.equal(trained(net, optimizer, 1)[3], before)
    assert hvd.save(tmp_path, optimizer, model=net) == 1
