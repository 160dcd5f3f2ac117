"""A worker of an elastic job in TensorFlow: trains, and does what its argument says at some batch.

``tf_worker.py '{"batches": 20, "compression": "topk:density=0.2", ...}' FOLDER``; see `Task`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.tensorflow.elastic import run
from horovod.tensorflow.functions import broadcast_object

import horovod_sparse.tensorflow as hvd
from elastic.job import Diary

LENGTH = 40


@dataclass
class Task:
    """What the worker does.

    Attributes:
        compression: as text; "none" for stock Horovod's dense way.
        batches: in all.
        way: "graph" and "eager": a tape; "stock": stock Horovod's tape with our compressor; "keras": an
            optimizer of Keras 3.
        killed: by host, the batch in which its worker kills itself.
        nan: by host, the batch in which its gradient is NaN.
        until: the number of ranks there must be before the last batches, by batch: the job waits there.
        slices: whether an embedding gives tf.IndexedSlices.
        rate: learning rate.
    """

    compression: str = "topk:density=0.2"
    batches: int = 12
    way: str = "graph"
    killed: dict[str, int] = field(default_factory=dict)
    nan: dict[str, int] = field(default_factory=dict)
    until: dict[str, int] = field(default_factory=dict)
    slices: bool = False
    rate: float = 0.1


class State(ObjectState):
    """Variables, and the number of the batch: committed after every batch, broadcast when a rank joins."""

    def __init__(self, variables: list[tf.Variable], **more: Any) -> None:
        self.variables = variables
        self._values: list[np.ndarray] = []
        self.save_variables()
        super().__init__(bcast_object=broadcast_object, get_rank=hvd.rank, **more)

    def save_variables(self) -> None:
        self._values = [variable.numpy() for variable in self.variables]

    def save(self) -> None:
        self.save_variables()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        hvd.broadcast_variables(self.variables, root_rank=0)
        self.save_variables()
        super().sync()


def main(task: Task, folder: Path) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    diary = Diary(folder)
    diary.note("begun", rank=hvd.rank(), size=hvd.size())
    weight = tf.Variable(tf.zeros([LENGTH]), name="weight")
    table = tf.Variable(tf.zeros([6, 2]), name="table")
    variables = [weight, table] if task.slices else [weight]
    compression = hvd.Compression.parse(task.compression)

    def loss_of(factor: Any, rank: Any) -> Any:
        # a different optimum on every rank; that of the sum is known
        loss = factor * tf.reduce_sum((weight - tf.range(LENGTH, dtype=tf.float32) - rank) ** 2)
        if task.slices:
            loss += tf.reduce_sum(tf.gather(table, [tf.cast(rank, tf.int32), 3]))
        return loss

    def gradients(factor: Any, rank: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = loss_of(factor, rank)
        tape = (hvd if task.way != "stock" else stock()).DistributedGradientTape(
            tape, compression=compression
        )
        return list(tape.gradient(loss, variables))

    if task.way == "keras":
        optimizer = keras_optimizer(task.rate, compression)

    def step(factor: Any, rank: Any) -> None:
        if task.way == "keras":
            with tf.GradientTape() as tape:
                loss = loss_of(factor, rank)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return
        for variable, gradient in zip(variables, gradients(factor, rank), strict=True):
            dense = tf.convert_to_tensor(gradient)
            variable.assign_sub(task.rate * dense)

    if task.way != "eager":
        step = tf.function(step)

    @run
    def train(state: State) -> str:
        diary.note("trains", rank=hvd.rank(), size=hvd.size(), batch=state.batch)
        while state.batch < task.batches:
            if task.until.get(str(state.batch), hvd.size()) != hvd.size():
                time.sleep(0.1)
                state.commit()
                continue
            if task.killed.get(diary.host) == state.batch:
                diary.note("dies", batch=state.batch)
                os.kill(os.getpid(), signal.SIGKILL)
            bad = task.nan.get(diary.host) == state.batch
            step(tf.constant(float("nan") if bad else 1.0), tf.constant(float(hvd.rank())))
            state.batch += 1
            digest = hashlib.sha256(b"".join(item.numpy().tobytes() for item in variables)).hexdigest()[:12]
            facts: dict[str, Any] = {"table": table.numpy().tolist()} if task.slices else {}
            if task.way != "stock":
                entry = compression.state_dict()
                states = [bucket["state"]["step"] for bucket in entry["buckets"]]
                facts |= {"step": entry["step"], "states": states}
            diary.note("batch", batch=state.batch, rank=hvd.rank(), size=hvd.size(), digest=digest, **facts)
            state.commit()
        return "finished"

    ended = train(State(variables, batch=0))
    away = float(np.abs(weight.numpy() - np.arange(LENGTH) - (hvd.size() - 1) / 2).max())
    diary.note("ended", value=ended, away=away, size=hvd.size())


def keras_optimizer(rate: float, compression: Any) -> Any:
    import horovod_sparse.tensorflow.keras

    return horovod_sparse.tensorflow.keras.DistributedOptimizer(
        tf.keras.optimizers.SGD(rate), compression=compression
    )


def stock() -> Any:
    import horovod.tensorflow

    return horovod.tensorflow


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])), Path(sys.argv[2]))
