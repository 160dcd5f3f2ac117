"""TensorFlow: tapes of ours and of Horovod's, eagerly and in graphs, and Keras (3 or 2)."""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import horovod.tensorflow as stock
import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from conformance.engine import RATE, SHAPES, Engine
from horovod_sparse.feedback import Recipe

__all__ = ["KERAS", "TAPES"]

IS_KERAS_2 = not hasattr(tf.keras, "version")


class TapeTraining:
    """Descent by a tape: ours in buckets of at most 680 bytes, or Horovod's with our compressor."""

    def __init__(
        self,
        compression: str | Recipe,
        shapes: Mapping[str, Any] = SHAPES,
        *,
        wrap: Callable[..., Any],
        graph: bool,
        dtype: str = "float32",
        members: Any = None,
        absent: bool = False,
        asks_for_all: bool = True,
        **options: Any,
    ) -> None:
        self._asks_for_all = asks_for_all
        self.variables = {name: self._variable(name, shape, dtype) for name, shape in shapes.items()}
        self.compression = (
            hvd.Compression.parse(compression)
            if isinstance(compression, str)
            else hvd.SparseCompressor(compression)
        )
        self.keeper = self.compression
        self._wrap, self._graph = wrap, graph
        self._dtype = tf.as_dtype(dtype).as_numpy_dtype
        self._options = self._given(options)
        if members is not None:
            self._options["process_set"] = members
        self._functions: dict[Any, Any] = {}

    @staticmethod
    def _variable(name: str, shape: Any, dtype: str) -> Any:
        return tf.Variable(tf.ones(shape, dtype), name=name)

    def _given(self, options: dict[str, Any]) -> dict[str, Any]:
        has_plans = {"merging", "groups", "tensor_selection"} & set(options)
        if self._wrap is stock.DistributedGradientTape or has_plans:
            return options
        return {"bucket_bytes": 680, **options}

    @property
    def synchronizer(self) -> Any:
        return self.compression.synchronizer

    @property
    def telemetry(self) -> Any:
        return self.compression.telemetry

    @property
    def parts(self) -> Any:
        return self.synchronizer.sparse

    def steps(self) -> set[int]:
        return {part.bucket.state.step for part in self.parts}

    def _descend(self, given: Mapping[str, tf.Tensor]) -> None:
        with tf.GradientTape() as tape:
            products = [
                tf.cast(tf.reduce_sum(self.variables[name] * given[name]), tf.float64) for name in given
            ]
            loss = tf.add_n(products)
        tape = self._wrap(tape, compression=self.compression, **self._options)
        variables = [one for name, one in self.variables.items() if self._asks_for_all or name in given]
        gradients = tape.gradient(loss, variables)
        if self._options.get("on_nonfinite") == "skip":
            tf.cond(tape.skipped, lambda: None, lambda: self._apply(variables, gradients))
        else:
            self._apply(variables, gradients)

    @staticmethod
    def _apply(variables: Any, gradients: Any) -> None:
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is not None:
                variable.assign_sub(tf.cast(RATE, gradient.dtype) * gradient)

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        given = {
            name: tf.constant(np.asarray(values).astype(self._dtype)) for name, values in gradients.items()
        }
        function = self._functions.setdefault(
            frozenset(given), tf.function(self._descend, autograph=False) if self._graph else self._descend
        )
        try:
            function(given)
        except tf.errors.OpError as error:
            raise self.synchronizer.last_error or error from None

    def weights(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(one).astype(np.float64) for name, one in self.variables.items()}

    def held(self) -> dict[str, np.ndarray]:
        return {name: np.array(values, np.float64) for name, values in self._state()["residuals"].items()}

    def change(self, name: str) -> None:
        one = self.variables[name]
        one.assign(np.asarray(one) + np.float32(1e-3))

    def _state(self) -> dict[str, Any]:
        return self.compression.state_dict()

    def saved(self) -> Any:
        return copy.deepcopy(({name: np.array(one) for name, one in self.variables.items()}, self._state()))

    def load(self, saved: Any) -> None:
        for name, values in saved[0].items():
            self.variables[name].assign(values)
        self.load_state(saved)

    def load_state(self, saved: Any) -> None:
        self.compression.load_state_dict(saved[1])


class KerasTraining(TapeTraining):
    """`horovod_sparse.tensorflow.keras.DistributedOptimizer` in a graph."""

    def __init__(self, compression: str | Recipe, shapes: Mapping[str, Any] = SHAPES, **options: Any) -> None:
        super().__init__(compression, shapes, wrap=hvd.DistributedGradientTape, graph=True, **options)
        self.optimizer = hvd_keras.DistributedOptimizer(
            tf.keras.optimizers.SGD(RATE), compression=self.compression, **self._options
        )
        self.optimizer.build(list(self.variables.values()))

    @staticmethod
    def _variable(name: str, shape: Any, dtype: str) -> Any:
        if IS_KERAS_2:
            return TapeTraining._variable(name, shape, dtype)
        return tf.keras.Variable(np.ones(shape), dtype=dtype, name=name)

    def _descend(self, given: Mapping[str, tf.Tensor]) -> None:
        variables = list(self.variables.values())
        gradients = [given[name] for name in self.variables]
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        super().step({name: gradients[name] for name in self.variables})

    def _state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state(self, saved: Any) -> None:
        self.optimizer.load_state_dict(saved[1])


def measured(text: str) -> Any:
    variables = [tf.Variable(tf.ones(shape), name=name) for name, shape in SHAPES.items()]

    def loss() -> Any:
        return tf.add_n([tf.reduce_sum(variable**2) for variable in variables])

    return hvd.measured_profile(loss, variables, hvd.Compression.parse(text), num_steps=2)


def _engine(name: str, train: Any, *has: str, share: float = 1.0, **cases: tuple[str, ...]) -> Engine:
    features = frozenset({"buckets", "models", *has})
    of_horovod = hvd.rank(), hvd.size(), hvd.allgather_object
    return Engine(name, train, features, *of_horovod, share, measured=measured, **cases)


def _tape(wrap: Any, graph: bool, **more: Any) -> Any:
    return functools.partial(TapeTraining, wrap=wrap, graph=graph, **more)


OWN, STOCK, SHARED = (
    hvd.DistributedGradientTape,
    stock.DistributedGradientTape,
    ("members", "types", "horovod"),
)
ALL = (*SHARED, "absent", "saved", "levels", "nonfinite", "drift", "plans", "merging")
TAPES = [
    _engine("graph", _tape(OWN, True), *ALL, share=0.45),
    _engine("eager", _tape(OWN, False), *ALL, share=0.0),
    _engine("some", _tape(OWN, True, asks_for_all=False), "levels", "absent", only=("test_what_waits_for",)),
    _engine("stock", _tape(STOCK, True), *SHARED, "saved", share=0.15),
]
KERAS_HAS = ("members", "saved", "nonfinite", "drift", *(() if IS_KERAS_2 else ("levels",)))
KERAS = [_engine("keras", KerasTraining, *KERAS_HAS, share=0.2)]
