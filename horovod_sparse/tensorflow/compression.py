"""Values of `compression=`: every sparsifier, with its state, and Horovod's own choices."""

from __future__ import annotations

import dataclasses
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf
from horovod.tensorflow.compression import *  # noqa: F403

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.collectives import construction_errors
from horovod_sparse.tensorflow.state import CheckpointedState, StateKeeper, WithState
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer
from horovod_sparse.tensorflow.tensors import dtype_name
from horovod_sparse.training.compression import Algorithms, keep_selected
from horovod_sparse.training.settings import Settings


class SparseCompressor(WithState, hvd.compression.Compressor):
    """A sparsifier as `compression=` takes it: a recipe, with the residuals and states of its variables.

    Make it once, outside of the training loop and of `tf.function`, one for every tape or optimizer: a tape
    lives for one step, and residuals as long as the training. Stock Horovod's tapes and optimizers reduce
    gradients by it as ours do. A copy by pickle has the recipe alone.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._arguments: dict[str, Any] = {}
        #: the optimizer whose gradients it sparsifies; None for tapes
        self._optimizer: weakref.ref[Any] | None = None
        self._served = recipe
        self._num_compressed = 0
        self._keeper = self._horovod_sparse_keeper = StateKeeper()

    @property
    def synchronizer(self) -> GradientSynchronizer | None:
        """The synchronizer that `bind` made, or None."""
        return self._keeper.synchronizer

    def reserve_for(self, optimizer: Any = None, recipe: Recipe | None = None) -> None:
        """Reserves this compressor for `optimizer` (None: for tapes); raises if it serves another one.

        They would share residuals and steps.
        """
        known = None if self._optimizer is None else self._optimizer()
        if known is not optimizer and (optimizer is None or self.synchronizer is not None):
            raise ArgumentError(
                "compression",
                self,
                "a compressor of its own to every optimizer, and to tapes: this one is another's. What a "
                "tape has synchronized goes to a plain optimizer",
            )
        if optimizer is not None:
            self._optimizer, self._served = weakref.ref(optimizer), recipe or self.recipe

    def bind(
        self,
        settings: Settings | None = None,
        *,
        process_set: Any = None,
        average: bool = True,
        sparse_as_dense: bool = False,
        groups: Any = None,
        **options: Any,
    ) -> GradientSynchronizer:
        """Returns the synchronizer, made by the first call; raises if later calls pass other arguments."""
        settings = settings or Settings(**options)
        arguments = {
            "process_set": process_set or hvd.global_process_set,
            "average": average,
            "sparse_as_dense": sparse_as_dense,
            "groups": groups,
        }
        compared = {**arguments, **vars(settings)}
        comparable = {name: _comparable(value) for name, value in compared.items()}
        if self.synchronizer is None:
            self._keeper.attach(GradientSynchronizer(self._served, settings, **arguments))
            self._arguments = comparable
        for name, value in comparable.items():
            if self._arguments.get(name) != value:
                raise ArgumentError(
                    name,
                    compared[name],
                    "the value of its first use: a compressor, made once, serves one tape or optimizer",
                )
        synchronizer: GradientSynchronizer = self._keeper.synchronizer
        return synchronizer

    def checkpointed(self) -> CheckpointedState:
        """Returns this compressor's state for ``tf.train.Checkpoint(residuals=...)``."""
        return CheckpointedState(self._keeper)

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, None]:
        """Returns the tensor with 0 in place of the elements that are not selected; keeps no residual."""
        if dtype_name(tensor.dtype) is None:
            return tensor, None
        self._num_compressed += 1
        keep = partial(keep_selected, self.recipe, number=self._num_compressed)
        wide = tensor if tensor.dtype == tf.float64 else tf.cast(tensor, tf.float32)
        kept = tf.ensure_shape(tf.numpy_function(keep, [wide], wide.dtype), tensor.shape)
        return tf.cast(kept, tensor.dtype), None

    def decompress(self, tensor: tf.Tensor, ctx: None) -> tf.Tensor:
        return tensor

    def __repr__(self) -> str:
        return f"Compression.parse({self.recipe.describe()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (SparseCompressor, (self.recipe,))


def _comparable(value: Any) -> Any:
    """Returns a value that `==` can compare: of a list a tuple, of a variable or array its identity."""
    if isinstance(value, (list, tuple)):
        return tuple(_comparable(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)) or dataclasses.is_dataclass(value):
        return value
    return str(value) if isinstance(value, Path) else id(value)


class Compression(
    metaclass=Algorithms,
    make=SparseCompressor,
    publishing_errors=construction_errors.publishing_errors,
):
    """The values for the argument `compression=`; a superset of `horovod.tensorflow.Compression`.

    ``Compression.topk(density=0.01)``, and likewise for every algorithm: ``help(Compression.exdyna)``
    lists arguments. ``Compression.none`` and ``Compression.fp16`` are Horovod's own.

    Example:
        >>> Compression.parse("exdyna:density=0.001"), Compression.parse("none") is Compression.none
        (Compression.parse('exdyna:density=0.001'), True)
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16
