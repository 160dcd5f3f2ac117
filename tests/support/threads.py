"""Ranks that are threads of one process, take local steps, and meet in every collective."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from horovod_sparse.collectives import Request
from horovod_sparse.feedback import ParameterRules
from horovod_sparse.simulation.lockstep import answer
from horovod_sparse.tensors.local_steps import LocalBinding
from horovod_sparse.tensors.models import new_facts, trained_by
from horovod_sparse.topology import Placement
from horovod_sparse.training.compression import recipe_of
from horovod_sparse.training.engine import Driver, carry_out
from horovod_sparse.training.schedules import LocalSchedule

SIZE, START = 4, object()


class Meeting:
    def __init__(self, size: int) -> None:
        self.brought: list[Any] = [None] * size
        self.answers: list[Any] = []
        self.met, self.left = threading.Barrier(size, self._answer), threading.Barrier(size)

    def _answer(self) -> None:
        assert len({type(one) for one in self.brought}) == 1, self.brought
        self.answers = answer(self.brought)

    def __call__(self, rank: int, request: Request) -> Any:
        self.brought[rank] = request
        self.met.wait(60)
        found = self.answers[rank]
        self.left.wait(60)
        return found


class ThreadDriver(Driver):
    def __init__(self, engine: ThreadEngine) -> None:
        super().__init__(ConnectionError, lambda: engine.rank_and_size()[1])
        self._engine = engine

    def start_request(self, request: Request, name: str) -> Any:
        found = self._engine.meeting(self._engine.rank, request)
        return SimpleNamespace(done=lambda: True, result=lambda: found)


class ThreadEngine:
    name = "threads"
    #: another one after a restart
    start_of: object = START

    def __init__(self, rank: int, meeting: Meeting, optimizer: Any, names: Any) -> None:
        self.rank, self.meeting, self.optimizer, self.names = rank, meeting, optimizer, names
        self.starter = ThreadDriver(self)

    def rank_and_size(self) -> tuple[int, int]:
        return self.rank, len(self.meeting.brought)

    def placement(self) -> Placement:
        rank, size = self.rank_and_size()
        return Placement(rank, size, rank, host="here", host_rank=rank)

    def start_token(self) -> object:
        return self.start_of

    def facts(self, known: Any) -> Any:
        return new_facts(self.optimizer, known, self.names, ParameterRules())

    def declared(self) -> dict[str, object]:
        return {}

    def begin(self, training: Any) -> None:
        """Nothing is on hosts."""

    def carry_out(self, coroutine: Any, topology: Any) -> Any:
        return carry_out(coroutine, lambda request: self.meeting(self.rank, request))

    def to_array(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())


class Binding(LocalBinding):
    engine: ThreadEngine

    @property
    def starter(self) -> Driver:
        return self.engine.starter

    def _advance(self) -> None:
        self.engine.starter.advance()


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 3))


MODELS = [model_of(seed) for seed in range(3)]


class Rank:
    def __init__(self, rank: int, meeting: Meeting, inner: Any = None, seed: int = 0, **given: Any) -> None:
        self.rank, self.meeting, self.steps = rank, meeting, 0
        self.model = copy.deepcopy(MODELS[seed])
        self.optimizer = (inner or adamw)(self.model.parameters())
        #: by the optimizer's own steps, since somebody has set it to 0
        self.moved = torch.zeros_like(self.vector())
        self.optimizer.register_step_pre_hook(lambda *_: self._note(-1))
        self.optimizer.register_step_post_hook(lambda *_: self._note(1))
        self.local = self.binding(self.optimizer, **given)

    def binding(self, optimizer: torch.optim.Optimizer, **given: Any) -> Binding:
        """Local steps of an optimizer, which this rank takes from now on."""
        self.optimizer = optimizer
        schedule, settings = LocalSchedule.of(given.pop("every", 3), given, "LocalSteps")
        names = {one: name for name, one in trained_by(optimizer, self.model).items()}
        engine = ThreadEngine(self.rank, self.meeting, optimizer, names)
        self.local = Binding(optimizer, self.model, engine, schedule, settings)
        return self.local

    def _note(self, sign: int) -> None:
        self.moved += sign * self.vector()

    def gradients(self) -> None:
        """Of this rank's batch of this step."""
        random = np.random.default_rng([self.rank, self.steps])
        inputs = torch.from_numpy(random.standard_normal((8, 40)).astype(np.float32))
        inputs = inputs.to(next(self.model.parameters()).dtype)
        self.optimizer.zero_grad()
        self.model(inputs).sub(inputs[:, :3]).square().mean().backward()
        self.steps += 1

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.gradients()
            self.optimizer.step()

    def vector(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def kept(self, what: str) -> torch.Tensor:
        """Of all parameters: "start", or "residuals"."""
        entry = self.local.state_dict()
        values = entry["residuals"] if what == "residuals" else entry["local"][what]
        named = self.model.named_parameters()
        return torch.cat(
            [values.get(name, torch.zeros_like(one)).reshape(-1) for name, one in named]
        ).detach()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def half_of(parameters: Any, made: Any = adamw) -> torch.optim.Optimizer:
    parameters = list(parameters)
    for parameter in parameters:
        parameter.data = parameter.data.bfloat16()
    return made(parameters)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def on_ranks(body: Callable[[Rank], Any], size: int = SIZE, **given: Any) -> list[Any]:
    meeting = Meeting(size)
    if isinstance(text := given.get("compression"), str):  # Python 3.11 parses in one thread at a time alone
        given["compression"] = recipe_of(text)

    def run(rank: int) -> Any:
        try:
            return body(Rank(rank, meeting, **given))
        except BaseException as error:
            meeting.met.abort()
            meeting.left.abort()
            return error

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
    errors = [one for one in results if isinstance(one, BaseException)]
    for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error
    return results


def trained(one: Rank, num_steps: int) -> Rank:
    one.train(num_steps)
    return one


def equal(tensors: list[torch.Tensor]) -> bool:
    return all(torch.equal(tensors[0], other) for other in tensors[1:])
