"""Local steps: each rank trains alone for many steps, then ranks exchange their displacements.

``theta_r`` is what H steps of rank r's own optimizer make of the common ``theta``. Buckets carry
``theta - theta_r`` as if it were a gradient. The mean over ranks moves the common parameters (`OuterStep`),
from which all ranks go on. `Steps` does all else: it begins exchanges, waits, and cancels them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_sparse.collectives import gather_values
from horovod_sparse.errors import ArgumentError, StateMismatchError, UnsupportedError
from horovod_sparse.plans import Plan, fixed_bytes
from horovod_sparse.sparsifiers.dense import Dense
from horovod_sparse.tensors.binding import inner_optimizer
from horovod_sparse.tensors.layout import ReplicatedTensor, local
from horovod_sparse.tensors.models import ModelBuffers, checked_entry, parameters_of, roll_back_before_loading
from horovod_sparse.tensors.moves import LocalBucket
from horovod_sparse.training import agreement
from horovod_sparse.training.collective_errors import listed
from horovod_sparse.training.engine import Facts, PartSpec
from horovod_sparse.training.facts import check_same_exchange, mean_of_finite
from horovod_sparse.training.schedules import LocalSchedule
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.steps import Steps
from horovod_sparse.training.training import Training

#: all parameters that some `LocalSteps` exchanges
_have_local_steps: Any = WeakTensorKeyDictionary()
#: arrays of a `Displacement` that are saved in checkpoints, and copied into the buckets of a new plan
_SAVED = "start", "velocity"


def _unexchanged_parameters_in(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns names and parameters of a model that no `LocalSteps` exchanges."""
    return [(name, one) for name, one in parameters_of(model) if one not in _have_local_steps]


def _digest(tensor: torch.Tensor, by_version: bool) -> bytes:
    """Returns a tensor's version number, or a hash of its contents, to notice changes."""
    sums = None if by_version else ReplicatedTensor("", local(tensor)).checksums()
    return str(tensor._version).encode() if sums is None else sums.tobytes()


class LocalBinding(Steps):
    """Hooks local steps to one optimizer; base of `LocalSteps` in both front ends.

    `step` counts exchanges, `taken` local steps since the last one began.
    """

    schedule: LocalSchedule
    #: time that exchanges have taken from the training loop
    seconds_held_up = 0.0

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        engine: Any,
        schedule: LocalSchedule,
        settings: Settings,
    ) -> None:
        self.optimizer, self._model, self._buffers = optimizer, model, ModelBuffers(model)
        _have_local_steps.update(dict.fromkeys(self._trained_parameters(), True))
        #: parameters that no `LocalSteps` exchanges: if they were frozen, and a digest, when training began
        self._known: dict[str, tuple[bool, bytes]] = {}
        #: hashes of the parameters before a state was loaded since the last step; None without a load
        self._before_load: list[bytes] | None = None
        self._is_restored = self._has_begun = False
        #: local steps since the exchange in flight began
        self._flying = 0
        #: True if other parameters were loaded into the model since the last exchange began
        self._replaced = False
        facts = engine.facts({})
        super().__init__(engine, schedule.recipe, settings, schedule, self._buffers)
        self.begin(facts, self.plan_for_new(facts))
        for hook in getattr(optimizer, "_local_hooks", ()):  # the newer binding takes the optimizer over
            hook.remove()
        roll_back_before_loading(model.modules(), self)
        # a reference from the optimizer keeps this alive; torch.compile(optimizer.step) does not change it
        optimizer._local_hooks = [
            optimizer.register_step_pre_hook(self._step_pre_hook),
            optimizer.register_step_post_hook(self._step_post_hook),
        ]

    def plan_for_new(self, facts: Facts) -> Plan:
        """Returns a plan with buckets of 32 MiB; with dense parameters alone if everything is sent."""
        parameters = [fact for fact, _ in facts.values()]
        if isinstance(self.recipe.sparsifier, Dense):
            return Plan((), tuple(fact.name for fact in parameters))
        return fixed_bytes(parameters)

    def build(self, plan: Plan) -> None:
        kept = self._arrays_by_parameter(*_SAVED, "sent")
        super().build(plan)
        self._assign_arrays(kept)

    def make_parts(self, specs: Sequence[PartSpec], facts: Facts) -> list[LocalBucket]:
        return [LocalBucket(spec, facts, self.made_for, self.schedule) for spec in specs]

    def _arrays_by_parameter(self, *names: str) -> dict[str, dict[str, Any]]:
        """Returns all displacements' arrays with these names, as dicts by parameter."""
        kept: dict[str, dict[str, Any]] = {name: {} for name in names}
        for part, what in itertools.product(self.parts, kept):
            values = part.moves.to_host(what)
            kept[what] |= part.by_name(values) if values.size else {}
        return kept

    def _assign_arrays(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        for part, what in itertools.product(self.parts, kept):
            if kept[what].keys() >= set(part.names):
                flat = [part.flat(number, kept[what][name]) for number, name in enumerate(part.names)]
                part.moves.assign_array(what, np.concatenate(flat))

    # a step of the optimizer

    def _trained_parameters(self) -> Iterator[torch.Tensor]:
        given = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return (one for one in given if one.requires_grad and local(one).numel())

    @torch._disable_dynamo
    def _step_pre_hook(self, optimizer: Any, arguments: Any, named: Any) -> None:
        self.agree()
        self._adopt_loaded_parameters()
        self._is_restored = False

    @torch._disable_dynamo
    def _step_post_hook(self, optimizer: Any, arguments: Any, named: Any) -> None:
        """Hook after `optimizer.step`: exchanges displacements when that is due."""
        # GradScaler calls a fused optimizer also for a skipped step, and sets found_inf
        skipped = getattr(optimizer, "found_inf", None)
        if skipped is not None and bool(skipped):
            return
        self.taken += 1
        if not self._in_flight and self.taken < self.schedule.every:
            return
        began, self._flying = time.perf_counter(), self._flying + 1
        self._raise_if_lost()
        if self._flying >= self.schedule.delay:
            self._apply_exchanges(0)
        if self.taken >= self.schedule.every:
            self._begin_exchange()
            if not self.schedule.delay:
                self._apply_exchanges(0)
        self.seconds_held_up += time.perf_counter() - began

    def _advance(self) -> None:
        """Continues the exchange in flight as far as possible without waiting."""

    # what ranks agree upon

    def agree(self) -> None:
        """Agrees on step and plan (`Training.agree`); raises if ranks' common parameters differ."""
        if self._has_begun and self.is_agreed:
            return
        self.roll_back()  # what was in flight when the collectives ended
        for part in self.parts:
            if self._has_begun:  # parameters may have been loaded since something was sent
                part.moves.record_sent()
            else:
                part.moves.take_as_common()
        before, self._num_begun = self.step, 0
        Training.agree(self)
        if self.size > 1:
            try:
                self._carry_out(self.drift.compare(self.step, self.replicated_arrays()))
            except BaseException:
                self.step = before
                raise
        self._has_begun = True
        self._remember_unexchanged()

    def _remember_unexchanged(self) -> None:
        others = [(name, one, not one.requires_grad) for name, one in _unexchanged_parameters_in(self._model)]
        self._known = {name: (frozen, _digest(one, frozen)) for name, one, frozen in others}

    def replicated_arrays(self) -> Sequence[Any]:
        return [part.moves.entry(*one) for part in self.parts for one in enumerate(part.names)]

    # an exchange

    def _begin_exchange(self, *, finishing: bool = False) -> None:
        self._adopt_loaded_parameters()
        self._raise_if_unexchanged()
        self._apply_exchanges(0)
        taken, self._flying = self.taken, 0
        try:
            super()._begin_exchange(finishing=finishing)
        except BaseException:  # the user's interrupt
            self.roll_back()
            self.taken = taken
            raise

    def _raise_if_unexchanged(self) -> None:
        """Raises if the optimizer has new parameters, or if parameters without `LocalSteps` have changed."""
        known = {id(parameter) for _, parameter in self.facts.values()}
        if new := [list(one.shape) for one in self._trained_parameters() if id(one) not in known]:
            raise UnsupportedError(
                f"the optimizer trains parameters of shapes {new[:3]} that LocalSteps did not find when it "
                "was made: other ranks would not hear of them. On all ranks, finish() this one before "
                "add_param_group() or requires_grad_(True), and make another after it"
            )
        moved = []
        for name, one in _unexchanged_parameters_in(self._model):
            frozen, digest = self._known.get(name, (False, None))
            if digest is not None and _digest(one, frozen) != digest:
                moved.append((name, one))
        if trained := [name for name, one in moved if one.requires_grad]:
            raise UnsupportedError(
                f"another optimizer trains {listed(trained)}, whose gradients stay on their ranks: give it "
                f"LocalSteps, too: LocalSteps(other_optimizer, model, every={self.schedule.every})"
            )
        if moved:
            raise UnsupportedError(
                f"{listed([name for name, _ in moved])}, which no optimizer trains, have changed here: "
                "give averages of parameters to register_buffer, which is averaged over ranks"
            )

    def _send_rank_facts(self, facts: Any, name: str) -> None:
        told = [self.step, facts.finishing, self._replaced, self._buffers.read().size]
        facts.task = self.starter.start(f"{name}.facts", gather_values(told))
        self._num_begun, self._replaced = self._num_begun + 1, False

    def _read_rank_facts(self, facts: Any) -> list[dict[float, list[int]]]:
        numbers, _, replaced, sizes = zip(*facts.task.value(), strict=True)
        check_same_exchange(numbers)
        if len(set(replaced)) > 1:
            ranks = [rank for rank, loaded in enumerate(replaced) if loaded]
            raise StateMismatchError(
                f"only ranks {ranks} have loaded parameters since the last exchange: call "
                "model.load_state_dict on all ranks"
            )
        if len(set(sizes)) > 1:
            told = agreement.values_by_rank("have {} elements", sizes)
            raise StateMismatchError(f"the model's buffers differ: {told}. Make them the same on all ranks")
        return [{}] * len(self.parts)

    def _average_buffers(self, facts: Any) -> None:
        if (own := self._buffers.read()).size:
            self._buffers.move(own, self._carry_out(mean_of_finite(own)))

    def _apply_exchanges(self, most_in_flight: int) -> None:
        super()._apply_exchanges(0)  # one is in flight at most, and `delay` counts steps
        if self.step >= self.drift.next_step:
            self._carry_out(self.drift.compare(self.step, self.replicated_arrays()))

    @torch.no_grad()
    def _cancel_exchange(self, failures: Sequence[BaseException]) -> None:
        """Cancels the exchange on all ranks; a rank with NaN or Inf also drops its later local steps."""
        super()._cancel_exchange(failures)
        diverged = any(self.rank in getattr(error, "where", ()) for error in failures)
        for part in self.parts:
            if diverged:
                part.moves.record_sent()
            part.moves.return_to_start()
        for state in self.optimizer.state.values() if diverged else ():
            for value in state.values():  # NaN and Inf in moments would spoil the next step
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    torch.nan_to_num_(local(value), 0.0, 0.0, 0.0)

    def pending_moves(self) -> list[Any]:
        """Returns an empty list for each part: local steps are in the parameters, not in moves."""
        return [[] for _ in self.parts]

    def roll_back(self) -> None:
        """Cancels the exchange in flight; the next step begins it again."""
        if not self._in_flight and not any(part.moves.task for part in self.parts):
            return
        self._advance()
        taken = self.taken
        super().roll_back()
        self.taken = taken + self.schedule.every

    def finish(self) -> None:
        """Ends a training: takes part in exchanges until all ranks have called it, even with unequal steps.

        Ranks that have skipped steps, or have had fewer batches, take part in the others' exchanges.
        """
        if not self._has_begun and any(one.grad is not None for one in self._trained_parameters()):
            raise UnsupportedError(
                f"LocalSteps has seen no step() of {type(self.optimizer).__name__}, though there are "
                "gradients: give it the optimizer whose step() moves the parameters"
            )
        super().finish()

    # checkpoints

    def before_load(self) -> None:
        """Called before the model loads a state: hashes its parameters, to notice whether they change."""
        if self._has_begun and not self._is_restored and self._before_load is None:
            self._apply_exchanges(0)
            self._before_load = self._digests()

    def _digests(self) -> list[bytes]:
        return [_digest(one, False) for _, one in self.facts.values()]

    def _adopt_loaded_parameters(self) -> None:
        """Makes the parameters the common ones if all ranks have loaded others into the model."""
        before, self._before_load = self._before_load, None
        if before is None or before == self._digests():  # none loaded, or restored after an evaluation
            return
        for part in self.parts:
            part.restart(part.bucket.progress)
            part.moves.take_as_common()
        self.taken, self._replaced = 0, True
        self.drift.compare_next(self.step)
        self._remember_unexchanged()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's checkpoint entry: common parameters, residuals, steps since the last exchange.

        Each rank saves its own, beside its optimizer's state and its model's, which differ from rank to rank
        within a round. All save between the same two steps, and this first: with a delay it waits for the
        exchange in flight, which moves parameters.
        """
        self._adopt_loaded_parameters()
        return self.save()

    def save(self, **more: Any) -> dict[str, Any]:
        """Returns the checkpoint entry, once the exchange in flight has ended; all ranks call it together."""
        if self.hidden is not None and (self.taken or self._in_flight):
            raise UnsupportedError("state_dict() was called within `with local.common():`: call it outside")
        self._apply_exchanges(0)
        own = {"taken": self.taken, "has_begun": self._has_begun, **self._arrays_by_parameter(*_SAVED)}
        return Training.save(self, local=own, **more)

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Loads a saved entry; ranks agree in the next step.

        Args:
            entry: of this rank, from `state_dict`; None to begin with the parameters as they are then.

        Raises:
            StateMismatchError: if parameters, shapes or the algorithm differ. Nothing has been loaded then.
        """
        if entry is not None:
            entry = checked_entry(self, entry)
        self._apply_exchanges(0)
        own = {} if entry is None else self._checked_local(entry)
        Training.load(self, entry)
        self._has_begun = bool(own.get("has_begun"))
        self.taken, self._replaced = int(own.get("taken", 0)), False
        self._assign_arrays({what: own.get(what, {}) for what in _SAVED})
        self._before_load, self._is_restored = None, entry is not None

    def _checked_local(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        saved = entry.get("local")
        if not isinstance(saved, Mapping):
            raise StateMismatchError("the saved state is not one of LocalSteps.state_dict()")
        shapes = {name: tuple(fact.shape or ()) for name, (fact, _) in self.facts.items()}
        for what in _SAVED:
            wanted = shapes if what == "start" or self.schedule.outer.momentum else {}
            found = {name: tuple(values.shape) for name, values in saved.get(what, {}).items()}
            if other := found.items() ^ wanted.items():
                words = f"saved {what} of {min(other)[0]} does not fit: use the saved run's model and outer="
                raise StateMismatchError(words)
        return saved


def stepping_optimizer(optimizer: Any, module: Any) -> torch.optim.Optimizer:
    """Returns the optimizer whose `step` changes the parameters: the one within a wrapper, or within SAM."""
    optimizer = inner_optimizer(getattr(optimizer, "base_optimizer", optimizer))
    others = "_allreduce_delay", "_horovod_sparse", "_synchronize_for_scaler"
    if not isinstance(optimizer, torch.optim.Optimizer) or any(hasattr(optimizer, one) for one in others):
        allowed = "one of PyTorch, without attach or DistributedOptimizer: torch.optim.AdamW(...)"
        raise ArgumentError("optimizer", type(optimizer).__name__, allowed)
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            "model", type(module).__name__, "the torch.nn.Module whose parameters the optimizer trains"
        )
    return optimizer
