"""What `compression=` takes: every sparsifier, with what it remembers, and Horovod's own choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from horovod.tensorflow.compression import Compressor as Compressor
from horovod.tensorflow.compression import FP16Compressor as FP16Compressor
from horovod.tensorflow.compression import NoneCompressor as NoneCompressor

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.frontend.compression import Algorithms, describe_recipe, recipe_of
from horovod_sparse.frontend.decision import Decision
from horovod_sparse.merging import Plan
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.dropin import DropIn, Pending
from horovod_sparse.tensorflow.planning import building
from horovod_sparse.tensorflow.state import CheckpointedState, StateKeeper
from horovod_sparse.tensorflow.stock import keep_functions_with_compressors
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer


class SparseCompressor(Compressor):
    """A recipe, and what it remembers of every variable. Made by `Compression.topk(...)` and the like.

    It keeps residuals and thresholds, which have to live as long as the training: a tape lives for one
    step. So make it once, outside of the training loop and of `tf.function`, one for every tape or
    optimizer, and pass it whenever you wrap a tape.

    In our tapes and optimizers (`horovod_sparse.tensorflow`, `horovod_sparse.tensorflow.keras`)
    gradients are merged into buckets, and one rank does what each of many does. In stock Horovod's it really
    sends sparse data, too, though these know nothing of it: see `DropIn`. With one rank they leave gradients
    as they are, feedback included: a warning says so.

    It may be pickled before `hvd.init()`: the recipe travels, what it remembers does not.

    Args:
        recipe: sparsifier and feedback.
        process_set: the ranks that take part; those of the tape or optimizer if left out.
    """

    def __init__(self, recipe: Recipe, process_set: Any = None) -> None:
        self.recipe, self.process_set = recipe, process_set
        self._synchronizer: GradientSynchronizer | None = None
        self._arguments: dict[str, Any] = {}
        self._dropin: DropIn | None = None
        #: what stock Horovod has made for it
        self.stock_functions: dict[Any, Any] = {}
        self.keeper = StateKeeper()
        keep_functions_with_compressors()

    @property
    def telemetry(self) -> Telemetry:
        """What happened in the last step, and on average; empty before the first."""
        if self._synchronizer is not None:
            return self._synchronizer.telemetry
        inner = None if self._dropin is None else self._dropin.synchronizer
        return Telemetry() if inner is None else inner.telemetry

    @property
    def synchronizer(self) -> GradientSynchronizer | None:
        """What `bind` has made; None before, and in stock Horovod's tapes and optimizers."""
        return self._synchronizer

    def bind(self, **arguments: Any) -> GradientSynchronizer:
        """The synchronizer for a tape or optimizer of ours: made at the first call, the same at later ones.

        Args:
            **arguments: of `GradientSynchronizer`, but for the recipe.

        Raises:
            ArgumentError: if it is bound already, with other arguments.
            UnsupportedError: if it is at work in one of stock Horovod's.
        """
        if self._dropin is not None:
            raise UnsupportedError(
                f"{self!r} is at work in a tape or optimizer of horovod.tensorflow: make another compressor "
                "for this one"
            )
        theirs = arguments.get("process_set") or hvd.global_process_set
        process_set = self.process_set or theirs
        if process_set is not theirs and theirs is not hvd.global_process_set:
            raise ArgumentError("process_set", theirs, "the same as to the compressor, or none")
        arguments["process_set"] = process_set
        comparable = {name: _comparable(value) for name, value in arguments.items()}
        if self._synchronizer is None:
            self._synchronizer = GradientSynchronizer(self.recipe, **arguments)
            self._arguments = comparable
            self.keeper.attach(self._synchronizer)
        for name, value in comparable.items():
            if self._arguments.get(name) != value:
                raise ArgumentError(
                    name,
                    arguments[name],
                    "what this compressor was used with before; every tape or optimizer needs a compressor "
                    "of its own, made once",
                )
        return self._synchronizer

    @property
    def plan(self) -> Plan | None:
        """Which variables form which bucket; None before the first step."""
        return None if self._synchronizer is None else self._synchronizer.plan

    @property
    def decision(self) -> Decision | None:
        """Why the plan was taken, where times decided about it: predictions, and the profile behind them."""
        return None if self._synchronizer is None else self._synchronizer.decision

    @property
    def is_measured(self) -> bool:
        """Whether backward times wait for `replan`: from the same step on, on all ranks."""
        return self._synchronizer is not None and self._synchronizer.is_measured

    def replan(self, plan: Plan | None = None, *, measure_steps: int | None = None) -> None:
        """Changes the buckets between two steps: see `GradientSynchronizer.replan`."""
        if self._synchronizer is not None:
            self._synchronizer.replan(plan, measure_steps=measure_steps)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and sparsifier states; `horovod_sparse.tensorflow.state` says more.

        Raises:
            UnsupportedError: if it is at work in one of stock Horovod's, which save nothing.
        """
        if self._dropin is not None:
            raise UnsupportedError(
                f"{self!r} is at work in a tape or optimizer of horovod.tensorflow, where residuals are not "
                "saved: use that of horovod_sparse.tensorflow"
            )
        return self.keeper.state_dict()

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Continues from what `state_dict` gave, also before the first step; from nothing, if it is empty."""
        self.keeper.load_state_dict(entry)

    def checkpointed(self) -> CheckpointedState:
        """For `tf.train.Checkpoint`: ``Checkpoint(model=..., residuals=compression.checkpointed())``."""
        return CheckpointedState(self.keeper)

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Pending | None]:
        """Called by stock Horovod: see `DropIn.compress`."""
        if self._synchronizer is not None:
            raise UnsupportedError(
                f"{self!r} is at work in a tape or optimizer of horovod_sparse: make another compressor for "
                "one of horovod.tensorflow"
            )
        if self._dropin is None:
            self._dropin = DropIn(self.recipe, self.process_set)
        return self._dropin.compress(tensor)

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: tf.Tensor, ctx: Pending | None) -> tf.Tensor:
        """Called by stock Horovod: see `DropIn.decompress`."""
        if ctx is None or self._dropin is None:
            return tensor
        return self._dropin.decompress(tensor, ctx)

    def __repr__(self) -> str:
        return describe_recipe(self.recipe)

    def __reduce__(self) -> tuple[Any, ...]:
        return (SparseCompressor, (self.recipe,))


def _comparable(value: Any) -> Any:
    """Variables by identity: their == is elementwise. What is made anew in every step, by value."""
    if isinstance(value, (list, tuple)):
        return tuple(_comparable(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)) or dataclasses.is_dataclass(value):
        return value
    return str(value) if isinstance(value, Path) else id(value)


_COMMON_ARGUMENTS = """
Arguments that every algorithm takes:
    feedback: "error" (default: what is not sent is kept for the next step) or "none".
    process_set: the ranks that take part; those of the tape or optimizer if left out.

Returns:
    A SparseCompressor for the argument compression= of Horovod's tapes and optimizers, and of ours.
    It keeps the residuals: make it once, outside of the training loop, one for every tape or optimizer.
"""


class Compression(
    metaclass=Algorithms,
    make=SparseCompressor,
    binding=("process_set",),
    help_text=_COMMON_ARGUMENTS,
    telling=building.telling,
):
    """What the argument `compression=` takes; a superset of `horovod.tensorflow.Compression`.

    ``Compression.topk(density=0.01)``, and likewise for every algorithm: ``help(Compression.exdyna)``
    lists arguments. ``Compression.none`` and ``Compression.fp16`` are Horovod's own.

    Example:
        >>> Compression.exdyna(density=0.001)
        Compression.exdyna(density=0.001)
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16

    @staticmethod
    @building.telling
    def parse(text: str, *, process_set: Any = None) -> Any:
        """Reads a choice from a command line.

        Args:
            text: "none", "fp16", or an algorithm with its arguments: ``exdyna:density=0.001``.
            process_set: see `SparseCompressor`.

        Returns:
            What the attribute of that name is, or makes.

        Raises:
            UnknownNameError: for a misspelt algorithm or argument, with the valid ones.
            ArgumentError: for a value that is not allowed.

        Example:
            >>> Compression.parse("micro:density=0.01,threshold=paper")
            Compression.micro(density=0.01, threshold='paper')
            >>> Compression.parse("none") is Compression.none
            True
        """
        recipe = recipe_of(text)
        if recipe is None:
            return getattr(Compression, text)
        return SparseCompressor(recipe, process_set)
