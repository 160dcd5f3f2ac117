"""Trains a small CNN on real handwritten digits with `fit` and sparsified gradients.

horovodrun --gloo -np 2 python examples/tensorflow2_keras_mnist.py
mpirun -np 2 python examples/tensorflow2_keras_mnist.py --compression topk:density=0.01
horovodrun --gloo -np 2 python examples/tensorflow2_keras_mnist.py --compression none
"""

from __future__ import annotations

import time

import digits
import tensorflow as tf
import tensorflow2_common as common

import horovod_sparse.tensorflow.keras as hvd


class StepTimes(tf.keras.callbacks.Callback):
    """Measures the seconds of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.started = 0.0

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def main() -> None:
    """Trains; rank 0 prints the result."""
    args = common.arguments(
        __doc__, compression="best:density=0.05"
    )  # few steps: at 0.01 it ends a point below dense
    hvd.init()
    common.prepare(args.seed)
    train, test = digits.load()
    model = common.make_model()

    # the only lines that a sparsifier changes
    sgd = tf.keras.optimizers.SGD(args.learning_rate * hvd.size(), momentum=args.momentum)
    optimizer = hvd.DistributedOptimizer(sgd, compression=common.compression(args))

    model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    times = StepTimes()
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        times,
    ]
    steps = digits.steps_per_epoch(train, hvd.size(), args.batch_size)
    batches = common.endless_batches(train, hvd.rank(), hvd.size(), args.batch_size)
    started = time.perf_counter()
    history = model.fit(
        batches,
        steps_per_epoch=steps,
        epochs=args.epochs,
        shuffle=False,  # the batches are
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    common.report(
        args,
        model,
        test,
        final_loss=history.history["loss"][-1],
        seconds=time.perf_counter() - started,
        step_seconds=times.seconds,
        telemetry=getattr(optimizer, "telemetry", None),
    )


if __name__ == "__main__":
    main()
