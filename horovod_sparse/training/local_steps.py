"""Local steps: each rank trains alone for many steps, then ranks exchange their displacements.

``theta_r`` is what H steps of rank r's own optimizer make of the common ``theta``. Buckets carry
``theta - theta_r`` as if it were a gradient. The mean over ranks moves the common parameters (`OuterStep`),
from which all ranks go on. `Steps` does all else: it begins exchanges, waits, and cancels them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse.collectives import shared_lines
from horovod_sparse.errors import StateMismatchError, UnsupportedError
from horovod_sparse.plans import Plan, fixed_bytes
from horovod_sparse.sparsifiers.dense import Dense
from horovod_sparse.training import agreement
from horovod_sparse.training.engine import Engine, Facts
from horovod_sparse.training.facts import Averaged, mean_of_finite
from horovod_sparse.training.schedules import LocalSchedule
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.steps import Steps
from horovod_sparse.training.training import Training

#: what a checkpoint has of a `Displacement`, and what other buckets take over
_SAVED = "start", "velocity"


class LocalTraining(Steps):
    """Training by local steps; `step` counts exchanges, `taken` local steps since the last one began."""

    schedule: LocalSchedule
    #: time that exchanges have taken from the training loop
    seconds_held_up = 0.0

    def __init__(
        self, engine: Engine, schedule: LocalSchedule, settings: Settings, facts: Facts, averaged: Averaged
    ) -> None:
        super().__init__(engine, schedule.recipe, settings, schedule, averaged)
        self._statistics = averaged
        self._has_begun = False
        #: local steps since the exchange in flight began
        self._flying = 0
        #: whether the common parameters have been loaded anew since the last exchange
        self._replaced = False
        self.begin(facts, self.plan_for_new(facts))

    def plan_for_new(self, facts: Facts) -> Plan:
        """Returns a plan with buckets of 32 MiB; without buckets if everything is sent."""
        parameters = [fact for fact, _ in facts.values()]
        if isinstance(self.recipe.sparsifier, Dense):
            return Plan((), tuple(fact.name for fact in parameters))
        return fixed_bytes(parameters)

    def build(self, plan: Plan) -> None:
        kept = self._arrays_by_parameter(*_SAVED, "sent")
        super().build(plan)
        self._assign_arrays(kept)

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
                self._carry_out(self.drift.run(self.step, self.replicated_arrays()))
            except BaseException:
                self.step = before
                raise
        self._has_begun = True

    def replicated_arrays(self) -> Sequence[Any]:
        return [part.moves.entry(*one) for part in self.parts for one in enumerate(part.names)]

    # an exchange

    def after_step(self) -> None:
        """Called after every step of the optimizer; exchanges displacements when that is due."""
        self.taken += 1
        if not self._in_flight and self.taken < self.schedule.every:
            return
        began, self._flying = time.perf_counter(), self._flying + 1
        self._advance()
        if self._flying >= self.schedule.delay:
            self._apply_exchanges(0)
        if self.taken >= self.schedule.every:
            self._begin_exchange()
            if not self.schedule.delay:
                self._apply_exchanges(0)
        self.seconds_held_up += time.perf_counter() - began

    def _advance(self) -> None:
        """Continues the exchange in flight as far as possible without waiting."""

    def _begin_exchange(self, *, finishing: bool = False) -> None:
        self._apply_exchanges(0)
        taken, self._flying = self.taken, 0
        try:
            super()._begin_exchange(finishing=finishing)
        except BaseException:  # the user's interrupt
            self.roll_back()
            self.taken = taken
            raise

    def _send_rank_facts(self, facts: Any, name: str) -> None:
        told = [self.step, facts.finishing, self._replaced, self._statistics.read().size]
        facts.task = self.starter.start(f"{name}.facts", shared_lines(told))
        self._num_begun, self._replaced = self._num_begun + 1, False

    def _read_rank_facts(self, facts: Any) -> tuple[list[dict[float, list[int]]], bool]:
        numbers, finishing, replaced, sizes = zip(*facts.task.value(), strict=True)
        self.check_same_exchange(numbers)
        if len(set(replaced)) > 1:
            ranks = [rank for rank, loaded in enumerate(replaced) if loaded]
            raise StateMismatchError(
                f"only ranks {ranks} have loaded parameters since the last exchange: call "
                "model.load_state_dict on all ranks"
            )
        if len(set(sizes)) > 1:
            told = agreement.values_by_rank("have {} elements", sizes)
            raise StateMismatchError(f"the model's buffers differ: {told}. Make them the same on all ranks")
        return [{}] * len(self.parts), all(finishing)

    def _average_buffers(self, facts: Any) -> None:
        if (own := self._statistics.read()).size:
            self._statistics.move(own, self._carry_out(mean_of_finite(own)))

    def _apply_exchanges(self, most_in_flight: int) -> bool:
        all_finishing = super()._apply_exchanges(most_in_flight)
        if self.step >= self.drift.next_step:
            self._carry_out(self.drift.run(self.step, self.replicated_arrays()))
        return all_finishing

    def _cancel(self, failures: Sequence[BaseException]) -> None:
        """Cancels the exchange on all ranks; a rank with NaN or Inf also drops its later local steps."""
        super()._cancel(failures)
        diverged = any(self.rank in getattr(error, "where", ()) for error in failures)
        for part in self.parts:
            if diverged:
                part.moves.record_sent()
            part.moves.return_to_start()
        if diverged:
            self._clear_nonfinite_state()

    def _clear_nonfinite_state(self) -> None:
        """Sets NaN and Inf in the optimizer's state to 0, since they would spoil its next step."""

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

    def replace_common(self) -> None:
        """Makes the present parameters, which all ranks have loaded, the common ones."""
        for part in self.parts:
            part.restart(part.bucket.progress)
            part.moves.take_as_common()
        self.taken, self._replaced = 0, True
        self.drift.restart(self.step)

    # checkpoints

    def save(self, **more: Any) -> dict[str, Any]:
        """Returns the checkpoint entry, once the exchange in flight has ended; all ranks call it together."""
        if self.hidden is not None and (self.taken or self._in_flight):
            raise UnsupportedError("state_dict() was called within `with local.common():`, call it outside")
        self._apply_exchanges(0)
        local = {"taken": self.taken, "has_begun": self._has_begun, **self._arrays_by_parameter(*_SAVED)}
        return Training.save(self, local=local, **more)

    def load(self, entry: Mapping[str, Any] | None) -> None:
        """Loads a checkpoint entry; with None the present parameters become the common ones."""
        self._apply_exchanges(0)
        local = {} if entry is None else self._checked_local(entry)
        Training.load(self, entry)
        self._has_begun = bool(local.get("has_begun"))
        self.taken, self._replaced = int(local.get("taken", 0)), False
        self._assign_arrays({what: local.get(what, {}) for what in _SAVED})

    def _checked_local(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        local = entry.get("local")
        if not isinstance(local, Mapping):
            raise StateMismatchError("the saved state is not one of LocalSteps")
        shapes = {name: tuple(fact.shape or ()) for name, (fact, _) in self.facts.items()}
        for what in _SAVED:
            wanted = shapes if what == "start" or self.schedule.outer.momentum else {}
            found = {name: tuple(values.shape) for name, values in local.get(what, {}).items()}
            if other := found.items() ^ wanted.items():
                raise StateMismatchError(f"saved {what} of {min(other)[0]} is of another model or momentum")
        return local
