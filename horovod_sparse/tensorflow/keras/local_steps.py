"""`LocalSteps` of Keras: a callback, whose exchanges copy to the host and are waited for."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from horovod_sparse.arrays import GradientParts
from horovod_sparse.errors import ArgumentError
from horovod_sparse.sparsifiers.base import accumulator_dtype
from horovod_sparse.tensorflow._horovod import hvd, takes_part
from horovod_sparse.tensorflow.keras.host import KerasEngine, OverKeras, by_name
from horovod_sparse.tensorflow.state import StateKeeper, WithState
from horovod_sparse.tensorflow.tensors import as_variable, dtype_name
from horovod_sparse.tensorflow.training import facts_of
from horovod_sparse.training import local_steps
from horovod_sparse.training import parts as common
from horovod_sparse.training.engine import Facts, PartSpec
from horovod_sparse.training.parts import Parameters
from horovod_sparse.training.schedules import LocalOptions, LocalSchedule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Displacement(local_steps.Displacement):
    """Keeps variables' last exchanged values on the host; each exchange blocks until it is done."""

    def __init__(self, part: _Part, variables: Sequence[Any], schedule: LocalSchedule) -> None:
        n, kind = part.bucket.info.num_elements, part.bucket.info.value_dtype
        self.start, self.velocity = np.zeros(n, kind), np.zeros(n if schedule.outer.momentum else 0, kind)
        self.sent = self.start[:0]
        super().__init__(part, schedule, Parameters([(0, n)], [self.start]))
        self._placed = [(one, slice(*at)) for one, at in zip(variables, self.places, strict=True)]
        self.take_as_common()

    def take_as_common(self) -> None:
        for variable, place in self._placed:
            self.start[place] = variable.numpy().reshape(-1)
        self.velocity[...] = 0

    def displacement(self) -> GradientParts:
        moved = np.empty_like(self.start)
        for variable, place in self._placed:
            own = variable.numpy().reshape(-1)
            # half types went on from `start` as they can hold it: its rounding is no displacement
            moved[place] = self.start[place].astype(own.dtype)
            moved[place] -= own
        return GradientParts([moved])

    def return_to_start(self) -> None:
        for variable, place in self._placed:
            values = self.start[place].reshape(variable.shape)
            variable.assign(values.astype(variable.dtype.as_numpy_dtype))


class _Part(common.BucketPart):
    """A bucket of variables with their displacement; dense variables form one, too."""

    def __init__(self, schedule: LocalSchedule, spec: PartSpec, facts: Facts, place: tuple[int, int]) -> None:
        variables = [facts[name][1] for name in spec.names]
        kind = np.dtype(accumulator_dtype(facts[spec.names[0]][0].dtype))
        super().__init__(spec, [variable.shape for variable in variables], place, kind.name)
        self.moves = _Displacement(self, variables, schedule)
        self.num_bytes = self.moves.start.nbytes


class _Training(OverKeras, local_steps.LocalTraining):
    on_planned: Any


class _UntrainedFloats:
    """Implements `Averaged` for variables that are not trained: statistics of batches."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._floats = [one for one in map(as_variable, variables) if dtype_name(one.dtype)]

    def read(self) -> np.ndarray:
        floats = [one.numpy().astype(np.float64).reshape(-1) for one in self._floats]
        return np.concatenate([np.zeros(0), *floats])

    def move(self, sent: np.ndarray, mean: np.ndarray) -> None:
        stops = np.cumsum([one.shape.num_elements() for one in self._floats])
        for one, values in zip(self._floats, np.split(mean, stops[:-1]), strict=False):
            one.assign(values.reshape(one.shape).astype(one.dtype.as_numpy_dtype))


#: that train with `LocalSteps` now
models = weakref.WeakSet[Any]()


class LocalSteps(tf.keras.callbacks.Callback):
    """Lets ranks train alone, and exchanges every so many steps, as `horovod_sparse.ddp.LocalSteps` does.

        model.compile(keras.optimizers.AdamW(), loss)          # Keras' own optimizer
        model.fit(batches, callbacks=[broadcast, hvd.LocalSteps(every=30, compression="sparseloco")])

    Stands behind `BroadcastGlobalVariablesCallback`. The end of `fit` exchanges, too, until all ranks have
    come to it. Steps that a LossScaleOptimizer skips do not count. Not for
    ``EarlyStopping(restore_best_weights=True)``, which brings back each rank's own weights within a round.

    Args:
        every: H, steps of the optimizer from one exchange to the next.
        process_set: the ranks that exchange.
        **options: see `horovod_sparse.ddp.LocalSteps`; there is no `delay`, and all is offloaded anyway.

    Raises:
        ArgumentError: for an argument that is not allowed; in `fit`, for a distributed optimizer, or a model
            that is not built, or trains other variables than in a `fit` before.

    Example:
        >>> LocalSteps(every=30, delay=2)
        Traceback (most recent call last):
        horovod_sparse.errors.ArgumentError: delay=2 is not allowed: give 0: ranks wait for each exchange
    """

    def __init__(
        self, every: int, process_set: Any = hvd.global_process_set, **options: Unpack[LocalOptions]
    ) -> None:
        super().__init__()
        self._given, self._settings = LocalSchedule.of(every, options, "LocalSteps of Keras")
        if self._given.delay:
            raise ArgumentError("delay", self._given.delay, "0: ranks wait for each exchange")
        self.process_set, self._counted = process_set, 0
        #: made when `fit` begins: counts exchanges (`step`), tells of them (`summary()`)
        self.rounds: _Training | None = None
        self._horovod_sparse_keeper = StateKeeper()

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        models.add(model)

    def on_train_begin(self, logs: Any = None) -> None:
        if not takes_part(self.process_set):
            return
        if not self.model.built:
            raise ArgumentError("model", type(self.model), "one that is built: model.build(...) before fit")
        optimizer = self.model.optimizer
        if isinstance(optimizer, WithState) or hasattr(optimizer, "_allreduce_grads"):  # Horovod's own
            raise ArgumentError("optimizer", "a DistributedOptimizer", "a plain one to compile()")
        self._counted = self._iterations()
        trained = by_name(self.model.trainable_weights)
        named = {
            name: one for name, one in trained.items() if dtype_name(one.dtype) and one.shape.num_elements()
        }
        if self.rounds is None:
            make, seconds = partial(_Part, self._given), self._settings.deadline_seconds
            engine = KerasEngine(make, self.process_set, seconds)
            facts = facts_of(list(named), list(named.values()), self._given.recipe.rules)
            statistics = _UntrainedFloats(self.model.non_trainable_weights)
            self.rounds = _Training(engine, self._given, self._settings, facts, statistics)
            self._horovod_sparse_keeper.attach(self.rounds)
        elif new := {*map(id, named.values())} - {id(one) for _, one in self.rounds.facts.values()}:
            given = f"one with {len(new)} trained variables that the fit before did not train"
            raise ArgumentError("model", given, "that of the first fit, or another LocalSteps on all ranks")

    def _iterations(self) -> int:
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        return int(np.asarray(optimizer.iterations))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.rounds is not None:
            self.rounds.agree()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self._counted = self._counted, self._iterations()
        if self.rounds is not None:
            for _ in range(self._counted - before):
                self.rounds.after_step()

    def on_train_end(self, logs: Any = None) -> None:
        models.discard(self.model)
        if self.rounds is not None:
            self.rounds.finish()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's entry: common values, residuals, its place in a round; empty before `fit`."""
        return self._horovod_sparse_keeper.state_dict()

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Goes on from an entry of this rank, beside its model's and its optimizer's variables."""
        self._horovod_sparse_keeper.load_state_dict(entry)
