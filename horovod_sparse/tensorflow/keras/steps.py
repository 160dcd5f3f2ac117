"""Own steps of Keras' optimizers: a host function in `apply_gradients` carries out each pass of `Steps`."""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.collectives import gather_values
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import RULES, Progress, Recipe
from horovod_sparse.feedback.rules import with_rule
from horovod_sparse.plans import make_plan
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.arguments import Arguments
from horovod_sparse.tensorflow.collectives import carry_out_together
from horovod_sparse.tensorflow.graph import raise_if_unsupported_graph
from horovod_sparse.tensorflow.keras.distributed import is_keras3
from horovod_sparse.tensorflow.keras.host import Exchanges, HostVariables, variables_by_name
from horovod_sparse.tensorflow.tensors import as_dense, as_variable
from horovod_sparse.tensorflow.training import VariablesEngine, facts_of
from horovod_sparse.tensorflow.waiting import Watch
from horovod_sparse.topology import RankAndSize
from horovod_sparse.training.agreement import ReplicatedArray
from horovod_sparse.training.engine import Facts, PartSpec
from horovod_sparse.training.moves import StepPart
from horovod_sparse.training.schedules import Schedule
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.steps import Steps
from horovod_sparse.training.training import Training


class _KerasPart(StepPart):
    """A bucket of variables that own steps move."""

    def __init__(self, moves_at_once: bool, spec: PartSpec, facts: Facts, ranks: RankAndSize) -> None:
        variables, dtype = [facts[name][1] for name in spec.names], facts[spec.names[0]][0].dtype
        super().__init__(spec, [variable.shape for variable in variables], ranks, dtype)
        self.decays = bool(facts[spec.names[0]][0].group)
        self.num_bytes = self.bucket.info.num_elements * variables[0].dtype.size
        self.variables = HostVariables(variables, self.spans)
        self.bind(self.variables, moves_at_once)


class _KerasEngine(VariablesEngine):
    """Runs the exchanges of one Keras optimizer's variables over Horovod."""

    def __init__(self, process_set: Any, seconds: float | None) -> None:
        super().__init__(process_set)
        self.name, self.label = "horovod_sparse.tensorflow.keras", "horovod_sparse.keras"
        self.watch, self.starter = Watch(seconds, process_set), Exchanges(process_set, seconds)

    def begin(self, training: Training) -> None:
        self.starter.label = training.label


class KerasOwnSteps(Steps):
    """Runs passes (own steps and their exchange) for one Keras optimizer, over Horovod.

    Second moments and velocities lie in the buckets. They are copied into Keras' own slots when an optimizer
    is saved, and back when one is loaded, which may be a plain one.
    """

    decision = None
    engine: _KerasEngine
    starter: Any = property(operator.attrgetter("engine.starter"))

    def __init__(
        self,
        optimizer: Any,
        recipe: Recipe,
        settings: Settings,
        schedule: Schedule,
        process_set: Any,
        groups: Any,
    ) -> None:
        super().__init__(_KerasEngine(process_set, settings.deadline_seconds), recipe, settings, schedule)
        self.process_set = process_set
        self.optimizer, self._groups = optimizer, groups
        #: the Keras optimizer's trainable variables; under tf-keras those of the first step
        self._variables: list[Any] = []
        self._rule: Any = recipe.feedback
        self._rate = 0.0
        #: iterations when the optimizer was bound or loaded
        self._began = 0
        #: called when the buckets are made, for a loaded state to be put into them
        self.on_planned: Callable[[], None] = lambda: None

    def make_parts(self, specs: Sequence[PartSpec], facts: Facts) -> list[Any]:
        return [_KerasPart(self.schedule.moves_at_once, spec, facts, self.made_for) for spec in specs]

    @property
    def is_needed(self) -> bool:
        return True

    def _current_learning_rate(self) -> Any:
        rate = self.optimizer.learning_rate
        if not is_keras3(self.optimizer):  # where a schedule's present rate is known only after the step
            rate = getattr(self.optimizer, "_learning_rate", rate)
            if callable(rate) and not hasattr(rate, "dtype"):
                rate = rate(self.optimizer.iterations)
        return rate

    def synchronize_or_skip(
        self, gradients: Sequence[Any], variables: Sequence[Any], *, scaled: bool = False
    ) -> tuple[list[Any], tf.Tensor]:
        """Runs a pass, which changes the variables; returns the gradients, and whether it was skipped."""
        raise_if_unsupported_graph()
        self._remember_variables(variables)
        own = [as_variable(one) for one in self._variables]
        numbers = {one.ref(): number for number, one in enumerate(own)}
        pairs = [
            (numbers.get(as_variable(variable).ref()), one)
            for one, variable in zip(gradients, variables, strict=True)
            if one is not None
        ]
        present = [number for number, _ in pairs if number is not None]
        if len(present) < len(pairs):
            given = f"{len(pairs) - len(present)} that were not in the first step"
            raise ArgumentError("trainable_variables", given, "the same ones in all steps")
        if len(set(present)) < len(present):
            raise UnsupportedError("a variable is given twice: give it once, with the sum of its gradients")
        with tf.device("/cpu:0"):
            dense = [
                tf.cast(as_dense(one), own[number].dtype)
                for number, (_, one) in zip(present, pairs, strict=True)
            ]
            rate = tf.cast(as_variable(self._current_learning_rate()), tf.float64)
            inputs = [rate, *dense, *(one.read_value() for one in own)]
            host, kinds = _host_function(weakref.ref(self), present, scaled), [one.dtype for one in own]
            skipped, *values = tf.numpy_function(host, inputs, [tf.bool, *kinds])
        for one, value in zip(own, values, strict=True):
            one.assign(tf.ensure_shape(value, one.shape))
        return list(gradients), tf.ensure_shape(skipped, [])

    def _remember_variables(self, variables: Sequence[Any]) -> None:
        if not self._variables:
            known = getattr(self.optimizer, "_trainable_variables", None)
            self._variables = list(known or variables)
            self.read_slots()

    def run_on_host(
        self, gradients: Mapping[int, np.ndarray], values: Sequence[np.ndarray], rate: float, scaled: bool
    ) -> list[Any]:
        """Runs a pass on the host; returns whether it was skipped, and the variables' new values.

        With a scaled loss, all ranks skip a pass in which a gradient of one rank is not finite.
        """
        self.ensure_parts()
        self.agree()  # agreeing may replace the parts
        if scaled:
            bad = gather_values(any(not np.isfinite(one).all() for one in gradients.values()))
            given = self.process_set, f"{self.label}.finite"
            if any(carry_out_together(bad, *given, watch=self.engine.watch)):
                return [np.bool_(True), *values]
        self._rate = rate
        numbers = {name: number for number, name in enumerate(self.facts)}
        before = self.step
        try:
            for part in self.parts:
                own = [numbers[name] for name in part.names]
                part.variables.open([values[number] for number in own])
                now = self._rule.keras_own_step(self.optimizer, rate, part.bucket.progress.age)
                if part.decays:
                    now = dataclasses.replace(now, shrink=1.0 - rate * float(self.optimizer.weight_decay))
                part.set_gradients(now, map(gradients.get, own))
            self.pass_()
        except BaseException:
            for part in self.parts:
                part.variables.close(write=True)  # this rank's moves may have been undone
            raise
        new: dict[str, np.ndarray] = {}
        for part in self.parts:
            new |= dict(zip(part.names, part.variables.close(), strict=True))
            part.release()
        skipped = not self.schedule.moves_at_once and self.step == before
        return [np.bool_(skipped), *(new[name] for name in self.facts)]

    def ensure_parts(self) -> None:
        """Makes the buckets, at the first pass, and loads a saved state into them; later does nothing."""
        if self.facts:
            return
        facts, groups = self._first_facts(), self._groups
        if isinstance(groups, list):
            groups = [[as_variable(variable) for variable in group] for group in groups]
        size = self.settings.bucket_bytes if groups is None else None
        self.begin(facts, self.settings.plan or make_plan(facts, groups=groups, bucket_bytes=size))
        self._load_slots_into_buckets()
        self.on_planned()

    def _first_facts(self) -> Facts:
        named = variables_by_name(self._variables)
        for name, one in named.items():
            if one.dtype not in (tf.float32, tf.float64):
                raise UnsupportedError(
                    f"{name} is {one.dtype.name}: own steps are for float32 and float64, which mixed "
                    "precision keeps; feedback='error' takes others"
                )
        given, takes = self.optimizer.weight_decay, self.optimizer._use_weight_decay
        decays = [bool(given and takes(one)) for one in self._variables]
        facts = facts_of(list(named), list(named.values()), self.recipe.rules)
        return {
            name: (dataclasses.replace(fact, group=int(decay)), variable)
            for (name, (fact, variable)), decay in zip(facts.items(), decays, strict=True)
        }

    def finish(self) -> None:
        """Ends a training, so that all ranks have equal variables; all ranks call it."""
        self._remember_variables(())
        self.ensure_parts()
        super().finish()

    def replicated_arrays(self) -> Sequence[Any]:
        entries: list[Any] = [ReplicatedArray("the learning rate", np.array([self._rate]))]
        for part in self.parts:
            entries += map(ReplicatedArray, part.names, part.parameters.arrays())
        return entries

    # Keras' own slots

    def _slots_by_name(self) -> dict[str, Any]:
        """Returns the Keras optimizer's own variables for second moment or velocity, by variable name."""
        slots = getattr(self.optimizer, self._rule.keras_moment, None) or []
        return dict(zip(self.facts, map(as_variable, slots), strict=False)) if self.facts else {}

    def write_slots(self) -> None:
        """Copies second moments or velocities to the Keras optimizer's variables; sets first moments to 0."""
        slots = self._slots_by_name()
        for companion in self.residuals_and_progress()[0][1:] if slots else ():
            for name, values in companion.items():
                given = values * self._rule.keras_sign
                slots[name].assign(given.astype(slots[name].dtype.as_numpy_dtype))
        if slots and self._rule.keras_moment != "momentums":
            for one in map(as_variable, self.optimizer._momentums):
                one.assign(tf.zeros_like(one))

    def read_slots(self) -> None:
        """Reads step count and moments from the Keras optimizer's variables, when it is wrapped or loaded."""
        with tf.init_scope():  # a graph counts iterations in any order with the pass
            self._began = int(np.asarray(self.optimizer.iterations))
        self._load_slots_into_buckets()

    def _load_slots_into_buckets(self) -> None:
        slots, steps = self._slots_by_name(), self._began
        if slots and steps:
            moments = {name: slot.numpy() * self._rule.keras_sign for name, slot in slots.items()}
            self.load_residuals([{}, moments], dict.fromkeys(slots, Progress(steps)))
            self.step, self._agreed_under = steps // self.schedule.every, None

    def rescale_velocities(self, factor: float) -> None:
        """Multiplies the velocities (which contain learning rates); called when the learning rate changes."""
        for part in self.parts if self._rule.keras_moment == "momentums" else ():
            residual, *velocities = (np.array(one) for one in part.bucket.whole_arrays())
            part.bucket.load([residual, *(one * factor for one in velocities)])

    def save(self, **more: Any) -> dict[str, Any]:
        """Returns the checkpoint entry, and copies moments to the Keras optimizer's variables."""
        self.write_slots()
        return super().save(**more)


def _host_function(steps: weakref.ref[KerasOwnSteps], present: Sequence[int], scaled: bool) -> Any:
    """Returns the host function that runs a pass; graphs, never freed, refer by it to `steps` weakly."""

    def run_pass(rate: np.ndarray, *arrays: np.ndarray) -> list[Any]:
        own = steps()
        if own is None:
            raise UnsupportedError("the optimizer of this tf.function was deleted: keep a reference to it")
        gradients = dict(zip(present, arrays, strict=False))
        return own.run_on_host(gradients, arrays[len(present) :], float(rate), scaled)

    return run_pass


# choice of the rule, and the parts of the update that Keras still does

_CLIPPING = "None, and clip before apply_gradients, or give clip_norm to the feedback"
#: settings that change gradients within Keras' optimizers, and what to use instead
_REFUSED = {
    "clipnorm": _CLIPPING,
    "global_clipnorm": _CLIPPING,
    "clipvalue": _CLIPPING,
    "gradient_accumulation_steps": "None, and backward_passes_per_step to the DistributedOptimizer",
}


def recipe_for(optimizer: Any, recipe: Recipe) -> Recipe:
    """Returns the recipe with the Keras optimizer's rule; raises on settings that the rule ignores."""
    kind = type(optimizer)
    rules: dict[Any, Any] = {
        getattr(tf.keras.optimizers, name): rule for rule in RULES for name in rule.keras
    }
    if kind not in rules:
        names = ", ".join(sorted({one.__name__ for one in rules}))
        allowed = f"{names} of keras.optimizers itself, whose steps are known; or feedback='error'"
        raise ArgumentError("optimizer", kind.__name__, allowed)
    own = rules[kind]
    for name, allowed in _REFUSED.items():
        if getattr(optimizer, name, None):
            raise ArgumentError(name, getattr(optimizer, name), allowed)
    settings = {name: getattr(optimizer, name, 0.0) for name in ("momentum", "nesterov", *own.refused)}
    return with_rule(recipe, own, kind.__name__, [settings])


def make_own_steps(optimizer: Any, arguments: Arguments) -> KerasOwnSteps:
    """Makes the `KerasOwnSteps` of an optimizer; the optimizer then updates no variables itself."""
    recipe, settings = recipe_for(optimizer, arguments.compression.recipe), arguments.settings
    if arguments.op != hvd.Average:
        raise ArgumentError("op", arguments.op, f"Average: {recipe.feedback} averages steps")
    arguments.compression.reserve_for(optimizer, recipe)
    schedule = Schedule(arguments.every, arguments.delay)
    steps = KerasOwnSteps(optimizer, recipe, settings, schedule, arguments.process_set, arguments.groups)
    arguments.compression._horovod_sparse_keeper.attach(steps)
    object.__setattr__(optimizer, "_horovod_sparse_steps", steps)
    object.__setattr__(optimizer, "__class__", _class_without_update(type(optimizer)))
    return steps


def _class_without_update(base: Any) -> Any:
    """Returns a subclass of Keras' optimizer class that updates no variables: own steps do."""

    class WithoutUpdate(base):
        _horovod_sparse_base = base
        _horovod_sparse_steps: KerasOwnSteps | None = None

        def update_step(self, gradient: Any, variable: Any, *rate: Any) -> None:
            """Does nothing, since the pass has updated the variable."""

        def _apply_weight_decay(self, variables: Any) -> None:
            """Does nothing, since the exchanged step includes weight decay."""

        apply_weight_decay = _apply_weight_decay

        def save_own_variables(self, store: Any) -> None:
            if self._horovod_sparse_steps is not None:
                self._horovod_sparse_steps.write_slots()
            super().save_own_variables(store)

        def load_own_variables(self, store: Any) -> None:
            super().load_own_variables(store)
            if self._horovod_sparse_steps is not None:
                self._horovod_sparse_steps.read_slots()

    WithoutUpdate.__name__, WithoutUpdate.__qualname__ = base.__name__, base.__qualname__
    WithoutUpdate.__module__, WithoutUpdate.__doc__ = base.__module__, base.__doc__
    return WithoutUpdate
