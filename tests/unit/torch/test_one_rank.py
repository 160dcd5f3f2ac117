"""Our optimizer with one rank: what it is refused, what is freed, and a bug in a sparsifier."""

import dataclasses
import gc
import itertools
import time
import weakref
from types import SimpleNamespace

import horovod.torch
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import horovod_sparse.torch as hvd
from horovod_sparse.errors import ArgumentError, DeadlineError, StateMismatchError, UnsupportedError
from horovod_sparse.merging import Plan
from horovod_sparse.planning.model import Fit
from horovod_sparse.torch.driver import tensor_holding
from horovod_sparse.training.deadline import Deadline
from support.linear import LinearModel, dyadic
from support.optimizers import make, residuals_of, train_step, wrapped
from unit.training.test_decision import profile_of_two


@pytest.fixture(autouse=True)
def one_rank():
    hvd.init()


def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1))


def wrap(net, compression="topk:density=0.5", optimizer=torch.optim.SGD, **arguments):
    base = optimizer(net.parameters(), lr=0.1)
    arguments.setdefault("named_parameters", net.named_parameters())
    return hvd.DistributedOptimizer(base, compression=compression, **arguments)


def test_names_are_checked_as_horovod_checks_them():
    net = model()
    named, factors = list(net.named_parameters()), (0.0, -1.0, float("nan"), float("inf"))
    for kind, words, wrong in (
        (ValueError, "unique", {"named_parameters": [("same", p) for p in net.parameters()]}),
        (ValueError, "not named", {"named_parameters": named[:2]}),
        (ValueError, "sequence of tuples", {"named_parameters": [list(pair) for pair in named]}),
        (ValueError, "groups", {"groups": -1}),
        (ValueError, "only appear once", {"groups": [[net[0].weight], [net[0].weight]]}),
        (ValueError, "backward_passes_per_step", {"backward_passes_per_step": 0}),
        (ValueError, "predivide", {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
        *((ArgumentError, "predivide_factor", {"gradient_predivide_factor": one}) for one in factors),
        (ArgumentError, "add_process_set", {"process_set": hvd.ProcessSet([0])}),
    ):
        with pytest.raises(kind, match=words):
            wrap(net, **wrong)
    for made, compression in itertools.product([wrap(net), wrap(net, "none")], ["topk", "none"]):
        with pytest.raises(ArgumentError, match="made by DistributedOptimizer already"):
            hvd.DistributedOptimizer(made, net.named_parameters(), compression=compression)
        with pytest.raises(ArgumentError, match="without attach or DistributedOptimizer"):
            hvd.LocalSteps(made, net, every=2)


@pytest.mark.parametrize("library", [hvd, horovod.torch])
def test_momentum_twice_is_refused_at_once(library, monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # one rank synchronizes, too
    net, made = model(), hvd.Compression.parse("dgc:density=0.1,feedback=momentum")
    plain = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9)
    with pytest.raises(ArgumentError, match=r"momentum=0.9.*momentum=0 to the optimizer"):
        library.DistributedOptimizer(plain, net.named_parameters(), made)


@pytest.mark.parametrize("compression", ["topk:density=0.5", "none"])
def test_arguments_of_a_wrong_kind_are_refused_by_name(compression):
    net = model()
    for wrong in ("sgd", torch.optim.SGD):
        with pytest.raises(ArgumentError, match=r"^optimizer=.*torch\.optim"):
            hvd.DistributedOptimizer(wrong, compression=compression)
    wrongs = [("plan", "x"), ("plan", [["0.weight"]]), ("groups", "x"), ("process_set", None), ("op", "x")]
    for name, wrong in wrongs:
        with pytest.raises(ArgumentError, match=f"^{name}="):
            wrap(net, compression, **{name: wrong})
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        wrap(net, compression, backward_passes_per_step="2")
    if compression != "none":
        with pytest.raises(ArgumentError, match=r"optimizer='SparseAdam'.*torch\.optim\.Adam"):
            wrap(net, compression, torch.optim.SparseAdam)
    local = hvd.LocalSteps(optimizer := torch.optim.SGD(net.parameters()), net, every=2)
    with pytest.raises(UnsupportedError, match=r"hvd\.save and hvd\.load"):
        hvd.elastic.TorchState(local=local)
    with pytest.raises(ArgumentError, match="LocalSteps"):
        hvd.DistributedOptimizer(optimizer, compression=compression)


def test_what_is_no_compression_or_deadline_is_refused_by_name(monkeypatch):
    for wrong in (0.1, None, hvd.Compression, hvd.Compression.topk(density=0.1).recipe):
        with pytest.raises(ArgumentError, match=r"^compression=.*Compression\.topk\(density=0\.1\)"):
            wrap(model(), wrong)
    with pytest.raises(ArgumentError, match=r"Compression\.exdyna\(density=0\.1\), with a call"):
        wrap(model(), hvd.Compression.exdyna)
    for given in ("every", "delay"):
        with pytest.raises(ArgumentError, match=f"or leave {given} out"):
            wrap(model(), "none", **{given: 4})
    with pytest.raises(ArgumentError, match=r"^levels='host' is not allowed: give 'flat'"):
        wrap(model(), merging="optimal", profile=PROFILE, levels="host")
    monkeypatch.setenv("HOROVOD_SPARSE_DEADLINE_SECONDS", "abc")
    with pytest.raises(ArgumentError, match=r"HOROVOD_SPARSE_DEADLINE_SECONDS='abc'"):
        wrap(model())


def test_complex_parameters_and_names_of_compiled_models_are_told():
    net = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))})
    with pytest.raises(UnsupportedError, match=r"w is complex.*view_as_complex"):
        wrap(net)
    saved, net = wrap(model()).state_dict(), model()
    names = [(f"_orig_mod.{name}", parameter) for name, parameter in net.named_parameters()]
    with pytest.raises(StateMismatchError, match=r"model\._orig_mod\.named_parameters"):
        wrap(net, named_parameters=names).load_state_dict(saved)


def test_buckets_follow_the_model_not_the_parameter_groups():
    net = model()
    groups = [{"params": [net[0].bias, net[2].bias]}, {"params": [net[2].weight, net[0].weight], "lr": 1.0}]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(groups, lr=0.1), named_parameters=net.named_parameters(), compression="topk"
    )
    assert optimizer.plan == Plan((("2.bias", "0.bias"), ("2.weight", "0.weight")))


def test_a_small_model_of_which_nothing_is_said_stays_dense(monkeypatch):
    monkeypatch.delenv("HOROVOD_SPARSE_TENSOR_SELECTION")
    careless, asked = wrap(model()), wrap(model(), tensor_selection="all")
    assert careless.plan.buckets == asked.plan.dense == ()
    assert careless.telemetry.selection.startswith("61 of 61 elements stay dense")


NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
PROFILE = profile_of_two({"topk": Fit(1e-5, 1e-9)}, dict.fromkeys(NAMES, 1e-3), 0.0)


@pytest.mark.usefixtures("memory")
def test_backward_is_measured_before_a_training_and_changes_nothing(monkeypatch):
    seconds, tick = {"0.weight": 0.004, "2.weight": 0.002}, 1e-6
    clock, passed = itertools.count(), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: passed[0] + tick * next(clock))

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(context, parameter, name):
            context.name = name
            return parameter.clone()

        @staticmethod
        def backward(context, gradient):
            passed[0] += seconds[context.name]
            return gradient, None

    net = model()

    def loss():
        first = Slow.apply(net[0].weight, "0.weight")
        hidden = torch.nn.functional.linear(torch.ones(4, 8), first, net[0].bias).relu()
        return checkpoint(last, hidden, use_reentrant=True).sum() * unnamed

    def last(hidden):
        return torch.nn.functional.linear(hidden, Slow.apply(net[2].weight, "2.weight"), net[2].bias)

    unnamed = torch.ones((), requires_grad=True)
    net[0].bias.grad = held = torch.ones(6)
    profile = hvd.measured_profile(loss, net.named_parameters(), "topk:density=0.5", cluster=PROFILE)
    assert net[0].bias.grad is held and net[2].bias.grad is None and unnamed.grad is None
    found = profile.backward_seconds
    assert sorted(found) == sorted(NAMES)
    for name, value in seconds.items():
        assert value <= found[name] <= value + 4 * tick
    assert found["0.bias"] <= 4 * tick and profile.forward_seconds > 0.0
    optimizer = wrap(net, merging="optimal", profile=profile)
    assert optimizer.plan == optimizer.decision.plan
    for profile in (None, dataclasses.replace(PROFILE, backward_seconds={})):
        with pytest.raises(ArgumentError, match=r"profile=.*hvd\.measured_profile"):
            wrap(model(), merging="optimal", profile=profile)
    with pytest.raises(ArgumentError, match=r"^cluster=7 .*path of a saved"):
        hvd.measured_profile(loss, net.named_parameters(), "topk:density=0.5", cluster=7)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("compression", ["topk:density=0.5", "best:density=0.5"])
def test_a_rank_that_the_process_set_leaves_out_trains_alone(compression):
    net, others = model(), SimpleNamespace(process_set_id=7, included=lambda: False)
    clips = {"max_grad_norm": 0.25} if "topk" in compression else {}
    optimizer = wrap(net, compression, process_set=others, **clips)
    net(torch.ones(3, 8)).square().sum().mul(100).backward()
    own = [parameter.grad.clone() for parameter in net.parameters()]
    before = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer.step()
    if clips:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.25)
        assert torch.linalg.vector_norm(torch.cat([one.reshape(-1) for one in own])) > 0.25
    for parameter, start in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), start - 0.1 * parameter.grad)
    assert clips or all(torch.equal(one, p.grad) for one, p in zip(own, net.parameters(), strict=True))
    optimizer.replan(None)
    assert (optimizer.plan, optimizer.telemetry.num_steps) == (None, 0)
    optimizer.load_state_dict(optimizer.state_dict())


SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11)}


def gradients(step: int) -> dict[str, np.ndarray]:
    return {name: dyadic(shape, step, name) for name, shape in SHAPES.items()}


def test_one_of_several_processes_that_horovod_does_not_know_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match=r"torchrun has started 2 .*horovodrun"):
        make(LinearModel(SHAPES), "topk:density=0.1")


@pytest.mark.parametrize("steps", [0, 2])
def test_models_and_optimizers_are_freed(steps):
    references = []
    for _ in range(3):
        model = LinearModel(SHAPES)
        optimizer = make(model, "topk:density=0.1")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for step in range(steps):
            train_step(model, optimizer, gradients(step))
            scheduler.step()
        references += [weakref.ref(item) for item in (optimizer, model, *model.parameters())]
        del model, optimizer, scheduler
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_a_model_whose_optimizer_is_gone_is_an_ordinary_one():
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1")
    train_step(model, optimizer, gradients(0))
    del optimizer
    gc.collect()
    for step in (1, 1):
        model.zero_grad()
        model.backward(gradients(step))
        np.testing.assert_array_equal(model.first.grad.numpy(), gradients(step)["first"])


@pytest.fixture
def elastic(monkeypatch, memory):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")


@pytest.fixture
def convolutional(elastic):
    """A model whose layout may change, and its optimizer."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(36, 5))
    return net, wrap(net, "topk:density=0.05")


def test_residuals_follow_a_model_that_changes_its_layout(convolutional):
    net, optimizer = convolutional
    net(torch.randn(4, 3, 5, 5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {name: values.clone() for name, values in residuals_of(optimizer).items()}
    assert any(values.count_nonzero() for values in before.values())
    net.to(memory_format=torch.channels_last)
    for plan in (optimizer.plan, Plan((tuple(sorted(before)),))):
        assert all(torch.equal(before[name], values) for name, values in residuals_of(optimizer).items())
        optimizer.replan(plan)
    assert all(torch.equal(before[name], values) for name, values in residuals_of(optimizer).items())


def test_a_model_that_becomes_double_is_refused_by_name(convolutional):
    net, optimizer = convolutional
    net[2].double()
    with pytest.raises(UnsupportedError, match=r"2\.(weight|bias) was torch.float32 .* torch.float64"):
        net[2](torch.randn(4, 36, dtype=torch.float64)).square().mean().backward()
    net[2].float()
    net.zero_grad()
    net(torch.randn(4, 3, 5, 5)).square().mean().backward()
    optimizer.step()


def test_a_bug_in_a_sparsifier_is_raised_and_the_residual_is_whole(elastic, monkeypatch):
    model = LinearModel(SHAPES)
    optimizer = wrapped("stock", model, "topk:density=0.2", {"backward_passes_per_step": 2})
    monkeypatch.setattr("horovod_sparse.sparsifiers.base.unpack_sum", lambda *messages: 1 / 0)
    model.backward(gradients(0))
    optimizer.state_dict()  # between two passes
    model.backward(gradients(0))
    with pytest.raises(UnsupportedError, match="between steps"):
        optimizer.state_dict()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    monkeypatch.undo()
    residual = optimizer.state_dict()["horovod_sparse"]["residuals"]["first"]
    np.testing.assert_array_equal(residual.numpy(), 2 * gradients(0)["first"])


def test_a_tensor_is_held_though_horovod_changes_its_shape_meanwhile(monkeypatch):
    """Outputs are made without elements, and get theirs from Horovod's thread."""
    output = torch.zeros(0, dtype=torch.int32)
    expand = torch.Tensor.expand

    def slowly(tensor, shape):
        expanded = expand(tensor, shape)
        output.resize_(5)
        return expanded

    monkeypatch.setattr(torch.Tensor, "expand", slowly)
    assert tensor_holding(output).grad is output


def test_time_in_which_this_process_was_stopped_is_no_waiting():
    deadline = Deadline(60, lambda: (0, [0, 1]))
    looks = [*range(10), *range(3_000, 3_040)]  # stopped for most of an hour, like the other ranks
    for waited in looks:
        deadline.check(waited, "late", 1)
    with pytest.raises(DeadlineError, match="has waited 60 s"):
        for waited in range(3_040, 3_060):
            deadline.check(waited, "late", 1)
    for waited in (0.001, 59.0, 61.0):  # another wait
        deadline.check(waited, "later", 1)
