"""A rank of a job in TensorFlow whose last rank hangs, or cannot begin: ``tf_worker.py MODE FOLDER``.

MODE is a way to train, and what happens: ``fit-asleep``. What is raised on the others is written down.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("HOROVOD_SPARSE_TENSOR_SELECTION", "all")

import horovod.tensorflow as stock
import keras
import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from horovod_sparse.tensorflow import waiting
from horovod_sparse.tensorflow.keras import DistributedOptimizer
from support.jobs import Diary, until_told

#: the deadline is more than ranks may be apart when their graphs are traced on a busy machine
STEPS, FAULT_STEP, DEADLINE_SECONDS = 8, 4, 8.0
DENSITY = "topk:density=0.1"


class Training:
    def __init__(self, way: str, how: str, folder: Path) -> None:
        self.way, self.how, self.folder = way, how, folder
        self.rank, is_last = hvd.rank(), hvd.rank() == hvd.size() - 1
        self.text = "topk:densty=0.1" if how == "misspelt" and is_last else DENSITY
        if how == "variable" and is_last:
            os.environ["HOROVOD_SPARSE_TRANSPORT"] = "mpi"
        self.variables = [tf.Variable(tf.ones([300])), tf.Variable(tf.ones([40, 30]))]
        self.begun = time.perf_counter()

    def note(self, **facts: object) -> None:
        Diary(self.folder).note(f"{self.way}-{self.how}", rank=self.rank, **facts)  # Horovod may have ended

    def before(self, step: int) -> None:
        self.begun = time.perf_counter()
        self.note(step=step)
        if step == FAULT_STEP and hvd.rank() == hvd.size() - 1 and self.how in ("stopped", "asleep"):
            if self.how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            until_told(self.folder, "error")
            time.sleep(1.0)  # the others have ended

    def step(self) -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable * variable) for variable in self.variables])
        if self.way == "stock":
            tape = stock.DistributedGradientTape(tape, compression=self.compression)
        else:
            tape = hvd.DistributedGradientTape(
                tape, compression=self.compression, deadline_seconds=DEADLINE_SECONDS
            )
        for variable, gradient in zip(self.variables, tape.gradient(loss, self.variables), strict=True):
            variable.assign_sub(0.1 * gradient)

    def fit(self) -> None:
        sgd = keras.optimizers.SGD(0.01)
        if self.way == "mixed":
            keras.mixed_precision.set_global_policy("mixed_float16")
            sgd = keras.optimizers.LossScaleOptimizer(sgd)
        layers = [keras.layers.Input((20,)), keras.layers.Dense(30), keras.layers.Dense(1, dtype="float32")]
        model = keras.Sequential(layers)
        model.compile(
            DistributedOptimizer(sgd, compression=self.text, deadline_seconds=DEADLINE_SECONDS), "mse"
        )
        before = self.before

        class Hang(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
                before(batch)

        data = np.ones((STEPS * 4, 20), np.float32), np.ones((STEPS * 4, 1), np.float32)
        model.fit(*data, batch_size=4, verbose=0, shuffle=False, callbacks=[Hang()])

    def run(self) -> None:
        if self.way in ("fit", "mixed"):
            self.fit()
            return
        self.compression = hvd.Compression.parse(self.text)
        step = self.step if self.way == "eager" else tf.function(self.step)
        for number in range(STEPS):
            self.before(number)
            step()


def main(mode: str, folder: Path) -> None:
    way, _, how = mode.partition("-")
    if way == "stock":  # which has no argument for it
        os.environ["HOROVOD_SPARSE_DEADLINE_SECONDS"] = str(DEADLINE_SECONDS)
    waiting.ENDS_SECONDS = 3.0
    keras.utils.set_random_seed(0)  # ranks that begin apart are found out
    hvd.init()
    training = Training(way, how, folder)
    try:
        training.run()
    except Exception as error:
        waited = time.perf_counter() - training.begun
        training.note(error=type(error).__name__, message=str(error), waited=waited)
        if how in ("misspelt", "variable"):
            until_told(folder, "error")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
