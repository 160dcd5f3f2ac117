"""Optimizers of Keras 3 and tf-keras that reduce gradients, or exchange steps, before they apply them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.tensorflow._horovod import hvd, is_elastic, takes_part
from horovod_sparse.tensorflow.arguments import Arguments
from horovod_sparse.tensorflow.collectives import carry_out_agreement, label_of, ranks_of, reduce_densely
from horovod_sparse.tensorflow.graph import EagerCalls, is_synchronized, raise_if_unsupported_graph
from horovod_sparse.tensorflow.state import CheckpointedState, StateKeeper, WithState
from horovod_sparse.tensorflow.tensors import (
    as_dense,
    as_variable,
    create_variables,
    multiply,
    reduce_if_finite,
    variables_of,
)
from horovod_sparse.training.agreement import compare, declaration


def is_keras3(optimizer: Any) -> bool:
    """True for an optimizer of Keras 3, False for one of tf-keras."""
    return hasattr(optimizer, "stateless_apply")


def wrap(
    optimizer: Any,
    reducer: Any,
    accumulation: Accumulation | None,
    keeper: StateKeeper | None,
    name: str | None,
) -> Any:
    """Makes an optimizer synchronize before each update, by a subclass of its class; returns it."""
    if tf.keras.backend.backend() != "tensorflow":
        raise UnsupportedError(
            f"Keras runs on {tf.keras.backend.backend()}: set KERAS_BACKEND=tensorflow, or use "
            "horovod_sparse.torch with PyTorch"
        )
    is_scaler = hasattr(optimizer, "inner_optimizer")
    if is_scaler and accumulation is not None:
        raise UnsupportedError(
            "backward_passes_per_step above 1 cannot be combined with a LossScaleOptimizer, whose scale may "
            "change between passes: use gradient_accumulation_steps of the inner optimizer"
        )
    object.__setattr__(optimizer, "__class__", _distributed_class(type(optimizer), is_scaler))
    if name is not None:
        setattr(optimizer, "name" if is_keras3(optimizer) else "_name", name)
    optimizer._horovod_sparse_accumulation, optimizer._horovod_sparse_keeper = accumulation, keeper
    if keeper is not None:
        #: Keras and tf.train.Checkpoint save it; it is in no list of variables
        optimizer.horovod_sparse = SavedState(keeper)
        if not is_keras3(optimizer):  # legacy optimizers do not find it by themselves
            optimizer._track_trackable(optimizer.horovod_sparse, name="horovod_sparse", overwrite=True)
    optimizer._horovod_sparse_reducer = reducer
    if hasattr(reducer, "also_equal"):
        reference = weakref.ref(optimizer)
        reducer.also_equal = lambda: variables_of(own) if (own := reference()) is not None else []
    return optimizer


def _distributed_class(base: Any, is_scaler: bool) -> Any:
    class Distributed(WithState, base):
        """A subclass of the user's optimizer class that synchronizes by a reducer before each update."""

        _horovod_sparse_reducer: Any = None

        @classmethod
        def from_config(cls, config: dict[str, Any], **arguments: Any) -> Any:
            """Makes a plain optimizer of the user's class from settings: a copy is not distributed."""
            return vars(base).get("_horovod_sparse_base", base).from_config(config, **arguments)

        def __reduce__(self) -> Any:
            raise UnsupportedError(
                "a DistributedOptimizer cannot be copied or pickled: wrap a copy of the plain optimizer"
            )

        def __setattr__(self, name: str, value: Any) -> None:
            # a LossScaleOptimizer sets these of the optimizer that it is made around
            around = name in ("loss_scale_factor", "_is_wrapped_by_loss_scale_optimizer")
            if around and self._horovod_sparse_reducer is not None:
                raise UnsupportedError(
                    "a LossScaleOptimizer around a DistributedOptimizer lets every rank decide alone whether "
                    "to skip a step, and the others would wait for ever. Wrap the other way round: "
                    "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), ...); with "
                    "mixed_float16, Keras wraps an optimizer itself, unless it is a LossScaleOptimizer"
                )
            super().__setattr__(name, value)

        if is_keras3(base):

            def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
                apply = super().apply
                if self._horovod_sparse_reducer is None or not len(grads):
                    return apply(grads, trainable_variables)
                if trainable_variables is None:
                    if not self.built:
                        return apply(grads, None)  # raises: the optimizer is not built
                    trainable_variables = self._trainable_variables
                variables = list(trainable_variables)
                if len(grads) != len(variables):  # Keras would drop the surplus on this rank alone
                    raise ArgumentError(
                        "grads", f"{len(grads)} gradients", f"{len(variables)}, one a variable"
                    )
                return self._reduce_and_apply(apply, grads, variables)

        else:

            def apply_gradients(self, grads_and_vars: Any, *more: Any, **named: Any) -> Any:
                pairs, apply = list(grads_and_vars), super().apply_gradients
                if self._horovod_sparse_reducer is None or not pairs:
                    return apply(pairs, *more, **named)

                def apply_pairs(gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
                    return apply(list(zip(gradients, variables, strict=True)), *more, **named)

                return self._reduce_and_apply(apply_pairs, *map(list, zip(*pairs, strict=True)))

        @tf.autograph.experimental.do_not_convert
        def _reduce_and_apply(
            self, apply: Callable[..., Any], grads: Sequence[Any], variables: Sequence[Any]
        ) -> Any:
            reducer: Any = self._horovod_sparse_reducer
            if any(map(is_synchronized, grads)):
                raise UnsupportedError(
                    "these gradients were synchronized already, by a DistributedGradientTape: give those of "
                    "a plain tf.GradientTape, or give these to a plain optimizer"
                )
            with tf.init_scope():
                create_variables(self, variables)
            if is_scaler:
                # gradients have been unscaled under tf-keras, and have not been under Keras 3
                scale = (self.dynamic_scale.value, True) if is_keras3(self) else (1.0, self.dynamic)
                return apply(reduce_if_finite(reducer, grads, variables, *scale), variables)

            def synchronize_and_apply(gradients: Sequence[Any]) -> Any:
                sums, skipped = reducer.synchronize_or_skip(gradients, variables)
                if skipped is None:
                    return apply(sums, variables)
                return tf.cond(skipped, lambda: False, lambda: [apply(sums, variables), True][1])

            accumulation = self._horovod_sparse_accumulation
            if accumulation is None:
                return synchronize_and_apply(grads)

            def count_pass() -> None:
                self.iterations.assign_add(1)  # as Horovod does: schedules count passes

            return accumulation.add(grads, variables, synchronize_and_apply, count_pass)

    Distributed.__name__, Distributed.__qualname__ = base.__name__, base.__qualname__
    Distributed.__module__, Distributed.__doc__ = base.__module__, base.__doc__
    return Distributed


_KEY = "state"

#: the class by which Keras 3 finds attributes to save; Keras does not export it, and tf-keras has none
_Saveable: Any = next(
    (cls for cls in tf.keras.optimizers.Optimizer.__mro__ if cls.__name__ == "KerasSaveable"), object
)


class SavedState(CheckpointedState, _Saveable):
    """Lets Keras save residuals with an optimizer, though they are not among its variables."""

    def _obj_type(self) -> str:
        """Called by Keras; returns a type that Keras knows, of which it expects no further methods."""
        return "Loss"

    def save_own_variables(self, store: Any) -> None:
        store[_KEY] = np.frombuffer(self.serialize(), np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras: loads residuals and states; resets them if the file, a dense run's, has none."""
        if _KEY in store.keys():  # noqa: SIM118 (Keras' stores are no mappings)
            self.deserialize(np.asarray(store[_KEY]).tobytes())
        else:
            self._keeper.load_state_dict(None)


class Accumulation:
    """Adds up the gradients of `passes` backward passes, and applies their sum in the last of these."""

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool) -> None:
        self.passes, self._average, self._sparse_as_dense = passes, average, sparse_as_dense
        self._sums: dict[Any, tf.Variable] = {}
        self._count: tf.Variable | None = None

    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[list[Any]], Any],
        skip: Callable[[], Any],
    ) -> None:
        if not self._sparse_as_dense and any(isinstance(one, tf.IndexedSlices) for one in gradients):
            raise UnsupportedError(
                "backward_passes_per_step above 1 cannot add up tf.IndexedSlices: give sparse_as_dense=True"
            )
        own = [as_variable(variable) for variable in variables]
        with tf.init_scope():
            if self._count is None:
                self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
            for gradient, one in zip(gradients, own, strict=True):
                if gradient is not None and one.ref() not in self._sums:
                    zeros = tf.zeros(one.shape, gradient.dtype)
                    self._sums[one.ref()] = tf.Variable(zeros, trainable=False)
        # a variable without a gradient in this pass has the sum of the passes before
        count, sums = self._count, [self._sums.get(one.ref()) for one in own]
        for sum_, gradient in zip(sums, gradients, strict=True):
            if sum_ is not None and gradient is not None:
                sum_.assign_add(tf.convert_to_tensor(gradient))
        count.assign_add(1)

        def apply_sums() -> None:
            factor = 1.0 / self.passes if self._average else 1.0
            totals = [None if sum_ is None else multiply(sum_.read_value(), factor) for sum_ in sums]
            # sums are cleared before the step, so that an error in it leaves none for the next one
            with tf.control_dependencies([total for total in totals if total is not None]):
                done = [sum_.assign(tf.zeros_like(sum_)) for sum_ in sums if sum_ is not None]
                done.append(count.assign(0))
            with tf.control_dependencies([] if tf.executing_eagerly() else done):
                totals = [None if total is None else tf.identity(total) for total in totals]
            apply(totals)

        tf.cond(tf.equal(count, self.passes), apply_sums, skip)


class DenseReducer:
    """Sums or averages whole gradients over ranks, by Horovod's allreduce."""

    def __init__(self, arguments: Arguments) -> None:
        self.process_set, self._sparse_as_dense = arguments.process_set, arguments.sparse_as_dense
        factor = arguments.gradient_predivide_factor  # 1 but for averages
        self._average = arguments.op == hvd.Average
        self._options = {
            "compression": arguments.compression,
            "device_dense": arguments.device_dense,
            "prescale_factor": 1.0 / factor,
            "postscale_factor": factor,
        }
        self._declared = {"process_set": ranks_of(self.process_set), **arguments.declared()}
        self._name = ""
        self._eagerly = EagerCalls(self._allreduce_all)

    @property
    def is_needed(self) -> bool:
        return takes_part(self.process_set) and (is_elastic() or self.process_set.size() > 1)

    def synchronize_or_skip(
        self, gradients: Sequence[Any], variables: Sequence[Any], *, scaled: bool = False
    ) -> tuple[list[Any], None]:
        """Returns the gradients averaged or summed over ranks; NaN on one rank becomes NaN on all."""
        raise_if_unsupported_graph()
        if not self.is_needed:
            return list(gradients), None
        variables = [as_variable(variable) for variable in variables]
        if not self._name:
            told = declaration(self._options["compression"], "horovod.tensorflow", **self._declared)
            carry_out_agreement(compare(told), self.process_set)
            self._name = label_of("horovod_sparse.dense", self.process_set, variables)
        given = [as_dense(gradient) for gradient in gradients] if self._sparse_as_dense else list(gradients)
        build = self._eagerly if tf.executing_eagerly() else self._allreduce_all
        return build(given, variables), None

    def _allreduce_all(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        given = self.process_set, self._average
        return [
            None if one is None else reduce_densely(one, f"{self._name}.{i}", *given, **self._options)
            for i, one in enumerate(gradients)
        ]
