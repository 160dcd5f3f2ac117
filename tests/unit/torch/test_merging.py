"""How the optimizer makes its plan: what its arguments lead to without a launch, and what hooks measure."""

import dataclasses
import itertools
import logging
import time

import pytest
import torch

hvd = pytest.importorskip("horovod_sparse.torch")

from horovod_sparse.cost import Fit, Profile  # noqa: E402
from horovod_sparse.errors import ArgumentError, ProfileMismatchError, UnknownNameError  # noqa: E402
from horovod_sparse.frontend.calibration import cycle_seconds  # noqa: E402
from horovod_sparse.merging import Plan, fixed, min_elements  # noqa: E402
from horovod_sparse.pytorch.streams import EventStamps, HostStamps, stamps_for  # noqa: E402
from horovod_sparse.torch.calibration import DeviceBucketMemory, bucket_memory  # noqa: E402

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
PROFILE = Profile(
    size=2,
    framework="torch",
    controller="gloo",
    cycle_seconds=0.001,
    collectives={"allgather": Fit(1e-3, 1e-8), "allreduce": Fit(1e-3, 1e-8)},
    selection={"topk": Fit(1e-5, 1e-9)},
    backward_seconds=dict.fromkeys(NAMES, 1e-3),
)

NO_TIMES = dataclasses.replace(PROFILE, backward_seconds={})


@pytest.fixture(autouse=True)
def one_rank_that_synchronizes(monkeypatch):
    hvd.init()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # hooks are then registered with one rank, too


def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1))


def wrap(net, compression="topk:density=0.5", **arguments):
    base = torch.optim.SGD(net.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(
        base, named_parameters=net.named_parameters(), compression=compression, **arguments
    )


def train(net, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(4, 8)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "plan"),
    [
        ({"merging": "single"}, Plan((tuple(reversed(NAMES)),))),
        ({"merging": "layerwise"}, Plan(tuple((name,) for name in reversed(NAMES)))),
        ({"merging": fixed(num_elements=7)}, Plan((("2.bias", "2.weight"), ("0.bias", "0.weight")))),
        ({"merging": fixed(bytes=28)}, Plan((("2.bias", "2.weight"), ("0.bias",), ("0.weight",)))),
        ({"merging": Plan((NAMES,))}, Plan((NAMES,))),
        (
            {"merging": "single", "tensor_selection": min_elements(7)},
            Plan((("0.weight",),), ("2.bias", "2.weight", "0.bias")),
        ),
        (
            {"tensor_selection": lambda parameter: "bias" not in parameter.name, "bucket_bytes": 4},
            Plan((("2.weight",), ("0.weight",)), ("2.bias", "0.bias")),
        ),
        ({"merging": "optimal"}, Plan((tuple(reversed(NAMES)),))),  # until times are known
    ],
)
def test_plans_that_need_no_times(arguments, plan):
    net = model()
    optimizer = wrap(net, **arguments)
    assert optimizer.plan == plan
    train(net, optimizer, 2)
    assert optimizer.plan == plan
    assert optimizer.decision is None


def test_rules_of_the_compressor_and_the_selection_add_up():
    compression = "topk:density=0.5,dense=('2.*',)"
    optimizer = wrap(model(), compression, merging="single", tensor_selection=min_elements(7))
    assert optimizer.plan == Plan((("0.weight",),), ("2.bias", "2.weight", "0.bias"))


def test_arguments_that_exclude_each_other_are_named():
    with pytest.raises(ArgumentError, match="merging and groups"):
        wrap(model(), merging="single", groups=2)
    with pytest.raises(ArgumentError, match="merging and plan"):
        wrap(model(), merging="single", plan=Plan((NAMES,)))
    with pytest.raises(ArgumentError, match="merging and tensor_selection"):
        wrap(model(), merging="joint", tensor_selection="cost")
    with pytest.raises(ArgumentError, match="leave merging, profile out"):
        wrap(model(), hvd.Compression.none, merging="optimal", profile="saved.json")
    with pytest.raises(UnknownNameError, match="layerwise"):
        wrap(model(), merging="layer")
    with pytest.raises(ArgumentError, match=r"2\.bias"):
        wrap(model(), merging=Plan((NAMES[:3],)))


def test_a_complete_profile_leads_to_the_plan_at_once(tmp_path, caplog):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        optimizer = wrap(model(), merging="optimal", profile=path)
    assert optimizer.decision.plan == optimizer.plan
    assert optimizer.decision.profile == PROFILE
    assert "2 ranks, here 1" in caplog.text
    same = wrap(model(), merging="optimal", profile=PROFILE)
    assert same.plan == optimizer.plan
    optimizer.replan()  # by the same profile
    assert same.plan == optimizer.plan
    optimizer.replan(Plan((NAMES,)))
    assert optimizer.plan == Plan((NAMES,))
    assert optimizer.decision is None, "it says nothing about a plan that was given"


@pytest.mark.parametrize(
    ("profile", "match"),
    [
        (dataclasses.replace(PROFILE, backward_seconds=dict.fromkeys(NAMES[:3], 1e-3)), r"2\.bias"),
        (dataclasses.replace(PROFILE, backward_seconds=dict.fromkeys(NAMES, 0.0)), "no time"),
        (dataclasses.replace(PROFILE, selection={}), "no selection time for topk"),
        ("missing.json", "missing.json"),
    ],
)
def test_a_profile_that_cannot_be_applied_is_refused(profile, match):
    with pytest.raises(ProfileMismatchError, match=match):
        wrap(model(), merging="optimal", profile=profile)


def test_replanning_without_a_plan_needs_a_way_to_make_one():
    optimizer = wrap(model())
    with pytest.raises(ArgumentError, match="merging='optimal'"):
        optimizer.replan()
    with pytest.raises(ArgumentError, match="measure_steps"):
        optimizer.replan(Plan((NAMES,)), measure_steps=3)
    asked = wrap(model(), merging="optimal")
    with pytest.raises(ArgumentError, match="measure_steps"):
        asked.replan(measure_steps=0)
    with pytest.raises(ProfileMismatchError, match="train a few steps first"):
        wrap(model(), merging="optimal", profile=NO_TIMES).replan()


def test_hooks_measure_the_backward_of_every_parameter(monkeypatch):
    """Backward alone makes the clock go on, but for a little at every look: hooks find which layer it was."""
    seconds, tick = {"0.weight": 0.004, "2.weight": 0.002}, 1e-6
    clock = itertools.count()  # looks
    passed = [0.0]
    monkeypatch.setattr(HostStamps, "now", lambda stamps: passed[0] + tick * next(clock))

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
    optimizer = wrap(net, merging="optimal", profile=NO_TIMES)
    for _ in range(7):
        optimizer.zero_grad()
        first = Slow.apply(net[0].weight, "0.weight")
        second = Slow.apply(net[2].weight, "2.weight")
        hidden = torch.nn.functional.linear(torch.ones(4, 8), first, net[0].bias).relu()
        torch.nn.functional.linear(hidden, second, net[2].bias).sum().backward()
        optimizer.step()
    optimizer.replan()
    found = optimizer.decision.profile.backward_seconds
    assert sorted(found) == sorted(NAMES)
    for name, value in seconds.items():
        assert value <= found[name] <= value + 4 * tick
    assert found["0.bias"] <= 4 * tick
    assert optimizer.decision.profile.forward_seconds > 0.0
    assert optimizer.plan == optimizer.decision.plan


def test_work_for_a_bucket_is_not_counted_as_backward(monkeypatch):
    """Every start takes 20 ms; under a plan of four buckets, 3 of them lie between gradients."""
    from horovod_sparse.pytorch.parts import SparseBucket

    start = SparseBucket.start

    def slow(self, *arguments, **named):
        time.sleep(0.02)
        start(self, *arguments, **named)

    monkeypatch.setattr(SparseBucket, "start", slow)
    net = model()
    optimizer = wrap(net, merging="layerwise", tensor_selection="cost", profile=NO_TIMES)
    optimizer.replan(Plan(tuple((name,) for name in reversed(NAMES))))
    optimizer.replan(measure_steps=3)
    for _ in range(3):
        assert optimizer.decision is None
        train(net, optimizer)
    assert optimizer.decision is not None
    assert max(optimizer.decision.profile.backward_seconds.values()) < 0.015


def test_stamps_are_events_where_all_gradients_are_on_one_gpu():
    assert isinstance(stamps_for(["cpu"]), HostStamps)
    assert isinstance(stamps_for(["cuda:0", "cuda:0"]), EventStamps)
    assert isinstance(stamps_for(["cuda:0", "cuda:1"]), HostStamps)
    assert isinstance(stamps_for(["cuda:0", "cpu"]), HostStamps)


def test_events_are_recorded_on_the_hooks_stream_and_waited_for_when_read():
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            log.append(stream)

        def synchronize(self):
            log.append("waited")

        def elapsed_time(self, other):
            return 2500.0

    class Cuda:
        @staticmethod
        def current_stream(device):
            return f"stream of {device}"

    Cuda.Event = Event
    stamps = EventStamps(torch.device("cuda:1"), Cuda)
    start, stop = stamps.now(), stamps.now()
    assert log == ["stream of cuda:1"] * 2, "nothing is waited for in a hook"
    assert stamps.seconds_between(start, stop) == 2.5
    assert log[2:] == ["waited"] * 2


def test_cycle_time_is_that_of_the_environment(monkeypatch):
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    assert cycle_seconds() == 0.001
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2.5")
    assert cycle_seconds() == 0.0025
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "fast")
    with pytest.raises(ArgumentError, match="HOROVOD_CYCLE_TIME"):
        cycle_seconds()


def test_buckets_are_measured_where_most_elements_are():
    from horovod_sparse.merging import ParameterFacts

    facts = [ParameterFacts("a", 10, "float64"), ParameterFacts("b", 30, "float16"), ParameterFacts("c", 25)]
    assert bucket_memory(facts)[1:] == (torch.device("cpu"), "float16")


def test_memory_of_a_device_holds_what_the_hosts_does():
    """On PyTorch's own kernels, which the CPU has too."""
    from horovod_sparse.frontend.calibration import Extent, Where, calibration
    from horovod_sparse.frontend.engine import carry_out
    from horovod_sparse.simulation import run_lockstep
    from horovod_sparse.sparsifiers import TopK

    extent = Extent((64, 256, 1024), (500, 1000, 2000), 1, 1e9)
    memory = DeviceBucketMemory(torch.device("cpu"))
    for dtype in ("float32", "bfloat16"):
        places = [Where(rank, 2, "torch", "gloo", 1e-6) for rank in range(2)]
        one, other = run_lockstep(
            [
                calibration(place, [TopK()], extent=extent, memory=memory, dtype=dtype, kinds=["allgather"])
                for place in places
            ]
        )
        assert one == other
        assert one.selection["topk"].num_points == 6
        gradient = memory.gradient(100, dtype)
        memory.refill(gradient)
        filled = gradient.clone()
        # two ranks that hold the same: their mean is what each has
        carry_out(memory.sum_dense(gradient, (0, 2)), lambda request: 2.0 * request.buffer)
        assert torch.equal(gradient, filled)
