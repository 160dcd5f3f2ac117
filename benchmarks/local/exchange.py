"""An exchange of local steps on one rank of P, all but the network, for `scripts/bench local`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.common.timing import Work
from horovod_sparse.arrays import FoldReport
from horovod_sparse.collectives import AllGather, Request
from horovod_sparse.feedback import ParameterRules
from horovod_sparse.simulation.lockstep import answer
from horovod_sparse.tensors.local_steps import LocalBinding
from horovod_sparse.tensors.parts import new_facts
from horovod_sparse.topology import Placement
from horovod_sparse.training.engine import Task, carry_out
from horovod_sparse.training.schedules import LocalSchedule
from horovod_sparse.wire import pack

_ROW = 1024


class _AloneEngine:
    """Rank 0 of P, where nobody waits: the others send messages that were made beforehand."""

    name, idle_seconds = "alone", 0.0
    binding: LocalBinding

    def __init__(self, optimizer: torch.optim.Optimizer, size: int) -> None:
        self._optimizer, self._size = optimizer, size
        self.others: dict[str, list[np.ndarray]] = {}

    def rank_and_size(self) -> tuple[int, int]:
        return 0, self._size

    def ranks(self) -> Placement:
        return Placement(0, self._size, 0, self._size, host="here", host_rank=0, host_size=self._size)

    def start_token(self) -> object:
        return self.others

    def facts(self, known: Any) -> Any:
        return new_facts(self._optimizer, known, {}, ParameterRules())

    def make_parts(self, *given: Any) -> Any:
        return self.binding.make_parts(*given)

    def declared(self) -> dict[str, object]:
        return {}

    def carry_out(self, coroutine: Any, topology: Any) -> Any:
        return carry_out(coroutine, lambda request: answer([request] * self._size)[0])

    def start(self, name: str, coroutine: Any) -> Task:
        def gather(request: Request) -> Any:
            if others := self.others.get(name.partition(".")[2]):
                assert isinstance(request, AllGather)
                return np.concatenate([request.buffer, *others])
            return answer([request] * self._size)[0]

        task = Task(name)
        task.result, task.done = carry_out(coroutine, gather), True
        return task

    def wait(self, tasks: Any) -> None:
        """All have ended."""

    def move_to(self, topology: Any) -> None:
        """Nothing is on hosts."""

    def to_array(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())


class _Training(LocalBinding):
    engine: _AloneEngine

    @property
    def starter(self) -> _AloneEngine:
        return self.engine


class ExchangeWorks:
    """Exchanges of a model of matrices, whose parameters move between them; made when it is measured.

    Args:
        source: float32 [n], by which parameters move.
        num_ranks: P.
    """

    def __init__(self, source: np.ndarray, num_ranks: int) -> None:
        self._source, self._ranks = torch.from_numpy(source), num_ranks
        self._made: dict[bool, LocalBinding] = {}

    def _training(self, offload: bool) -> LocalBinding:
        if offload not in self._made:
            rows = self._source.split(_ROW * _ROW)
            shaped = [one.view(-1, _ROW) if one.numel() % _ROW == 0 else one for one in rows]
            model = torch.nn.ParameterList([torch.nn.Parameter(one.clone()) for one in shaped])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            schedule, settings = LocalSchedule.of(
                1, {"compression": "sparseloco", "offload": offload, "check_every": 0}, "LocalSteps"
            )
            engine = _AloneEngine(optimizer, self._ranks)
            self._made[offload] = made = _Training(optimizer, model, engine, schedule, settings)
            made.before_step()
            for part in made.parts:
                generator = np.random.default_rng(0)
                engine.others[part.name] = [
                    self._message(generator, part.bucket) for _ in range(self._ranks - 1)
                ]
        return self._made[offload]

    def _message(self, generator: np.random.Generator, bucket: Any) -> np.ndarray:
        n, sparsifier = bucket.info.num_elements, bucket.recipe.sparsifier
        places = np.concatenate(
            [
                start + np.sort(generator.choice(count, quota, replace=False))
                for start, count, quota in zip(
                    range(0, n, sparsifier.chunk),
                    np.diff([*range(0, n, sparsifier.chunk), n]).tolist(),
                    sparsifier.quotas(n, sparsifier.num_selected(bucket.info, 0), 0).tolist(),
                    strict=True,
                )
            ]
        )
        values = generator.standard_normal(places.size, np.float32) * np.float32(1e-3)
        return pack(places.astype(np.int32), values, FoldReport(), format=sparsifier.wire, num_elements=n)

    @torch.no_grad()
    def _train(self, offload: bool) -> None:
        training, start = self._training(offload), 0
        for parameter in training.optimizer.param_groups[0]["params"]:
            parameter.view(-1).sub_(self._source[start : start + parameter.numel()], alpha=0.1)
            start += parameter.numel()
        for part in training.parts:  # the step that messages of others tell
            part.bucket.state = replace(part.bucket.state, step=0)

    def _exchange(self, offload: bool) -> None:
        self._training(offload).after_step()

    def works(self) -> list[Work]:
        """One exchange by the preset."""
        name = f"exchange: sparseloco, P={self._ranks}"
        return [Work(name, partial(self._exchange, False), partial(self._train, False), budget=13.0)]
