"""A worker of an elastic job in PyTorch: trains, holds every step to law 1, and dies where its task says.

``torch_worker.py '{"batches": 20, "trained": ["own topk:density=0.2"], ...}' FOLDER``; see `Task`.
"""

import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.torch as stock
import numpy as np
import torch

import horovod_sparse.torch as hvd
from elastic.job import Task, carry_out
from support.jobs import without_dynamo
from support.linear import LinearModel, dyadic

#: parameters of a model, which form two buckets, and their elements
LAYERS, LENGTH = 4, 500


class Training:
    """A model by our optimizer, "own topk:density=0.2", or by Horovod's with our compressor, "stock ..."."""

    def __init__(self, task: Task, which: int) -> None:
        self.text = task.trained[which]
        self.front, _, compression = self.text.partition(" ")
        self.shapes = {f"model{which}.layer{number}": (LENGTH,) for number in range(LAYERS)}
        self.model = LinearModel({name.replace(".", "_"): shape for name, shape in self.shapes.items()})
        named = list(zip(self.shapes, self.model.parameters(), strict=True))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.5)
        compressor = hvd.Compression.parse(compression)
        front = hvd if self.front == "own" else stock
        more = {"bucket_bytes": 8 * LENGTH, **task.more} if self.front == "own" else {}
        self.optimizer = front.DistributedOptimizer(sgd, named, compression=compressor, **more)
        self.last_size: int | None = None

    def held(self) -> np.ndarray:
        found = self.optimizer.state_dict()["horovod_sparse"]["residuals"]
        arrays = [
            found[name].double().numpy() if name in found else np.zeros(shape)
            for name, shape in self.shapes.items()
        ]
        return np.concatenate(arrays)

    def step(self, batch: int) -> dict[str, Any]:
        rank, size = hvd.rank(), hvd.size()
        before = self.held() * (size / (self.last_size or size))
        given = [dyadic(shape, rank, batch, name) for name, shape in self.shapes.items()]
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
            "what": self.text,
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
    trainings = [Training(task, which) for which in range(len(task.trained))]
    states = {f"model{which}": training.model for which, training in enumerate(trainings)}
    states |= {f"optimizer{which}": training.optimizer for which, training in enumerate(trainings)}
    state = hvd.elastic.TorchState(batch=0, **states)
    carry_out(task, folder, hvd, state, lambda batch: [training.step(batch) for training in trainings])


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])), Path(sys.argv[2]))
