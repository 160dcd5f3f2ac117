"""One rank of `scripts/bench train` with TensorFlow: whole iterations of a model, dense and sparsified.

A graph's forward and backward are one to Python, so an iteration has no parts here but the waiting for
collectives. Barriers between iterations are those of `common.ranks`, and so Horovod's for PyTorch, which
shares the process with that for TensorFlow.
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from benchmarks.common import ranks
from benchmarks.common.wire import Round, rounds_of
from horovod_sparse.merging import min_elements

_NUM_WORDS = 5000


def make_model(name: str, batch: int) -> tuple[Any, Any, Any]:
    """A Keras model as `models` has it for PyTorch, and a batch of random samples and labels.

    Args:
        name: "mlp", "cnn" or "lstm".
        batch: samples for each rank.
    """
    layers, generator = tf.keras.layers, tf.random.Generator.from_seed(1 + hvd.rank())
    if name == "mlp":
        stack = [layers.Dense(2048, "relu"), layers.Dense(2048, "relu"), layers.Dense(10)]
        samples, num_classes = generator.normal([batch, 1024]), 10
    elif name == "cnn":
        widths = (64, 128, 256, 512)
        stages = [layers.Conv2D(width, 3, 2, "same", activation="relu") for width in widths]
        second = [layers.Conv2D(width, 3, 1, "same", activation="relu") for width in widths]
        between = [layer for pair in zip(stages, second, strict=True) for layer in pair]
        first = layers.Conv2D(32, 3, padding="same")
        stack = [first, *between, layers.GlobalAveragePooling2D(), layers.Dense(10)]
        samples, num_classes = generator.normal([batch, 32, 32, 3]), 10
    else:
        recurrent = [layers.LSTM(384, return_sequences=True), layers.LSTM(384)]
        stack = [layers.Embedding(_NUM_WORDS, 256), *recurrent, layers.Dense(_NUM_WORDS)]
        samples = generator.uniform([batch, 16], maxval=_NUM_WORDS, dtype=tf.int32)
        num_classes = _NUM_WORDS
    model = tf.keras.Sequential(stack)
    model(samples)
    return model, samples, generator.uniform([batch], maxval=num_classes, dtype=tf.int32)


class Training:
    """A model, its tape, and one way of synchronizing: a method, as `measure_methods` takes it.

    Args:
        name: in results.
        settings: of the measurement.
    """

    num_warmup = 3

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        model, samples, labels = make_model(settings["model"], settings["batch"])
        weights = [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables]
        hvd.broadcast_variables(weights, root_rank=0)
        self.num_elements = int(sum(weight.shape.num_elements() for weight in weights))
        text = {"dense": "none", "dense float16": "fp16"}.get(name) or settings["sparsifiers"][name]
        self._compression = hvd.Compression.parse(text)
        options = dict(settings["options"]) if name in settings["sparsifiers"] else {}
        if options and settings["min_elements"] is not None:
            options["tensor_selection"] = min_elements(settings["min_elements"])
        optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)
        loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(samples, training=True))
            # an embedding's gradient is in slices, which would be gathered as they are
            tape = hvd.DistributedGradientTape(
                tape, compression=self._compression, sparse_as_dense=True, **options
            )
            gradients = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        self._step = step
        self._bytes_per_element = 2 if name == "dense float16" else 4
        self.parts: dict[str, float] = {}

    def prepare(self) -> None:
        """Nothing: everything belongs to an iteration."""

    def run(self) -> None:
        """One iteration."""
        self._step()
        last = self._last()
        self.parts = {"exchange": 0.0 if last is None else last.wait_seconds}

    def rounds(self) -> list[Round]:
        """The collectives of the last iteration, as one of each kind."""
        if self._last() is None:
            return [Round("AllReduce", self._bytes_per_element * self.num_elements)]
        totals: dict[str, int] = {}
        for part in self._compression.synchronizer.sparse:
            for item in rounds_of(part):
                totals[item.kind] = totals.get(item.kind, 0) + item.payload
        return [Round(kind, payload) for kind, payload in totals.items()]

    def facts(self) -> dict[str, float]:
        """Densities, and seconds of what a sparsifier does while backward runs."""
        last = self._last()
        if last is None:
            return {"density_selected": 1.0, "density_union": 1.0}
        names = ("density_selected", "density_union", "fold_seconds", "select_seconds", "apply_seconds")
        return {name: getattr(last, name) for name in names}

    def _last(self) -> Any:
        telemetry = getattr(self._compression, "telemetry", None)
        return None if telemetry is None else telemetry.last


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Every way of synchronizing in turn."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    methods = [Training(name, settings) for name in settings["methods"]]
    own = ranks.own_traffic(5)
    results = ranks.results_of(methods, settings["repeat"], own)
    hvd.shutdown()
    return {"horovod_own": own, "elements": methods[0].num_elements, "results": results}


if __name__ == "__main__":
    sys.exit(ranks.main(measure))
