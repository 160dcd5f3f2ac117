"""A small model, data for it, and what training densely makes of it: for Keras 3 and for tf-keras alike."""

import horovod.tensorflow as stock
import numpy as np
import tensorflow as tf

keras = tf.keras
BATCH_SIZE = 5
NUM_SAMPLES = 32


def share(rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's samples: as many on every rank, and a last batch that is not full."""
    rng = np.random.default_rng(0)
    count = NUM_SAMPLES * max(3, size)
    images = rng.normal(size=(count, 8)).astype(np.float32)
    labels = rng.integers(0, 3, count)
    mine = slice(rank * NUM_SAMPLES, (rank + 1) * NUM_SAMPLES - 4)
    return images[mine], labels[mine]


def make_model(seed: int = 1):
    """With the same values everywhere, unless the ranks give different seeds."""
    rng = np.random.default_rng(seed)
    layers = [keras.layers.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    for variable in model.trainable_weights:
        variable.assign(rng.normal(size=variable.shape, scale=0.3))
    return model


def loss_of():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(model, optimizer, rank: int, size: int, *, epochs: int = 2, callbacks=(), **compile_arguments):
    """Trains the model with `fit`, in the samples' order; gives the history."""
    images, labels = share(rank, size)
    model.compile(optimizer, loss=loss_of(), **compile_arguments)
    return model.fit(
        images,
        labels,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


def flat(model) -> np.ndarray:
    return np.concatenate([np.asarray(variable).reshape(-1) for variable in model.get_weights()])


def trained_densely(optimizer, rank: int, size: int, *, epochs=2, op=stock.Average):
    """What `fit` must come to: a loop with Horovod's allreduce of every gradient, and a plain optimizer."""
    model, loss, (images, labels) = make_model(), loss_of(), share(rank, size)
    for _ in range(epochs):
        for start in range(0, len(labels), BATCH_SIZE):
            chosen = slice(start, start + BATCH_SIZE)
            with tf.GradientTape() as tape:
                value = loss(labels[chosen], model(images[chosen], training=True))
            gradients = tape.gradient(value, model.trainable_weights)
            gradients = [
                stock.allreduce(gradient, op=op, name=f"reference.{i}")
                for i, gradient in enumerate(gradients)
            ]
            optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
    return model
