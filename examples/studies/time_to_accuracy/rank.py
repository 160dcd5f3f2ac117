"""One rank of `scripts/study time_to_accuracy`: trains, or times iterations; `Hosts.run` gives it two files.

Settings: `work` ("train" or "time"), `model`, `shape` (arguments of the training), `methods` (name -> what
`Compression.parse` reads, or "ddp" and "powersgd RANK" for DistributedDataParallel), and `runs` (pairs of
method and seed), `steps`, `every` to train, or `repeat` to time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.common.samples import plain, summarize
from benchmarks.common.wire import Round
from benchmarks.sync.ddp_methods import start_torch_distributed
from horovod_sparse.errors import NonFiniteGradientError
from horovod_sparse.tensors.adoption import AdamWOfSteps
from studies.time_to_accuracy.trainings import Training, digits_training, images_training, text_training

TRAININGS = {"digits": digits_training, "resnet20": images_training, "gpt": text_training}
#: before the line that tells of a finished training
MARK = "finished "


def training_of(settings: dict[str, Any]) -> Training:
    """The training that is asked for."""
    shape = dict(settings["shape"])
    if "folder" in shape:
        shape["folder"] = Path(shape["folder"])
    return TRAININGS[settings["model"]](**shape)


class Learner:
    """A model that learns with one method: also what `measure_methods` times.

    Args:
        training: what is trained.
        name: of the method.
        text: see the module.
        seed: of the model's start and of the order of the data.
        num_steps: of the whole training; the learning rate then is 0.
    """

    num_warmup = 6

    def __init__(self, training: Training, name: str, text: str, seed: int, num_steps: int) -> None:
        self.name, self._training, self._num_steps, self._step = name, training, num_steps, 0
        torch.manual_seed(seed)
        self._net = training.make_model()
        hvd.broadcast_parameters(self._net.state_dict(), root_rank=0)
        torch.manual_seed(1000 * seed + hvd.rank())  # what moves and mirrors images differs between ranks
        self.num_parameters = sum(parameter.numel() for parameter in self._net.parameters())
        self._optimizer = training.make_optimizer(self._net)
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
        self._stream = training.batches(hvd.rank(), hvd.size(), seed)
        self.parts: dict[str, float] = {}

    def prepare(self) -> None:
        """The next batch, and the learning rate: reading data is no part of an iteration."""
        self._batch = next(self._stream)
        share = self._training.rate_at(self._step, self._num_steps)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        self._step += 1

    def run(self) -> None:
        """One iteration."""
        clock, optimizer = time.perf_counter, self._optimizer
        started = clock()
        optimizer.zero_grad()
        loss = self._training.loss(self._model, *self._batch)
        forward = clock()
        loss.backward()
        backward = clock()
        if self._behind_torch:
            self._clip()
            synchronized = clock()
            optimizer.step()
        else:
            optimizer.synchronize()
            self._clip()  # what is clipped is what is applied, the same on all ranks
            synchronized = clock()
            with optimizer.skip_synchronize():
                optimizer.step()
        self.parts = {
            "forward": forward - started,
            "backward": backward - forward,
            "exchange": synchronized - backward,
            "step": clock() - synchronized,
        }

    def _clip(self) -> None:
        # a step that was sent as such has a norm of its own
        if self._training.max_norm is not None and not isinstance(self._optimizer, AdamWOfSteps):
            torch.nn.utils.clip_grad_norm_(self._net.parameters(), self._training.max_norm)

    def score(self) -> float:
        """Of all test data: every rank tests its share, with its own running statistics."""
        found = torch.tensor(self._training.test(self._net, hvd.rank(), hvd.size()), dtype=torch.float64)
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
    training, runs = training_of(settings), {}
    for name, seed in settings["runs"]:
        learner = Learner(training, name, settings["methods"][name], seed, settings["steps"])
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
    training = training_of(settings)
    learners = [Learner(training, name, text, 0, 10**6) for name, text in settings["methods"].items()]
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
