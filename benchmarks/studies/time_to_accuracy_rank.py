"""One rank of `scripts/study time_to_accuracy`: trains the CNN by a method, or times iterations of all."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.studies.tasks import digits_task
from benchmarks.studies.time_to_accuracy import METHODS

#: steps of a training, between two tests, and before the rate would be 0 where iterations are timed
STEPS, EVERY, ENDLESS = 160, 16, 10**6
RATE = 0.02


class Learner(ranks.Measurable):
    """A CNN of 4.3 million parameters that learns with one method.

    Args:
        name: of the method.
        text: see `METHODS`.
        seed: of the model's start and of the order of the data.
        num_steps: of the whole training; the learning rate then is 0.
    """

    num_warmup = 6

    def __init__(self, name: str, text: str, seed: int, num_steps: int) -> None:
        self.name, self._num_steps, self._step = name, num_steps, 0
        self._task = digits_task(width=8192, batch_size=32)
        torch.manual_seed(seed)
        self._net = self._task.make_model()
        hvd.broadcast_parameters(self._net.state_dict(), root_rank=0)
        self.num_parameters = sum(parameter.numel() for parameter in self._net.parameters())
        self._optimizer: Any = torch.optim.SGD(self._net.parameters(), lr=RATE, momentum=0.9)
        self._model, self._power, self._bytes_per_element = self._net, None, 2 if text == "fp16" else 4
        self._alone = text == "ddp" or text.startswith("powersgd")
        if self._alone:
            ranks.start_torch_distributed()
            # PowerSGD waits for its second collective in one of Gloo's two threads: with two buckets under
            # way both wait for ever, for what stands in line behind them. So it gets one bucket
            one = {"bucket_cap_mb": 1024} if text != "ddp" else {}
            self._model = DistributedDataParallel(self._net, gradient_as_bucket_view=True, **one)
            if text == "ddp":
                self._model.register_comm_hook(None, allreduce_hook)
            else:  # from the 2nd step on, which is the earliest
                self._power = PowerSGDState(None, int(text.split()[1]), start_powerSGD_iter=2)
                self._model.register_comm_hook(self._power, powerSGD_hook)
        else:
            self._optimizer = hvd.DistributedOptimizer(
                self._optimizer,
                named_parameters=[(f"{name}.{label}", p) for label, p in self._net.named_parameters()],
                compression=hvd.Compression.parse(text),
            )
        self._stream = self._task.batches(hvd.rank(), hvd.size(), num_steps, seed)
        self.parts = {}

    def prepare(self) -> None:
        """The next batch, and the learning rate, a cosine to 0: reading data is no part of an iteration."""
        self._batch = next(self._stream)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, self._step / self._num_steps)))
        for group in self._optimizer.param_groups:
            group["lr"] = RATE * share
        self._step += 1

    def run(self) -> None:
        self.parts = ranks.iterate(
            self._optimizer, lambda: self._task.loss(self._model, *self._batch), alone=self._alone
        )

    def score(self) -> float:
        """Of all test data: every rank tests its share."""
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


def train(name: str, seed: int) -> dict[str, Any]:
    """One training: accuracy on the way."""
    learner = Learner(name, METHODS[name], seed, STEPS)
    curve = [[0, round(learner.score(), 5)]]
    for step in range(1, STEPS + 1):
        learner.prepare()
        learner.run()
        if step % EVERY == 0:
            curve.append([step, round(learner.score(), 5)])
    sent = round(learner.bytes_per_step(), 1)
    return {"num_parameters": learner.num_parameters, "bytes_per_step": sent, "curve": curve}


def on_rank(settings: dict[str, Any]) -> dict[str, Any]:
    """Iterations of all methods in turn."""
    learners = [Learner(name, text, 0, ENDLESS) for name, text in settings["methods"].items()]
    found = ranks.measure_methods(learners, settings["repeat"])
    return {
        "methods": {
            name: {
                **summary["seconds"],
                "bytes_sent": summary["bytes_sent"],
                "cpu_seconds": summary["cpu_seconds"]["median"],
                "parts": summary["parts"],
            }
            for name, summary in found.items()
        }
    }


def main() -> None:
    """A rank of one training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--training", required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    name, _, seed = options.training.partition("/seed ")
    found = train(name, int(seed))
    if hvd.rank() == 0:
        options.json.write_text(json.dumps(found))
    hvd.shutdown()


if __name__ == "__main__":
    main()
