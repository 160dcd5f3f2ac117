"""Hooks that make an optimizer's `step()` run a pass of `Steps` instead of its own update.

Nothing happens in the backward pass. The optimizer keeps its class, its schedules and its hooks. Its own
update does nothing, since a copy of it without parameters makes it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import RULES, Progress, Recipe, kind_of
from horovod_sparse.feedback.feedbacks import Rule
from horovod_sparse.tensors.layout import local, replicated_arrays
from horovod_sparse.tensors.models import checked_entry
from horovod_sparse.tensors.moves import StepBucket
from horovod_sparse.training.engine import Facts, PartSpec
from horovod_sparse.training.schedules import Schedule
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.steps import Steps

_log = logging.getLogger("horovod_sparse")

#: key of the residual in an optimizer's state of a parameter
RESIDUAL = "horovod_sparse_residual"
#: key of `Progress.leans`: how similar ranks' gradients are
LEANS = "horovod_sparse_leans"
#: attributes that a loss scaler sets at an optimizer for its step
_BY_SCALER = "found_inf", "grad_scale"
_MOMENTS = frozenset(rule.moment for rule in RULES)


def _with_moments(states: Mapping[Any, Mapping[str, Any]]) -> dict[Any, Any]:
    """Returns copies of the optimizer's states that hold a moment, velocity or residual; omits the others."""
    return {one: dict(state) for one, state in states.items() if set(state) & {*_MOMENTS, RESIDUAL}}


def without_own(states: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Returns copies of the optimizer's states without this package's keys (residual, `leans`)."""
    own = RESIDUAL, LEANS
    return {
        key: {name: one for name, one in state.items() if name not in own} for key, state in states.items()
    }


def _dense_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient = parameter.grad
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def inner_optimizer(optimizer: Any) -> Any:
    """Returns PyTorch's optimizer within a wrapper (of Accelerate or torchft)."""
    if (kind := type(optimizer).__name__) == "ZeroRedundancyOptimizer":
        raise ArgumentError("optimizer", kind, "the one within, for all parameters: here each rank steps all")
    for name in ("optimizer", "optim"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
            return inner
    return optimizer


class Binding(Steps):
    """Makes an optimizer's `step()` run a pass of own steps; base of what `attach` returns for `best`.

    Attributes:
        optimizer: the user's own.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        engine: Any,
        recipe: Recipe,
        settings: Settings,
        schedule: Schedule,
        averaged: Any = None,
    ) -> None:
        self.optimizer, self._kind = optimizer, kind_of(optimizer)
        self._rule = cast(Rule, recipe.feedback)
        #: number of gradients that each parameter has had, by name
        self.ages: dict[str, int] = {}
        #: by parameter: states loaded into the optimizer, until the parts are made
        self._loaded: dict[torch.Tensor, Mapping[str, Any]] = {}
        super().__init__(engine, recipe, settings, schedule, averaged)
        former = getattr(optimizer, "_horovod_sparse", None)
        # the optimizer may have a state already: loaded, or from steps of plain PyTorch
        self._loaded = _with_moments(optimizer.state if former is None else former.state_for_copy()["state"])
        if former is not None:
            former.release_optimizer()  # the newer binding takes it over
        optimizer._horovod_sparse = self
        self._handles = [
            optimizer.register_step_pre_hook(self._step_pre_hook),
            optimizer.register_step_post_hook(self._step_post_hook),
        ]
        self._handles += [
            optimizer.register_state_dict_pre_hook(self._state_dict_pre_hook),
            optimizer.register_state_dict_post_hook(self._state_dict_post_hook),
            optimizer.register_load_state_dict_pre_hook(self._load_state_dict_pre_hook),
            optimizer.register_load_state_dict_post_hook(self._load_state_dict_post_hook),
        ]
        # our hook runs before the user's post hooks
        optimizer._optimizer_step_post_hooks.move_to_end(self._handles[1].id, last=False)
        # with an empty state, torch.distributed.checkpoint would step the optimizer
        for one in self._trained_parameters():
            optimizer.state[one].setdefault("step", torch.tensor(0.0))
            optimizer.state[one].pop("exp_avg", None)
        # copies and pickles have no hooks, so they need a state that PyTorch's own step can use
        optimizer.__getstate__ = self.state_for_copy
        # so a loss scaler calls `step` even if it skips, and every rank takes part in every exchange
        optimizer._step_supports_amp_scaling = True

    def detach(self) -> None:
        """Removes the hooks: the optimizer steps as PyTorch's again, and keeps its moments or velocities."""
        self.release_optimizer()
        if self.step and self.made_for[1] > 1 and self._rule.num_companions:
            _log.warning(
                "after detach() moments differ from rank to rank: average them (optimizer.state) over ranks "
                "before you train with mean gradients, or parameters come to differ, too"
            )

    def release_optimizer(self) -> None:
        """Does what `detach` does, without its warning: another training takes over."""
        for handle in self._handles:
            handle.remove()
        self._load_moves()  # of a checkpoint that no step has resumed: parameters contain them
        self._to_resume = None
        self.roll_back()
        self.optimizer.state = defaultdict(dict, without_own(self.state_for_copy()["state"]))
        for name in ("_horovod_sparse", "_step_supports_amp_scaling", "__getstate__"):
            self.optimizer.__dict__.pop(name, None)

    def state_for_copy(self) -> dict[str, Any]:
        """Called for a copy or pickle of the optimizer: returns a state that PyTorch can step with."""
        self._state_dict_pre_hook(None)
        state = self._standalone_states(_with_moments(self.optimizer.state))
        return {**type(self.optimizer).__getstate__(self.optimizer), "state": defaultdict(dict, state)}

    # a step of the optimizer

    def _trained_parameters(self) -> Iterator[torch.Tensor]:
        return (one for group in self.optimizer.param_groups for one in group["params"])

    @torch._disable_dynamo
    def _step_pre_hook(self, optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Hook before `optimizer.step`: lets a copy without parameters step, which only runs the closure."""
        idle, groups = object.__new__(type(optimizer)), optimizer.param_groups
        # without parameters some of PyTorch's optimizers reject what a loss scaler sets
        own: dict[str, Any] = {"param_groups": [{**one, "params": []} for one in groups]}
        idle.__dict__ = {**vars(optimizer), **own, **dict.fromkeys(_BY_SCALER)}
        return (idle, *arguments[1:]), named

    @torch._disable_dynamo
    @torch.no_grad()
    def _step_post_hook(self, optimizer: Any, arguments: Any, named: Any) -> None:
        found, scale = (getattr(optimizer, name, None) for name in _BY_SCALER)
        self.is_scaled = found is not None
        try:
            self.ensure_parts()
            self.agree()  # agreeing may replace the parts
            self._set_gradients(_dense_gradient, 1.0 if scale is None else float(scale))
            self.pass_(overflowed=found is not None and bool(found))
        finally:
            for part in self.parts:
                part.release()

    def finish(self) -> None:
        if not self.facts:  # this rank had no batch
            self.ensure_parts()
        self._set_gradients(lambda parameter: None)  # without gradients this rank sends nothing more
        super().finish()

    # the optimizer's own state

    def _connect_parts(self, parts: Sequence[StepBucket]) -> None:
        """Puts views of the new parts' residuals and moments into the optimizer's state."""
        for part in parts:
            memory = part.bucket.accumulator.memory()
            names = RESIDUAL, self._rule.moment
            for number, parameter in enumerate(part.given):
                views = [part.parameter_view(number, one) for one in memory]
                self.optimizer.state[parameter].update(zip(names, views, strict=False))

    def _state_dict_pre_hook(self, _: Any) -> None:
        if not self.facts:  # torch.distributed.checkpoint loads into the tensors that it finds here
            self.ensure_parts()
        for part in self.parts:
            leans = torch.tensor(part.bucket.progress.leans, dtype=torch.float64)
            for number, one in enumerate(part.given):
                progress = {"step": torch.tensor(float(part.age(number))), LEANS: leans}
                self.optimizer.state[one].update(progress)

    def _state_dict_post_hook(self, _: Any, saved: dict[str, Any]) -> None:
        """Hook after `optimizer.state_dict()`: converts the states to the form that PyTorch's step uses."""
        order = [number for group in saved["param_groups"] for number in group["params"]]
        moved = dict(zip(self._trained_parameters(), order, strict=True))
        saved["state"] = self._standalone_states(saved["state"], moved)

    def _standalone_states(
        self, states: Mapping[Any, Mapping[str, Any]], keys: Mapping[torch.Tensor, Any] | None = None
    ) -> dict[Any, dict[str, Any]]:
        """Returns copies of the optimizer's states in the form that PyTorch's own optimizer loads.

        The first moment is zeros, and second moments are as old as their own parameter. The residual is that
        of common parameters: it includes this rank's moves, which those do not contain.
        """
        found = {key: dict(state) for key, state in states.items()}
        hidden = self.pending_moves() if self.hidden is None else self.hidden
        for part, moved in zip(self.parts, hidden, strict=True):
            residual = torch.as_tensor(part.bucket.accumulator.memory()[0])
            residual = residual.clone() if moved else residual
            for indices, values in moved:
                where = torch.as_tensor(indices).to(residual.device).long()
                residual.index_add_(0, where, torch.as_tensor(values).to(residual))
            for number, parameter in enumerate(part.given):
                state = found[parameter if keys is None else keys[parameter]]
                state[RESIDUAL] = part.parameter_view(number, residual)
                if self._rule.moment == "exp_avg_sq":
                    ratio, moment = part.moment_ratio(number), state["exp_avg_sq"]
                    state["exp_avg_sq"] = moment if ratio == 1.0 else moment / ratio
                    state["exp_avg"] = torch.zeros_like(moment)
        return found

    def _load_state_dict_pre_hook(self, _: Any, saved: dict[str, Any]) -> None:
        # PyTorch casts what it loads to the parameters' type
        self._uncast = saved

    def _load_state_dict_post_hook(self, _: Any) -> None:
        """Hook after `optimizer.load_state_dict()`: reads moments and residuals from what was loaded."""
        saved, self._uncast = self._uncast, {}
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        of_parameter = dict(zip(self._trained_parameters(), numbers, strict=True))
        states = saved["state"]
        self._loaded = {one: states[number] for one, number in of_parameter.items() if number in states}
        for one in of_parameter:
            self.optimizer.state[one].pop("exp_avg", None)
        if self.parts:
            self._apply_loaded_states()

    def _apply_loaded_states(self) -> None:
        """Copies loaded states into the parts; ranks compare their steps in the next pass."""
        loaded, self._loaded = self._loaded, {}
        if not loaded:
            return
        self.roll_back()
        self.step = 0
        for part in self.parts:
            states = [loaded.get(one, {}) for one in part.given]
            needed = {self._rule.moment} if self._rule.num_companions else set()
            ages = [int(float(one.get("step", 0))) if needed <= set(one) else 0 for one in states]
            steps = max(ages)
            self.ages.update(zip(part.names, ages, strict=True))
            leans = next((one[LEANS].tolist() for one in states if LEANS in one), (0.0, 0.0))
            names = RESIDUAL, self._rule.moment
            filled = part.zero_arrays()
            for name, into in zip(names, filled, strict=False):
                for number, state in enumerate(states):
                    if name in state:
                        into[slice(*part.spans[number])] = part.flat(number, local(state[name]).cpu())
            part.restart(Progress(steps, leans=tuple(leans)))  # clears what `states` may be views of
            self.step = max(self.step, steps // self.schedule.every)
            for moments in filled[1:]:
                for number, span in enumerate(part.spans):
                    moments[slice(*span)] *= part.moment_ratio(number)
            part.bucket.load(filled)
        self._agreed_under = None
        self._connect_parts(self.parts)  # PyTorch has replaced the optimizer's state

    # this rank's exact state

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's checkpoint entry, from which it resumes bit for bit; between any two steps.

        It holds residuals, moments, sparsifiers' states, and the rank's own moves with what is in flight.
        Save the model's parameters of this very rank beside it.
        """
        if not self.facts:
            self.ensure_parts()
        return self.save(ages=dict(self.ages))

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Loads a saved entry, or resets if it is None; ranks agree in the next step.

        Raises:
            StateMismatchError: if parameters, shapes or the algorithm differ. Nothing has been loaded then.
        """
        self.ensure_parts()
        self.load(None if entry is None else checked_entry(self, entry))
        self.ages.clear()
        if entry is not None:
            known = {name: part.bucket.progress.age for part in self.parts for name in part.names}
            self.ages.update(known | entry.get("ages", {}))

    def ensure_parts(self) -> None:
        """Makes the first parts, or parts for parameters added since; called before a step, save or load."""
        if not self.facts:
            facts = self.engine.facts({})
            self.begin(facts, self.settings.plan or self.plan_for_new(facts))
            self._apply_loaded_states()
        elif self.engine.facts(self.facts):
            self.settle()  # an exchange in flight does not include new parameters
            self.join_new_parameters()

    def _set_gradients(
        self, gradient_of: Callable[[torch.Tensor], torch.Tensor | None], loss_scale: float = 1.0
    ) -> None:
        """Sets each part's gradients and `OwnStep` for this pass; the fold divides by `loss_scale`."""
        settings_of = {id(one): group for group in self.optimizer.param_groups for one in group["params"]}
        for part in self.parts:
            if (settings := settings_of.get(id(part.given[0]))) is None:
                raise UnsupportedError(f"{part.names[0]} has left the optimizer since attach: attach again")
            now = self._rule.own_step(self._kind, settings, part.bucket.progress.age)
            weights = now.weights[0] / loss_scale, now.weights[1]
            part.set_gradients(dataclasses.replace(now, weights=weights), map(gradient_of, part.given))

    def make_parts(self, specs: Sequence[PartSpec], facts: Facts) -> list[StepBucket]:
        given = facts, self.made_for, self.schedule.moves_at_once, self.ages
        return [StepBucket(spec, *given) for spec in specs]

    def replicated_arrays(self) -> Sequence[Any]:
        parameters = {name: one for name, (_, one) in self.facts.items()}
        return replicated_arrays(parameters, self.optimizer, with_state=False)
