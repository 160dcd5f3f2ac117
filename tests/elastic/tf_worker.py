"""A worker of an elastic job in TensorFlow: trains, and does what its argument says at some batch.

``tf_worker.py '{"batches": 20, "trained": ["graph topk:density=0.2"], ...}' FOLDER``; see `Task`.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as stock
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from elastic.job import Task, carry_out

LENGTH, RATE = 40, 0.1


class Training:
    """Variables, and what synchronizes their gradients: that of the table's row 3 is 1 on every rank.

    A way to train and a compression: "graph" and "eager" by a tape, whose embedding gives tf.IndexedSlices;
    "stock" by stock Horovod's tape with our compressor; "keras" by an optimizer of Keras 3.
    """

    def __init__(self, text: str) -> None:
        self.way, _, compression = text.partition(" ")
        self.weight = tf.Variable(tf.zeros([LENGTH]), name=f"{self.way}_weight")
        self.table = tf.Variable(tf.zeros([6, 2]), name=f"{self.way}_table")
        self.slices = self.way in ("graph", "eager")
        self.variables = [self.weight, self.table] if self.slices else [self.weight]
        self.compression = hvd.Compression.parse(compression)
        self.optimizer: Any = None
        if self.way == "keras":
            import horovod_sparse.tensorflow.keras

            self.optimizer = horovod_sparse.tensorflow.keras.DistributedOptimizer(
                tf.keras.optimizers.SGD(RATE), compression=self.compression
            )
            self.optimizer.build(self.variables)
        self.step = self._step if self.way == "eager" else tf.function(self._step)

    def _step(self, factor: Any, rank: Any) -> None:
        with tf.GradientTape() as tape:
            # a different optimum on every rank
            loss = factor * tf.reduce_sum((self.weight - tf.range(LENGTH, dtype=tf.float32) - rank) ** 2)
            if self.slices:
                loss += tf.reduce_sum(tf.gather(self.table, [tf.cast(rank, tf.int32), 3]))
        if self.way == "keras":
            gradients = tape.gradient(loss, self.variables)
            self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))
            return
        module = stock if self.way == "stock" else hvd
        tape = module.DistributedGradientTape(tape, compression=self.compression)
        for variable, gradient in zip(self.variables, tape.gradient(loss, self.variables), strict=True):
            variable.assign_sub(RATE * tf.convert_to_tensor(gradient))

    def facts(self) -> dict[str, Any]:
        values = b"".join(item.numpy().tobytes() for item in self.variables)
        found: dict[str, Any] = {"way": self.way, "digest": hashlib.sha256(values).hexdigest()[:12]}
        if self.slices:
            found["table"] = self.table.numpy().tolist()
        entry = self.compression.state_dict()
        return found | {"step": entry["step"], "states": [one["state"]["step"] for one in entry["buckets"]]}


def main(task: Task, folder: Path) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    trainings = [Training(text) for text in task.trained]

    def step(batch: int) -> list[dict[str, Any]]:
        bad = task.nan.get(os.environ["HOROVOD_HOSTNAME"]) == batch
        for training in trainings:
            training.step(tf.constant(float("nan") if bad else 1.0), tf.constant(float(hvd.rank())))
        return [training.facts() for training in trainings]

    variables = [variable for training in trainings for variable in training.variables]
    # a count of steps is compared, too
    variables += [
        one.value for made in trainings if made.optimizer is not None for one in made.optimizer.variables
    ]
    carry_out(task, folder, hvd, hvd.elastic.TensorFlowState(variables, batch=0), step)


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])), Path(sys.argv[2]))
