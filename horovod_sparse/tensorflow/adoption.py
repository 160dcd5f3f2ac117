"""Adopts stock Horovod: its tapes and optimizers exchange by a sparsifier if `compression=` is one of ours.

Horovod's tape and its optimizers, of TensorFlow 1 and of tf-keras, get the function that reduces their
gradients from `horovod.tensorflow._make_allreduce_grads_fn`. This module wraps it, once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.arguments import Arguments
from horovod_sparse.tensorflow.compression import SparseCompressor


def reduced_once(
    reduce: Callable[[list[Any], list[Any]], list[Any]],
    gradients: Sequence[Any],
    variables: Sequence[Any],
) -> list[Any]:
    """Reduces one gradient a variable, also where a tape is asked for it twice (of layers that share it)."""
    first: dict[Any, int] = {}
    for i, variable in enumerate(variables):
        first.setdefault(variable.ref(), i)
    positions = first.values()
    reduced = reduce([gradients[i] for i in positions], [variables[i] for i in positions])
    found = dict(zip(first, reduced, strict=True))
    return [found[variable.ref()] for variable in variables]


class GradientReduction:
    """Reduces gradients in the place of Horovod's own function; Horovod takes it as `compression=`."""

    def __init__(self, synchronizer: Any) -> None:
        self.synchronizer = synchronizer

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Sequence[Any], vars: Sequence[Any], _generic_names: bool = False) -> list[Any]:
        return reduced_once(self.synchronizer.synchronize, grads, vars)


def _adopted(make: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(make)
    def make_reduction(*positional: Any, **named: Any) -> Any:
        given = signature.bind(*positional, **named).arguments
        compression = given["compression"]
        if isinstance(compression, SparseCompressor):
            compression.refuse_optimizer()
            return GradientReduction(Arguments(**given).checked().synchronizer())
        return compression if isinstance(compression, GradientReduction) else make(*positional, **named)

    return make_reduction


if not hasattr(hvd._make_allreduce_grads_fn, "__wrapped__"):  # doctests import this module a second time
    hvd._make_allreduce_grads_fn = _adopted(hvd._make_allreduce_grads_fn)
