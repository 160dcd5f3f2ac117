"""A sparsifier within stock Horovod's tapes and optimizers, which only know `compress` and `decompress`.

Horovod calls both once, when it traces, around an allreduce of its own, for one gradient after the other,
each within a `tf.cond`. The first call puts the synchronization of *all* gradients into the graph around
these; `decompress` gives their sums. Horovod gets one number per gradient to allreduce, and nothing asks for
the result.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovod_sparse.errors import UnsupportedError, warn_once
from horovod_sparse.feedback import Recipe
from horovod_sparse.tensorflow._horovod import is_elastic, takes_part
from horovod_sparse.tensorflow.collectives import not_folded
from horovod_sparse.tensorflow.graph import gate_callers
from horovod_sparse.tensorflow.private import STOCK, StockCall
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer
from horovod_sparse.tensorflow.tensors import dtype_name, settings_of, times
from horovod_sparse.training.compression import refuse_double_momentum

_log = logging.getLogger("horovod_sparse")


@dataclass(eq=False)
class _Slot:
    """Stands for the variable of a gradient, which is not always known; passes for it in a plan."""

    name: str
    shape: tuple[int, ...]
    dtype: tf.DType
    position: int
    variable: Any = None

    def ref(self) -> Any:
        return self


class DropIn:
    """Runs a `SparseCompressor` in stock Horovod's tapes and optimizers.

    Variables are known by identity. One whose gradient is None for once gets None; what the others in its
    bucket make the ranks send of its residual returns there. Gradients without elements or of an integer type
    stay dense. The learning rate is not known here.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.synchronizer: GradientSynchronizer | None = None
        self._slots: list[_Slot] = []
        #: of the call of Horovod's that is being traced: its frame, sums by the gradients' identity, and how
        #: many are not given back yet: a gradient may come twice
        self._frame: Any = None
        self._sums: dict[int, tf.Tensor] = {}
        self._num_left = 0
        if recipe.feedback.scale_residual:
            _log.warning(
                "scale_residual=True changes nothing in horovod.tensorflow's own tapes and optimizers: they "
                "do not tell the learning rate; use those of horovod_sparse.tensorflow"
            )

    def compress(self, tensor: tf.Tensor, call: StockCall) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Puts the synchronization into the graph, if it is the first gradient of its call; gives the sum."""
        # Horovod traces what it does with several ranks outside of them, too
        if not _is_sparsifiable(tensor) or not takes_part(call.process_set):
            return tensor, None
        if int(call.process_set.size()) == 1 and not is_elastic():
            warn_once(
                "with one rank horovod.tensorflow leaves gradients as they are: nothing is sparsified, and "
                "%s does not act. The tapes and optimizers of horovod_sparse do with one rank what they do "
                "with many",
                self.recipe.feedback,
            )
            return tensor, None
        if self._frame is not call.frame:
            self._frame, self._sums = call.frame, self._synchronized(call)
        sum_ = self._sums[id(tensor)]
        self._num_left -= 1
        if self._num_left == 0:
            self._frame, self._sums = None, {}  # the frame holds all tensors of the call
        # as a constant it would be allreduced when a graph is optimized, which other ranks may not do now
        return not_folded(tf.ones([1], tf.float64)), sum_

    def _synchronized(self, call: StockCall) -> dict[int, tf.Tensor]:
        if call.optimizer is not None:
            refuse_double_momentum(self.recipe, lambda: [settings_of(call.optimizer)])
            if getattr(call.optimizer, "_is_wrapped_by_loss_scale_optimizer", False):
                raise UnsupportedError(
                    "a LossScaleOptimizer (which mixed_float16 puts around an optimizer) around one of "
                    "horovod.tensorflow does not tell the scale, and an overflow would end training: use "
                    "horovod_sparse.tensorflow.keras.DistributedOptimizer"
                )
        synchronizer = self._synchronizer_for(call)
        given = [
            i
            for i, gradient in enumerate(call.gradients)
            if gradient is not None
            and not isinstance(gradient, tf.IndexedSlices)
            and _is_sparsifiable(gradient)
        ]
        self._num_left = len(given)
        positions = sorted({id(call.gradients[i]): i for i in reversed(given)}.values())
        slots: list[_Slot] = []
        for i in positions:
            slots.append(self._slot(call, i, slots))
        gradients = [call.gradients[i] for i in positions]
        # a branch of Horovod's tf.cond is being traced: the graph around it
        around: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        around = getattr(around, "outer_graph", None)
        with contextlib.nullcontext() if around is None else around.as_default():
            sums = synchronizer.synchronize(gradients, slots)
            if call.scale != 1.0:
                sums = [times(sum_, call.scale) for sum_ in sums]
        if around is not None:
            gate_callers(around)
        return {id(gradient): sum_ for gradient, sum_ in zip(gradients, sums, strict=True)}

    def _synchronizer_for(self, call: StockCall) -> GradientSynchronizer:
        theirs = call.process_set
        if self.synchronizer is None:
            self.synchronizer = GradientSynchronizer(
                self.recipe, process_set=theirs, average=call.averages, leaves_one_alone=True, check_every=0
            )
            self.synchronizer.engine.name, self.synchronizer.engine.given = STOCK, call.declared
        if self.synchronizer.process_set is not theirs:
            raise UnsupportedError(
                "one compressor serves one tape or optimizer; this one got two process sets"
            )
        return self.synchronizer

    def _slot(self, call: StockCall, position: int, taken: Sequence[_Slot]) -> _Slot:
        """Returns the slot of a gradient's variable, or of its position where the variable is not known."""
        gradient, variable = call.gradients[position], call.variable(position)
        like = tuple(gradient.shape), gradient.dtype
        free = [slot for slot in self._slots if slot not in taken]
        known = [slot for slot in free if variable is not None and slot.variable is variable]
        here = [slot for slot in free if slot.position == position]
        if not known:
            known = here if variable is None else [slot for slot in here if slot.variable is None]
        if not known:
            self._slots.append(_Slot(call.name(position), *like, position, variable))
            return self._slots[-1]
        slot = known[0]
        if (slot.shape, slot.dtype) != like:
            raise UnsupportedError(
                f"gradient {position} was that of {slot.name}, {slot.dtype.name} {slot.shape}, and now it is "
                f"that of {call.name(position)}, {like[1].name} {like[0]}: give every tape or optimizer a "
                "compressor of its own"
            )
        if slot.variable is None:
            slot.variable = variable
        return slot


def _is_sparsifiable(gradient: tf.Tensor) -> bool:
    return dtype_name(gradient.dtype) is not None and gradient.shape.num_elements() != 0
