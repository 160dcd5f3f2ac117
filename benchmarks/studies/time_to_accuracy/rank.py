"""One rank of `scripts/study time_to_accuracy`: trains, or times iterations; `Hosts.run` gives it two files.

Settings: `work` ("train" or "time"), `model`, `shape` (arguments of the training), `methods` (name -> what
`Compression.parse` reads, or "ddp" and "powersgd RANK" for DistributedDataParallel), and `runs` (pairs of
method and seed), `steps`, `every` to train, or `repeat` to time.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpt import parameter_groups
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.common.iteration import iterate
from benchmarks.common.samples import plain, summarize
from benchmarks.common.wire import Round
from benchmarks.studies.tasks import ENDLESS, Task, digits_task, gpt_task, images_task
from benchmarks.sync.ddp_methods import start_torch_distributed
from horovod_sparse.errors import NonFiniteGradientError

#: before the line that tells of a finished training
MARK = "finished "


@dataclass(frozen=True)
class Model:
    """A task, and how it is learned.

    Attributes:
        make_task: called with the shape of the settings.
        make_optimizer: of a model.
        num_warmup: steps in which the learning rate rises; a cosine to 0 follows.
        max_norm: to which the synchronized gradient is clipped.
    """

    make_task: Callable[..., Task]
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    num_warmup: int = 0
    max_norm: float | None = None

    def rate_at(self, step: int, num_steps: int) -> float:
        """The learning rate of a step (from 0) by the largest one."""
        rising = min(1.0, (step + 1) / self.num_warmup) if self.num_warmup else 1.0
        return rising * 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))


MODELS = {
    "digits": Model(
        partial(digits_task, width=8192, batch_size=32),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    ),
    "resnet20": Model(
        lambda folder, **shape: images_task(Path(folder), **shape),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
    ),
    "gpt": Model(
        partial(gpt_task, width=128, length=64, batch_size=4, num_test=128),
        lambda model: torch.optim.AdamW(parameter_groups(model, 0.1), lr=3e-3, betas=(0.9, 0.95)),
        num_warmup=30,
        max_norm=1.0,
    ),
}


class Learner:
    """A model that learns with one method: also what `measure_methods` times.

    Args:
        model: one of `MODELS`.
        task: its task.
        name: of the method.
        text: see the module.
        seed: of the model's start and of the order of the data.
        num_steps: of the whole training; the learning rate then is 0.
    """

    num_warmup = 6

    def __init__(self, model: Model, task: Task, name: str, text: str, seed: int, num_steps: int) -> None:
        self.name, self._how, self._task, self._num_steps, self._step = name, model, task, num_steps, 0
        torch.manual_seed(seed)
        self._net = task.make_model()
        hvd.broadcast_parameters(self._net.state_dict(), root_rank=0)
        torch.manual_seed(1000 * seed + hvd.rank())  # what moves and mirrors images differs between ranks
        self.num_parameters = sum(parameter.numel() for parameter in self._net.parameters())
        self._optimizer = model.make_optimizer(self._net)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._model, self._power, self._bytes_per_element = self._net, None, 2 if text == "fp16" else 4
        self._behind_torch = text == "ddp" or text.startswith("powersgd")
        if self._behind_torch:
            start_torch_distributed()
            # PowerSGD waits for its second collective in one of Gloo's two threads: with two buckets under
            # way both wait for ever, for what stands in line behind them. So it gets one bucket
            one = {"bucket_cap_mb": 1024} if text != "ddp" else {}
            self._model = DistributedDataParallel(
                self._net, broadcast_buffers=False, gradient_as_bucket_view=True, **one
            )
            if text == "ddp":
                self._model.register_comm_hook(None, allreduce_hook)
            else:  # from the 2nd step on, which is the earliest
                self._power = PowerSGDState(None, int(text.split()[1]), start_powerSGD_iter=2)
                self._model.register_comm_hook(self._power, powerSGD_hook)
        else:
            self._optimizer = hvd.DistributedOptimizer(
                self._optimizer,
                named_parameters=[(f"{name}.{seed}.{label}", p) for label, p in self._net.named_parameters()],
                compression=hvd.Compression.parse(text),
            )
        self._stream = task.batches(hvd.rank(), hvd.size(), ENDLESS, seed)
        self.parts: dict[str, float] = {}

    def prepare(self) -> None:
        """The next batch, and the learning rate: reading data is no part of an iteration."""
        self._batch = next(self._stream)
        share = self._how.rate_at(self._step, self._num_steps)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        self._step += 1

    def run(self) -> None:
        """One iteration; what is clipped is what is applied, the same on all ranks."""
        self.parts = iterate(
            self._optimizer,
            lambda: self._task.loss(self._model, *self._batch),
            self._clip,
            alone=self._behind_torch,
        )

    def _clip(self) -> None:
        if self._how.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._net.parameters(), self._how.max_norm)

    def score(self) -> float:
        """Of all test data: every rank tests its share, with its own running statistics."""
        found = torch.tensor(self._task.test(self._net, hvd.rank(), hvd.size()), dtype=torch.float64)
        total, count = hvd.allreduce(found, name="score", op=hvd.Sum).tolist()
        return total / count

    def bytes_per_step(self) -> float:
        """Of gradient, that a rank gave to collectives: mean over the steps so far."""
        if self._power is not None:  # dense for two steps; then two factors of every matrix, vectors whole
            dense = min(self._step, self._power.start_powerSGD_iter) * self.num_parameters
            return 4 * (dense + self._power.total_numel_after_compression) / self._step
        telemetry = getattr(self._optimizer, "telemetry", None)
        if telemetry is None or telemetry.mean is None:
            return self._bytes_per_element * self.num_parameters
        return float(telemetry.mean.bytes_sent)

    def rounds(self) -> list[Round]:
        """Nothing: bytes are counted by the training."""
        return []

    def facts(self) -> dict[str, float]:
        """Nothing."""
        return {}


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """All runs that are asked for, one after the other, each told as soon as it is done."""
    model, runs = MODELS[settings["model"]], {}
    task = model.make_task(**settings["shape"])
    for name, seed in settings["runs"]:
        learner = Learner(model, task, name, settings["methods"][name], seed, settings["steps"])
        run: dict[str, Any] = {"num_parameters": learner.num_parameters, "diverged": False}
        curve = [[0, learner.score()]]
        try:
            for step in range(1, settings["steps"] + 1):
                learner.prepare()
                learner.run()
                if step % settings["every"] == 0 or step == settings["steps"]:
                    curve.append([step, learner.score()])
        except NonFiniteGradientError:
            run["diverged"] = True
        run |= {
            "bytes_per_step": round(learner.bytes_per_step(), 1),
            "curve": [[step, round(score, 5)] for step, score in curve],
        }
        runs[f"{settings['model']}/{name}/seed {seed}"] = run
        ranks.say(MARK + json.dumps([settings["model"], name, seed, run]))
    return {"runs": runs}


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Iterations of all methods in turn, at the density that they are trained with."""
    model = MODELS[settings["model"]]
    task = model.make_task(**settings["shape"])
    learners = [Learner(model, task, name, text, 0, 10**6) for name, text in settings["methods"].items()]
    with ranks.no_collection():
        samples = ranks.measure_methods(learners, settings["repeat"], lambda line: None)
    found = {}
    for learner in learners:
        everyone = hvd.allgather_object([plain(sample) for sample in samples[learner.name]])
        summary = summarize(everyone)
        found[learner.name] = {
            **summary["seconds"],
            "bytes_sent": summary["bytes_sent"],
            "cpu_seconds": summary["cpu_seconds"]["median"],
            "parts": summary["parts"],
        }
    return {"repeat": settings["repeat"], "methods": found}


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """What is asked for."""
    return train(settings) if settings["work"] == "train" else measure(settings)


if __name__ == "__main__":
    sys.exit(ranks.main(work))
