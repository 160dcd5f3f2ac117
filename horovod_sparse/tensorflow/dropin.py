"""A sparsifier within stock Horovod's tapes and optimizers, which only know `compress` and `decompress`.

Horovod calls both once, when it traces, around an allreduce of its own, for one gradient after the
other, each within a `tf.cond`. The first call puts the synchronization of *all* gradients into the graph,
merged into buckets; Horovod gets one number per gradient, 1, to allreduce. What becomes of the first one,
divided by the number of ranks, is the scale of the sums: so Average, Sum and gradient_predivide_factor
act as on dense gradients. Nothing in a graph asks for the others, so they are not sent. An error is raised
in that first part of the graph, on which all others depend: then no gradient is given to the optimizer, and
nothing that comes later in the graph is done. Eagerly, which is only where TensorFlow is told to run
functions so, the first call synchronizes at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.tensorflow._horovod import is_elastic, takes_part
from horovod_sparse.tensorflow.collectives import not_folded
from horovod_sparse.tensorflow.graph import HOST, refuse_graphs
from horovod_sparse.tensorflow.order import gate_callers
from horovod_sparse.tensorflow.parts import Part, SparseBucket
from horovod_sparse.tensorflow.private import STOCK, StockCall, result_of_branch, stock_call
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer
from horovod_sparse.tensorflow.tensors import as_rate, dtype_name, numpy_dtype, settings_of
from horovod_sparse.training.momentum import refuse_double_momentum

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


@dataclass(eq=False)
class _OnHost:
    """What the host functions of a call of Horovod's work on: neither tensors nor frames."""

    parts: Sequence[Part]
    #: names of the variables that send zeros, and whose sums Horovod does not ask for
    absent: frozenset[str]
    #: whether the sums are asked for a second time, in another graph; until then they are kept here
    fetched: bool = False
    arrays: list[np.ndarray] = field(default_factory=list)


@dataclass(eq=False)
class _Gathering:
    """The gradients of one call of Horovod's, in one trace."""

    frame: Any
    #: positions of the gradients that are not given back yet
    waiting: set[int]
    host: _OnHost
    #: of the sums, among the gradients
    positions: list[int]
    #: of their ends; none eagerly, where they have ended
    tokens: list[tf.Tensor] = field(default_factory=list)
    #: in which all are synchronized, a branch of the first gradient's `tf.cond`; and in which that stands
    graph: Any = None
    outer: Any = None
    #: by position, in `graph`; and the same in `outer`
    sums: dict[int, tf.Tensor] | None = None
    fetched: dict[int, tf.Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Pending:
    """A gradient between `compress` and `decompress`, in the graph."""

    gathering: _Gathering
    position: int
    like: tuple[tf.DType, Any]


class DropIn:
    """What a `SparseCompressor` does in stock Horovod's tapes and optimizers.

    A variable whose gradient is None for once, which it is on all ranks then, gets None, as Horovod has it;
    what the others in its bucket make the ranks send of its residual returns there. Variables are known by
    identity: they may come in another order, or be frozen.

    Gradients without elements or of an integer type stay dense. The learning rate is not known here, so
    a residual cannot follow its changes (`scale_residual`, of which a word is logged).
    """

    def __init__(self, recipe: Recipe, process_set: Any) -> None:
        recipe.refuse_auto("Horovod's own tape or optimizer")
        self.recipe, self.process_set = recipe, process_set
        self.synchronizer: GradientSynchronizer | None = None
        self._slots: list[_Slot] = []
        self._gathering: _Gathering | None = None
        if getattr(recipe.feedback, "scale_residual", False):
            _log.warning(
                "scale_residual=True changes nothing in horovod.tensorflow's own tapes and optimizers: they "
                "do not tell the learning rate; use those of horovod_sparse.tensorflow"
            )
        self._has_warned = False

    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Pending | None]:
        """Puts the synchronization into the graph, if this is the first gradient of its call."""
        refuse_graphs()
        call = stock_call(tensor)
        # Horovod traces what it does with several ranks outside of them, too
        if not _is_sparsifiable(tensor) or not takes_part(call.process_set):
            return tensor, None
        if self._gathering is None or self._gathering.frame is not call.frame:
            self._gathering = self._gathered(call)
        pending = Pending(self._gathering, call.position, (tensor.dtype, tensor.shape))
        # as a constant it would be allreduced when a graph is optimized, which other ranks may not do now
        return not_folded(tf.ones([1], tf.float64)), pending

    def decompress(self, tensor: tf.Tensor, pending: Pending) -> tf.Tensor:
        """The synchronized gradient, when those of all variables have ended well."""
        gathering, (dtype, shape) = pending.gathering, pending.like
        gathering.waiting.discard(pending.position)
        if not gathering.waiting:
            self._gathering = None  # its frame holds all tensors of the call
        if not gathering.tokens:
            assert gathering.sums is not None  # compress() has waited for them
            return gathering.sums.pop(pending.position) * tf.cast(tensor[0], dtype)
        with tf.device(HOST):
            if gathering.sums is None:
                gathering.sums = self._settled(gathering, tensor)
            sums = gathering.sums
            if tf.compat.v1.get_default_graph() is not gathering.graph:
                # the first gradient's tf.cond has been closed since
                if gathering.fetched is None:
                    with gathering.outer.as_default():
                        gathering.fetched = self._fetched(gathering)
                sums = gathering.fetched
            result = tf.identity(sums[pending.position])
        result.set_shape(shape)
        if not gathering.waiting:
            gate_callers(tf.compat.v1.get_default_graph())
        return result

    def _settled(self, gathering: _Gathering, ones: tf.Tensor) -> dict[int, tf.Tensor]:
        """The sums by position, in the graph of the synchronization."""
        synchronizer, host = self.synchronizer, gathering.host
        assert synchronizer is not None  # compress() has made it

        def finish(factor: np.ndarray, *_tokens: np.ndarray) -> list[np.ndarray]:
            sums = synchronizer.finish(host.parts, float(factor[0]) / synchronizer.size)
            _take_back(host.parts, host.absent)
            host.arrays = sums if host.fetched else []
            return sums

        sums = synchronizer.host.run(finish, [ones, *gathering.tokens], _types(host.parts))
        synchronizer.watch.disarm(sums[0])
        return dict(zip(gathering.positions, sums, strict=True))

    def _fetched(self, gathering: _Gathering) -> dict[int, tf.Tensor]:
        """The sums by position, in the graph around that of the synchronization."""
        synchronizer, host = self.synchronizer, gathering.host
        assert synchronizer is not None
        host.fetched = True

        def fetch(_done: np.ndarray) -> list[np.ndarray]:
            arrays, host.arrays = host.arrays, []
            # with one rank Horovod goes the other way
            return arrays or [
                np.zeros(shape, numpy_dtype(part.dtype)) for part in host.parts for shape in part.shapes
            ]

        settled = result_of_branch(gathering.graph, gathering.outer)
        sums = synchronizer.host.run(fetch, [settled], _types(host.parts))
        return dict(zip(gathering.positions, sums, strict=True))

    def _gathered(self, call: StockCall) -> _Gathering:
        """The synchronization of all gradients of a call."""
        if call.optimizer is not None:
            refuse_double_momentum(self.recipe, lambda: [settings_of(call.optimizer)])
            if getattr(call.optimizer, "_is_wrapped_by_loss_scale_optimizer", False):
                raise UnsupportedError(
                    "a LossScaleOptimizer (which mixed_float16 puts around an optimizer) around one of "
                    "horovod.tensorflow does not tell the scale, and an overflow would end training: use "
                    "horovod_sparse.tensorflow.keras.DistributedOptimizer"
                )
        synchronizer = self._synchronizer_for(call.process_set)
        synchronizer.engine.name, synchronizer.engine.given = STOCK, call.declared
        if synchronizer.size == 1 and not is_elastic() and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "with one rank horovod.tensorflow leaves gradients as they are: nothing is sparsified, and "
                "%s does not act. The tapes and optimizers of horovod_sparse do with one rank what they do "
                "with many",
                self.recipe.feedback,
            )
        positions = [
            i
            for i, gradient in enumerate(call.gradients)
            if gradient is not None
            and not isinstance(gradient, tf.IndexedSlices)
            and _is_sparsifiable(gradient)
        ]
        slots: list[_Slot] = []
        for i in positions:
            slots.append(self._slot(call, i, slots))
        absent = self._absent(slots)
        gradients = [*(call.gradients[i] for i in positions), *(None for _ in absent)]
        slots, every = [*slots, *absent], [*positions, *(-1 - i for i in range(len(absent)))]
        names = frozenset(str(synchronizer.name_of(slot)) for slot in absent)
        if tf.executing_eagerly():
            sums = synchronizer.synchronize(gradients, slots)
            _take_back(synchronizer.beside(absent), names)
            gathering = _Gathering(call.frame, set(positions), _OnHost([], names), positions)
            gathering.sums = dict(zip(every, sums, strict=True))
            return gathering
        started = synchronizer.start(gradients, slots, as_rate(None))
        graph = tf.compat.v1.get_default_graph()
        return _Gathering(
            call.frame,
            set(positions),
            _OnHost(started.parts, names),
            [every[i] for i in started.positions],
            started.tokens,
            graph,
            getattr(graph, "outer_graph", None),
        )

    def _absent(self, slots: Sequence[_Slot]) -> list[_Slot]:
        """Those without a gradient, on all ranks alike, that share a bucket with these."""
        assert self.synchronizer is not None
        beside = {name for part in self.synchronizer.beside(slots) for name in part.names}
        return [
            slot for slot in self._slots if slot not in slots and self.synchronizer.name_of(slot) in beside
        ]

    def _synchronizer_for(self, theirs: Any) -> GradientSynchronizer:
        if self.process_set is not None and theirs is not self.process_set:
            raise ArgumentError(
                "process_set", self.process_set, f"the same as to the tape or optimizer, {theirs}, or none"
            )
        if self.synchronizer is None:
            self.synchronizer = GradientSynchronizer(self.recipe, process_set=theirs, check_every=0)
        if self.synchronizer.process_set is not theirs:
            raise UnsupportedError(
                "one compressor serves one tape or optimizer; this one got two process sets"
            )
        return self.synchronizer

    def _slot(self, call: StockCall, position: int, taken: Sequence[_Slot]) -> _Slot:
        """Of a gradient's variable, which may come twice; where that is not known, of its position."""
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


def _take_back(parts: Sequence[Part], names: frozenset[str]) -> None:
    for part in parts:
        if isinstance(part, SparseBucket):
            part.take_back(names)


def _types(parts: Sequence[Part]) -> list[tf.DType]:
    return [tf.as_dtype(part.dtype) for part in parts for _ in part.names]
