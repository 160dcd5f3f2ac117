"""A worker of an elastic job in PyTorch: trains, holds every step to law 1, and dies where its task says.

``torch_worker.py '{"batches": 20, "compression": "topk:density=0.2", ...}' FOLDER``; see `Task`.
"""

import contextlib
import hashlib
import json
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.torch as stock
import numpy as np
import torch
from horovod.torch.elastic import TorchState, run

import horovod_sparse.torch as hvd
from support.jobs import Diary, without_dynamo
from support.linear import LinearModel, dyadic

#: parameters of a model, which form two buckets, and their elements
LAYERS, LENGTH = 4, 500


@dataclass
class Task:
    """What the worker does.

    Attributes:
        trained: models, by the optimizer each has: "own topk:density=0.2", or "stock ..." for Horovod's
            with our compressor.
        batches: in all.
        killed: rank, the batch in which that worker kills itself, and where: "before" backward, or in
            "backward" of the first model. Who comes in its place lives.
        until: the number of ranks there must be before the last batches, by batch: the job waits there.
        more: further arguments of our optimizers.
    """

    trained: list[str] = field(default_factory=lambda: ["own topk:density=0.2"])
    batches: int = 12
    killed: list[tuple[int, int, str]] = field(default_factory=list)
    until: dict[str, int] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


class Training:
    def __init__(self, task: Task, which: int, diary: Diary, folder: Path) -> None:
        self.task, self.which, self.diary, self.folder = task, which, diary, folder
        self.front, _, compression = task.trained[which].partition(" ")
        self.shapes = {f"model{which}.layer{number}": (LENGTH,) for number in range(LAYERS)}
        self.model = LinearModel({name.replace(".", "_"): shape for name, shape in self.shapes.items()})
        named = list(zip(self.shapes, self.model.parameters(), strict=True))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.5)
        compressor = hvd.Compression.parse(compression)
        front = hvd if self.front == "own" else stock
        more = {"bucket_bytes": 8 * LENGTH, **task.more} if self.front == "own" else {}
        self.optimizer = front.DistributedOptimizer(sgd, named, compression=compressor, **more)
        self.last_size: int | None = None
        self.batch = 0
        list(self.model.parameters())[LAYERS // 2].register_hook(lambda _gradient: self._die("backward"))

    def _die(self, where: str) -> None:
        if self.which == 0 and [hvd.rank(), self.batch, where] in self.task.killed:
            with contextlib.suppress(FileExistsError):
                (self.folder / f"died.{hvd.rank()}.{self.batch}").touch(exist_ok=False)
                self.diary.note("dies", batch=self.batch)
                os.kill(os.getpid(), signal.SIGKILL)

    def held(self) -> np.ndarray:
        found = self.optimizer.state_dict()["horovod_sparse"]["residuals"]
        arrays = [
            found[name].double().numpy() if name in found else np.zeros(shape)
            for name, shape in self.shapes.items()
        ]
        return np.concatenate(arrays)

    def step(self, batch: int) -> dict[str, Any]:
        self.batch = batch
        rank, size = hvd.rank(), hvd.size()
        before = self.held() * (size / (self.last_size or size))
        given = [dyadic(shape, rank, batch, name) for name, shape in self.shapes.items()]
        self._die("before")
        self.model.backward(dict(zip(dict(self.model.named_parameters()), given, strict=True)))
        self.optimizer.synchronize()
        applied = np.concatenate([item.grad.double().numpy() for item in self.model.parameters()])
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.last_size = size
        kept = torch.from_numpy(before + np.concatenate(given) - self.held())
        lost = float(np.abs(hvd.allreduce(kept, op=hvd.Average, name="law").numpy() - applied).max())
        weights = b"".join(item.detach().numpy().tobytes() for item in self.model.parameters())
        return {
            "what": self.task.trained[self.which],
            "lost": lost,
            "held": float(np.abs(before).max()),
            "digest": hashlib.sha256(weights).hexdigest()[:12],
            "hosts": self.hosts,
        }

    @property
    def hosts(self) -> list[list[int]] | None:
        topology = None if self.front == "stock" else self.optimizer._synchronizer.topology
        return None if topology is None else [list(ranks) for ranks in topology.hosts]


def main(task: Task, folder: Path) -> None:
    without_dynamo()
    torch.set_num_threads(1)
    logging.basicConfig()
    logging.getLogger("horovod_sparse").setLevel("INFO")
    hvd.init()
    diary = Diary(folder)
    diary.note("begun", rank=hvd.rank(), size=hvd.size())
    trainings = [Training(task, which, diary, folder) for which in range(len(task.trained))]

    @run
    def train(state: TorchState) -> str:
        diary.note("trains", rank=hvd.rank(), size=hvd.size(), batch=state.batch)
        while state.batch < task.batches:
            if task.until.get(str(state.batch), hvd.size()) != hvd.size():
                time.sleep(0.05)
                state.commit()
                continue
            steps = [training.step(state.batch) for training in trainings]
            state.batch += 1
            diary.note("batch", batch=state.batch, rank=hvd.rank(), size=hvd.size(), steps=steps)
            state.commit()
        return "finished"

    states = {f"model{training.which}": training.model for training in trainings}
    states |= {f"optimizer{training.which}": training.optimizer for training in trainings}
    ended = train(TorchState(batch=0, **states))
    diary.note("ended", value=ended, size=hvd.size())


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])), Path(sys.argv[2]))
