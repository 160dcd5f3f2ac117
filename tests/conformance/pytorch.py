"""What engines of PyTorch promise besides: scalers of a loss, rates, models and loops that users write."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from conformance.engine import RATE, SHAPES, Engine, given, replicas_agree, same


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64, copy=True).numpy()


class TorchTraining:
    """What trainings of all these engines have in common: a model's own parameters.

    Attributes:
        net: has the parameters.
        optimizer: steps.
        keeper: has the engine's state.
        loss: of given gradients.
    """

    net: torch.nn.Module
    optimizer: Any
    keeper: Any
    parts: Any
    loss: Callable[..., torch.Tensor]

    @property
    def telemetry(self) -> Any:
        return self.keeper.telemetry

    def steps(self) -> set[int]:
        return {part.bucket.state.step for part in self.parts}

    def step(self, gradients: Mapping[str, np.ndarray], scaler: Any = None) -> None:
        loss = self.loss(gradients)
        try:
            if scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(self.optimizer)
                scaler.update()
        except BaseException:
            self.net.zero_grad()  # Horovod's own optimizer forbids its own after a step that was refused
            raise
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, np.ndarray]:
        return {name: numpy_of(parameter) for name, parameter in self.net.named_parameters()}

    def held(self) -> dict[str, np.ndarray]:
        entry = self.keeper.state_dict()
        residuals = entry.get("horovod_sparse", entry)["residuals"]
        return {name: numpy_of(torch.as_tensor(values)) for name, values in residuals.items()}

    def change(self, name: str) -> None:
        with torch.no_grad():
            self.net.get_parameter(name).view(-1)[-1] += 1e-3

    def saved(self) -> Any:
        return copy.deepcopy((self.net.state_dict(), self.keeper.state_dict()))

    def load(self, saved: Any) -> None:
        self.net.load_state_dict(saved[0])
        self.load_state(saved)

    def load_state(self, saved: Any) -> None:
        self.keeper.load_state_dict(saved[1])


@pytest.mark.needs("scaler")
@pytest.mark.parametrize("feedback", ["error", "momentum(momentum=0.5,masking=false)"])
def test_at_density_1_overflows_leave_dense_training(engine: Engine, feedback: str) -> None:
    training = engine.train(f"topk:density=1.0,feedback={feedback}")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    momentum = 0.0 if feedback == "error" else 0.5
    wanted, velocity = ({name: np.full(shape, one) for name, shape in SHAPES.items()} for one in (1.0, 0.0))
    for step in range(9):
        gradients = given(engine.rank, step)
        if step in (2, 5, 6):
            if engine.rank == step % engine.size:
                gradients["one"][0] = np.inf
        else:
            for name in SHAPES:
                mean = sum(given(rank, step)[name] for rank in range(engine.size)) / engine.size
                velocity[name] = momentum * velocity[name] + mean
                wanted[name] = wanted[name] - RATE * velocity[name]
        training.step(gradients, scaler)
    assert scaler.get_scale() == 2.0**7
    for name, weights in training.weights().items():
        np.testing.assert_allclose(weights, wanted[name], rtol=0, atol=1e-6)


@pytest.mark.needs("scaler")
@pytest.mark.parametrize("text", ["topk:density=0.1", "hard_threshold:threshold=0.5"])
def test_a_scale_changes_nothing_and_an_overflow_skips_on_all(engine: Engine, text: str) -> None:
    plain, scaled = engine.train(text), engine.train(text)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for step in range(6):
        plain.step(given(engine.rank, step))
        if step == 4:
            bad = given(engine.rank, step)
            if engine.rank == 0:
                bad["one"][0] = np.inf
            scaled.step(bad, scaler)
            assert scaler.get_scale() == 2.0**9
        scaled.step(given(engine.rank, step), scaler)
    assert same(plain, scaled)
    assert plain.steps() == scaled.steps() == {6}
    assert replicas_agree(engine, scaled)


@pytest.mark.needs("adopts")
def test_residuals_follow_the_learning_rate(engine: Engine) -> None:
    text = "topk:density=0.1,feedback=error(scale_residual=true)"
    steady, falling = engine.train(text), engine.train(text)
    for step, rate in enumerate([1.0, 0.5, 0.25, 0.125, 0.125, 0.25]):
        steady.optimizer.param_groups[0]["lr"], falling.optimizer.param_groups[0]["lr"] = 1.0, rate
        steady.step({name: rate * gradient for name, gradient in given(engine.rank, step).items()})
        falling.step(given(engine.rank, step))
        wanted = steady.weights()
        assert all(np.array_equal(wanted[name], one) for name, one in falling.weights().items()), step


class Net(torch.nn.Module):
    """Layers, of which `shape` says how they are used.

    Args:
        shape: "plain", "shared": one layer twice, "tied": two with one weight, "branches": another layer on
            every second rank, and one for nobody, "some": one in every second pass only, "reentrant" and
            "checkpointed": computed again in backward, "nested": outputs in a dict, "norm": with buffers,
            "frozen": one layer is not trained.
    """

    def __init__(self, shape: str, rank: int) -> None:
        super().__init__()
        self.shape, self.rank, self.passes = shape, rank, 0
        sides = [(12, 16), (16, 16), (16, 4), (16, 16)][: 4 if shape in ("tied", "branches") else 3]
        self.first, self.middle, self.last, *others = (torch.nn.Linear(*side) for side in sides)
        self.norm = torch.nn.BatchNorm1d(16) if shape == "norm" else torch.nn.Identity()
        self.middle.requires_grad_(shape != "frozen")
        for other in others:
            self.other = other
            if shape == "tied":
                self.other.weight = self.middle.weight
            else:
                self.nobody = torch.nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> Any:
        self.passes += torch.is_grad_enabled()
        hidden = self.norm(self.first(inputs).relu())
        if self.shape in ("reentrant", "checkpointed"):
            again: Callable[[torch.Tensor], torch.Tensor] = lambda x: self.middle(x).relu()  # noqa: E731
            hidden = checkpoint(again, hidden, use_reentrant=self.shape == "reentrant")
        elif self.shape == "branches":
            hidden = (self.other if self.rank % 2 else self.middle)(hidden).relu()
        elif self.shape != "some" or self.passes % 2:
            hidden = self.middle(hidden).relu()
        if self.shape in ("shared", "tied"):
            hidden = (self.other if self.shape == "tied" else self.middle)(hidden).relu()
        out = self.last(hidden)
        return {"out": [out]} if self.shape == "nested" else out


def losses(model: Any, inputs: torch.Tensor, loop: str) -> Iterator[torch.Tensor]:
    """What one step goes backward from, one after the other."""

    def loss(some: torch.Tensor) -> torch.Tensor:
        out = model(some)
        return (out["out"][0] if isinstance(out, dict) else out).square().sum()

    if loop == "several forward passes":
        yield loss(inputs) + loss(inputs + 1.0)
    elif loop == "several backward passes":
        yield loss(inputs)
        yield loss(inputs + 1.0)
    elif loop == "no_sync":
        with getattr(model, "no_sync", torch.enable_grad)():
            yield loss(inputs)
        yield loss(inputs + 1.0)
    else:
        yield loss(inputs)
        with torch.no_grad():
            model(inputs)


LOOPS = ["plain", "several forward passes", "several backward passes", "no_sync"]
#: what DistributedDataParallel has to be told, and the loops that it does not allow
SHAPES_OF_NETS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, []),
    "shared": ({}, []),
    "tied": ({}, []),
    "branches": ({"find_unused_parameters": True}, ["several forward passes"]),
    "some": ({"find_unused_parameters": True}, ["several forward passes"]),  # it looks at the last pass alone
    "reentrant": ({"static_graph": True}, LOOPS[1:]),  # has one forward and one backward pass in every step
    "checkpointed": ({}, []),
    "nested": ({}, []),
    "norm": ({}, ["several forward passes"]),  # buffers are broadcast between them, which no backward allows
    "frozen": ({}, []),
}


@pytest.mark.needs("loops")
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("shape", SHAPES_OF_NETS)
def test_loops_of_users_are_dense_training(engine: Engine, shape: str, backend: str | None) -> None:
    arguments, refused = SHAPES_OF_NETS[shape]
    is_ddp = engine.name == "hook"
    if backend and (is_ddp or shape == "reentrant"):
        pytest.skip("torch.compile itself asks for use_reentrant=False; the hook sees buckets as ever")
    for number, loop in enumerate(LOOPS if is_ddp else LOOPS[:2]):
        if loop in refused:
            continue
        torch.manual_seed(0)
        net, twin = (Net(shape, engine.rank) for _ in range(2))
        twin.load_state_dict(net.state_dict())
        bases = [
            torch.optim.SGD((p for p in one.parameters() if p.requires_grad), 0.01) for one in (net, twin)
        ]
        views = {"gradient_as_bucket_view": number % 2 == 1}
        model, optimizer = engine.wrap(net, bases[0], "topk:density=1.0", **arguments, **views)
        run = torch.compile(model, backend=backend) if backend else model
        for step in range(4):
            inputs = torch.sin(torch.arange(60.0).reshape(5, 12) * (1 + engine.rank + 3 * step))
            for called in (run, twin):
                for loss in losses(called, inputs, loop):
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trained = [one for one in twin.parameters() if one.requires_grad]
            own = [torch.zeros_like(one) if one.grad is None else one.grad for one in trained]
            for one, every in zip(trained, zip(*engine.everyone(own), strict=True), strict=True):
                one.grad = sum(every) / engine.size
            bases[1].step()
            bases[1].zero_grad()
            for one, other in zip(net.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=f"{loop}, step {step}")
        weights = [copy.deepcopy(one.data) for one in net.parameters()]
        for theirs in engine.everyone(weights):
            assert all(torch.equal(*pair) for pair in zip(theirs, weights, strict=True))
