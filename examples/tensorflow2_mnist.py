"""Trains a small CNN on real handwritten digits in a loop of its own, with a tape and sparsified gradients.

horovodrun --gloo -np 2 python examples/tensorflow2_mnist.py --compression exdyna --density 0.01
mpirun -np 2 python examples/tensorflow2_mnist.py --compression topk:density=0.01
horovodrun --gloo -np 2 python examples/tensorflow2_mnist.py --compression none
"""

from __future__ import annotations

import time

import digits
import horovod.tensorflow as stock
import tensorflow as tf
import tensorflow2_common as common
from rich.progress import track

import horovod_sparse.tensorflow as hvd


def main() -> None:
    """Trains; rank 0 prints the result."""
    args = common.arguments(__doc__, has_stock=True)
    hvd.init()
    common.prepare(args.seed)
    train, test = digits.load()
    model = common.make_model()
    cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.SGD(args.learning_rate * hvd.size(), momentum=args.momentum)
    optimizer.build(model.trainable_variables)
    # variables of Keras 3 hold one of TensorFlow
    weights = [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables]
    hvd.broadcast_variables(weights, root_rank=0)

    # keeps the residuals: made once, a tape lives for one step
    compression = common.compression(args)
    make_tape = stock.DistributedGradientTape if args.stock else hvd.DistributedGradientTape

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as local:
            loss = cross_entropy(labels, model(images, training=True))
        tape = make_tape(local, compression=compression)
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    started, step_seconds = time.perf_counter(), []
    for epoch in track(range(args.epochs), description=args.compression, disable=hvd.rank() != 0):
        for images, labels in digits.batches(train, hvd.rank(), hvd.size(), args.batch_size, epoch):
            step_started = time.perf_counter()
            loss = step(tf.constant(images[..., None]), tf.constant(labels))
            step_seconds.append(time.perf_counter() - step_started)
    common.report(
        args,
        model,
        test,
        final_loss=float(loss),
        seconds=time.perf_counter() - started,
        step_seconds=step_seconds,
        telemetry=getattr(compression, "telemetry", None),
    )


if __name__ == "__main__":
    main()
