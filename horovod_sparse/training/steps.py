"""Passes: `optimizer.step()` folds, selects, moves and exchanges this rank's own steps.

On each rank ``u`` is the optimizer's own step of its own gradient, and::

    e = e + u;  x = select(e);  e = e - x;  theta_r = theta_r - x;  a = a + x
    every H passes begin the mean over ranks of a; when it is there, D exchanges later:
    theta_r = theta_r + a - mean(a)

With every=1 and delay=0 a rank does not move first: the sum is applied when it is there. Weight decay that is
no part of ``u`` is applied with the mean, so that every rank applies the same.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse import errors
from horovod_sparse.feedback import Recipe
from horovod_sparse.plans import Plan
from horovod_sparse.telemetry import BucketReport, BucketStep
from horovod_sparse.training.collective_errors import Outcome, worst
from horovod_sparse.training.engine import Engine
from horovod_sparse.training.facts import Averaged, RankFacts, mean_of_finite, present_bits, read_facts
from horovod_sparse.training.moves import OwnMoves
from horovod_sparse.training.schedules import Schedule
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.training import Training

#: prefixes of the names of collectives: a process may train several models
_labels = map("steps{}.".format, itertools.count())


class Steps(Training):
    """Runs passes for all front ends; `taken` counts those since the last exchange began."""

    #: True if a loss scaler handles gradients with NaN or Inf
    is_scaled = False

    def __init__(
        self,
        engine: Engine,
        recipe: Recipe,
        settings: Settings,
        schedule: Schedule,
        averaged: Averaged | None = None,
    ) -> None:
        schedule.check(recipe, settings)
        super().__init__(engine, recipe, settings, next(_labels))
        self.schedule, self._averaged = schedule, averaged
        self.taken = self._num_begun = 0
        self._facts = RankFacts()
        self._in_flight: deque[RankFacts] = deque()
        #: a checkpoint's exchanges in flight, until the next pass
        self._to_resume: Any = None
        #: this rank's moves by part, while common parameters are shown; None while they are not
        self.hidden: list[list[tuple[Any, Any]]] | None = None

    def declared(self) -> dict[str, str]:
        buffers = 0 if self._averaged is None else self._averaged.read().size
        return {**super().declared(), **self.schedule.describe(), "numbers in buffers": str(buffers)}

    def agree(self) -> None:
        """Rolls back exchanges in flight, and makes ranks agree (`Training.agree`), after a start or load."""
        self._refuse_within_common()
        if self.is_agreed:
            return
        if self._to_resume is None:
            self.roll_back()
        before, self._num_begun = self.parts, 0
        super().agree()
        self._resume_exchanges(are_reset=self.parts is not before)

    def _refuse_within_common(self) -> None:
        """Raises where `common()` has hidden moves, which a step or a load would lose or apply twice."""
        if self.hidden is not None and self.schedule.moves_at_once:
            words = "a step, load or finish() within `with sync.common():`, which hides moves: end that first"
            raise errors.UnsupportedError(words)

    # a pass

    def pass_(self, *, overflowed: bool = False) -> None:
        """Runs one pass, once its gradients are computed; every rank calls it equally often.

        A rank whose gradients overflowed (the loss scale was too large) takes part; no parameters change.
        """
        for part in self.parts:  # before any is folded
            dtype = part.bucket.info.value_dtype
            if not abs(part.now.rate) <= float(np.finfo(dtype).max):
                raise errors.ArgumentError("lr", part.now.rate, f"a number that {dtype.name} can hold")
        self.agree()
        if self.schedule.moves_at_once:
            self._raise_if_lost()
            if any(part.moves.was_edited() for part in self.parts):
                raise errors.UnsupportedError(
                    "parameters were changed between two steps while they contain moves of this rank "
                    "(every > 1 or delay > 0): change them on all ranks within `with sync.common():`"
                )
            self._move_at_once(overflowed)
            for part in self.parts:
                part.moves.remember_parameters()
        else:
            self._begin_exchange()
            self._apply_exchanges(0)
        self._check_drift_when_due()

    def _check_drift_when_due(self) -> None:
        if self.step >= self.drift.next_step:
            with self.common():
                self._carry_out(self.drift.compare(self.step, self.replicated_arrays()))

    def replicated_arrays(self) -> Sequence[Any]:
        """Returns the arrays that have to be equal on all ranks, which a drift check compares."""
        raise NotImplementedError

    def _send_rank_facts(self, facts: RankFacts, name: str) -> None:
        """Starts the collectives that share `RankFacts` and average the model's buffers in an exchange."""
        # exchanges applied and in flight: if one rank alone has cancelled one, its number differs
        told = facts.gather(self.step + len(self._in_flight))
        facts.task = self.starter.start(f"{name}.facts", told)
        if self._averaged is not None:
            own = self._averaged.read() if facts.averaged is None else facts.averaged[0]
            if own.size:
                facts.averaged = own, self.starter.start(f"{name}.averaged", mean_of_finite(own))
        self._num_begun += 1

    def _read_rank_facts(self, facts: RankFacts) -> list[dict[float, list[int]]]:
        """Returns weight decay by part; raises if ranks are at other exchanges."""
        return read_facts(self.parts, facts.task.value())

    def _average_buffers(self, facts: RankFacts) -> None:
        if facts.averaged is not None and self._averaged is not None:
            own, mean = facts.averaged[0], facts.averaged[1].value()
            self._averaged.move(own, mean)
            with np.errstate(invalid="ignore"):  # a mask's infinite constants
                change = mean - own
                for later in self._in_flight:  # it began without this change, and would make it again
                    if later.averaged is not None:
                        later.averaged = later.averaged[0] + change, later.averaged[1]

    def _move_at_once(self, overflowed: bool) -> None:
        """Folds, selects and applies this rank's own step; begins or applies exchanges that are due."""
        facts = self._facts
        for part in self.parts:
            if part.now.weights[1]:  # the fold reads the parameters
                part.moves.undo_step_ahead()
        reports = [] if overflowed else self._fold()
        bad, first = int(overflowed), 0
        for part in self.parts if not bad else ():
            at = part.bucket.accumulator.report.first_nonfinite
            if at >= 0 and not bad:
                bad = 1 + first + next(number for number, (_, stop) in enumerate(part.spans) if at < stop)
            first += len(part.names)
        for part, report in zip(self.parts, reports, strict=False):
            if bad:
                part.abandon(drop=True)
            else:
                part.moves.select(report)
        if bad:
            facts.bad = facts.bad or bad
            for part in self.parts:
                part.moves.undo_step_ahead()
                part.bucket.skip()
        else:
            facts.present |= present_bits(self.parts)
            before = facts.shrink or [1.0] * len(self.parts)
            facts.shrink = [old * part.now.shrink for old, part in zip(before, self.parts, strict=True)]
            facts.projections.append([part.bucket.accumulator.report.projection for part in self.parts])
        self.taken += 1
        if self.taken >= self.schedule.every:
            self._begin_exchange()
            self._apply_exchanges(self.schedule.delay)

    def _fold(self) -> list[BucketStep]:
        """Folds all parts' gradients, before any is sent; drops them if one part's cannot be folded."""
        try:
            return [part.fold() for part in self.parts]
        except BaseException:
            for part in self.parts:
                part.abandon(drop=True)
            raise

    def _begin_exchange(self, *, finishing: bool = False) -> None:
        facts, self._facts, self.taken = self._facts, RankFacts(), 0
        facts.finishing = finishing
        if not self.schedule.moves_at_once:
            facts.present, facts.shrink = present_bits(self.parts), [part.now.shrink for part in self.parts]
            self._fold()
        facts.shrink = facts.shrink or [1.0] * len(self.parts)
        # collectives in flight need different names
        name = f"pass{self._num_begun % (self.schedule.delay + 2)}"
        with self.starter.together():
            self._send_rank_facts(facts, name)
            for part in self.parts:
                part.moves.begin(self.starter, f"{name}.{part.name}")
        self._in_flight.append(facts)

    def settle(self) -> None:
        """Exchanges remaining moves, and waits for all exchanges in flight; every rank calls it."""
        if self.schedule.moves_at_once:
            self.agree()
            if self.taken:
                self._begin_exchange()
            self._apply_exchanges(0)
            for part in self.parts:
                part.moves.undo_step_ahead()

    def _wait(self, tasks: Sequence[Any]) -> None:
        """Waits for tasks; an error of the collectives, or an interrupt, rolls back exchanges in flight."""
        try:
            self.starter.wait(tasks)
        except BaseException:
            self.roll_back()
            raise

    def _raise_if_lost(self) -> None:
        """Raises the error of any exchange in flight, for example if a rank was lost since the last pass."""
        self._wait([facts.task for facts in self._in_flight if facts.task.done])

    def _apply_exchanges(self, most_in_flight: int) -> None:
        """Applies exchanges, the oldest first, until at most `most_in_flight` are in flight."""
        while len(self._in_flight) > most_in_flight:
            idle = self.starter.idle_seconds
            facts, scale = self._in_flight[0], 1.0 / self.size
            failures, totals, shrunk = list[BaseException](), [], list[dict[float, list[int]]]()
            self._wait([facts.task, *(facts.averaged or ())[1:], *(part.moves.task for part in self.parts)])
            try:
                shrunk = self._read_rank_facts(facts)
            except errors.HorovodSparseError as error:
                failures.append(error)
            if facts.all_finish and not failures and not self.schedule.moves_at_once:  # nobody had gradients
                self._in_flight.popleft()
                for part in self.parts:
                    part.moves.roll_back()
                self._average_buffers(facts)
                return
            for part in self.parts if not failures else ():
                try:
                    totals.append(part.moves.received_sum(scale))
                except errors.HorovodSparseError as error:
                    failures.append(error)
            if failures := self.failures_of_all_shards(failures):
                if not isinstance(failure := worst(failures), errors.NonFiniteGradientError):
                    self.roll_back()
                    raise failure
                self._in_flight.popleft()
                self._cancel_exchange(failures)
                if self.policy.judge(failures, scaled=self.is_scaled).outcome is Outcome.RAISE:
                    raise failure
                continue
            self._in_flight.popleft()
            reports = []
            for part, total, factors in zip(self.parts, totals, shrunk, strict=True):
                started, task = time.perf_counter(), part.moves.task
                num_union = part.moves.apply_mean(total, scale, factors)
                took = time.perf_counter() - started
                given = part.bucket.last, num_union, part.num_bytes, total.notes.norms
                reports.append(BucketReport(*given, task.waited_seconds, took))
            self._average_buffers(facts)
            self.step += 1
            self.telemetry.record(self.step, reports, self.starter.idle_seconds - idle)
            for part, total in zip(self.parts, totals, strict=True) if facts.all_finish else ():
                for _ in range(part.bucket.state.step, int(max(total.notes.steps, default=0))):
                    part.bucket.skip()  # a rank that has had fewer batches goes on with the others

    def _cancel_exchange(self, failures: Sequence[BaseException]) -> None:
        """Cancels the oldest exchange on all ranks, which takes its moves back into the residuals."""
        for part in self.parts:
            part.moves.cancel()

    # checkpoints

    def save(self, **more: Any) -> dict[str, Any]:
        """Returns the checkpoint entry, with this rank's own moves and the exchanges in flight.

        Within `common()` moves are saved in the residual, since common parameters contain none.
        """
        if self.hidden is not None:
            saved = super().save(**more)
            for part, moved in zip(self.parts, self.hidden, strict=True):
                part.add_moves_to(saved["residuals"], moved)
            return saved
        if self._to_resume is not None:
            more["passes"] = self._to_resume
        elif self.schedule.moves_at_once and self.parts:
            array, known = self.engine.to_array, [*self._in_flight, self._facts]
            sent = [one.averaged and array(one.averaged[0]) for one in known]
            facts = [
                [one.bad, hex(one.present), one.shrink, one.projections, averaged]
                for one, averaged in zip(known, sent, strict=True)
            ]
            moves = [part.moves.save(array) for part in self.parts]
            more["passes"] = {"taken": self.taken, "begun": self._num_begun, "facts": facts, "moves": moves}
        return super().save(**more)

    def load(self, entry: Mapping[str, Any] | None) -> None:
        """Loads a checkpoint entry; its exchanges in flight begin again with the next pass."""
        passes = None if entry is None else entry.get("passes")
        if entry is not None and passes is not None:
            plan = Plan.from_dict(entry["plan"])
            if plan != self.plan and set(plan.names()) == set(self.facts):
                raise errors.StateMismatchError(
                    f"the saved state has moves of a rank (every > 1 or delay > 0) by the plan {plan}: train "
                    f"by that one, not by {self.plan}, or save after finish()"
                )
            if entry["size"] != self.size:
                passes = {**passes, "shares": [[self.factor_for(entry), passes["moves"]]]}
        self.roll_back()
        super().load(entry)
        self._to_resume = passes

    def pending_moves(self) -> list[list[tuple[Any, Any]]]:
        """Returns each part's moves that no mean has replaced yet."""
        self._load_moves()
        return [part.moves.pending() for part in self.parts]

    def _load_moves(self) -> None:
        if self._to_resume is not None:
            for part, moves in zip(self.parts, self._to_resume["moves"], strict=True):
                part.moves = OwnMoves(part).loaded(moves)

    def _resume_exchanges(self, are_reset: bool) -> None:
        """Begins a checkpoint's exchanges in flight; rolls them back if ranks or schedule have changed."""
        if self._to_resume is None:
            return
        self._load_moves()
        passes, self._to_resume = self._to_resume, None
        if are_reset or "shares" in passes or not self.schedule.moves_at_once:
            for part in self.parts:
                part.moves.roll_back()  # those of the rank from which the parameters were loaded
                part.moves = part.new_moves()
            for number, (share, saved) in enumerate(passes.get("shares", ())):
                for part, one in zip(self.parts, saved, strict=True):
                    for indices, values in OwnMoves(part).loaded(one).pending():
                        part.bucket.accumulator.add(indices, values * (share - (number == 0)))
            return
        known = []
        for bad, bits, shrink, projections, own in passes["facts"]:
            known.append(RankFacts(bad, False, int(bits, 16), shrink, projections))
            known[-1].averaged = None if own is None else (np.asarray(own), None)
        self._num_begun = passes["begun"] - len(known) + 1
        for self._facts in known[:-1]:
            self._begin_exchange()
            self._apply_exchanges(self.schedule.delay)
        self._facts, self.taken = known[-1], passes["taken"]

    def roll_back(self) -> None:
        """Undoes moves that no mean has replaced, and returns them to the residual."""
        self._refuse_within_common()
        for part in self.parts:
            if self._to_resume is None:
                part.moves.roll_back()
            else:  # a checkpoint's, whose parameters are replaced, too
                part.moves = part.new_moves()
        self._to_resume = None
        self._in_flight.clear()
        self._facts, self.taken = RankFacts(), 0

    def finish(self) -> None:
        """Ends a training, so that all ranks have equal parameters; all ranks call it.

        A rank that has taken fewer steps takes part in the others' exchanges until they finish, too.
        """
        if not self.parts:
            return
        self.agree()
        for part in self.parts:
            part.moves.undo_step_ahead()
        newest = RankFacts()
        while not newest.all_finish:
            self._begin_exchange(finishing=True)
            newest, is_late = self._in_flight[-1], len(self._in_flight) > 1
            self._wait([newest.task])
            # as many stay in flight as in a pass: ranks in either compare models after the same exchange
            self._apply_exchanges(0 if newest.all_finish else self.schedule.delay)
            self._check_drift_when_due()
        # the last exchange may have begun before others changed the statistics
        if is_late and self._averaged is not None and (own := self._averaged.read()).size:
            self._averaged.move(own, self._carry_out(mean_of_finite(own)))

    @contextlib.contextmanager
    def common(self) -> Iterator[None]:
        """Returns a context in which parameters are the common ones, equal on all ranks."""
        before = self.hidden
        self.hidden = self.pending_moves() if before is None else before
        try:
            with contextlib.ExitStack() as stack:
                for part in self.parts:
                    stack.enter_context(part.moves.common())
                yield
        finally:
            self.hidden = before
