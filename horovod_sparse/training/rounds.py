"""Local steps: each rank trains alone for many steps, then all exchange how far they have come.

``theta_r`` is what H steps of rank r's own optimizer make of the common ``theta``. What buckets carry is
``theta - theta_r``, as if it were a gradient, so feedback, sparsifiers and messages are what they are. The
mean over ranks moves the common parameters, from which all go on (`OuterStep`).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from horovod_sparse.collectives import AllReduce, Broadcast, Synchronization, shared_lines
from horovod_sparse.errors import DeadlineError, StateMismatchError
from horovod_sparse.plans import Plan, fixed_bytes
from horovod_sparse.sparsifiers import SparseSum
from horovod_sparse.sparsifiers.base import SelectAndGather
from horovod_sparse.sparsifiers.dense import Dense
from horovod_sparse.training.agreement import differences, kept_share
from horovod_sparse.training.drift import Entry
from horovod_sparse.training.engine import Engine, Facts, Starter
from horovod_sparse.training.local_settings import RoundSettings
from horovod_sparse.training.outcome import Outcome
from horovod_sparse.training.parts import assign_residuals, shared_out
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.training import Training

#: go before the names of collectives: a process may train several models
_labels = map("local{}.".format, itertools.count())
_log = logging.getLogger("horovod_sparse")


def mean_over_senders(sum_: SparseSum) -> SparseSum:
    """At each position the mean over those ranks that have sent it.

    Example:
        >>> indices, counts = np.array([2, 5, 2], np.int32), np.array([2, 1])
        >>> mean_over_senders(SparseSum(indices, np.array([1.0, 4.0, 3.0]), counts)).values
        array([0.5, 4. , 1.5])
    """
    _, which, senders = np.unique(sum_.indices, return_inverse=True, return_counts=True)
    return dataclasses.replace(sum_, values=sum_.values / senders[which].astype(sum_.values.dtype))


def clipped_to_median(sum_: SparseSum) -> SparseSum:
    """No rank moves more than the median rank: what each has sent is scaled down to the median of the norms.

    Example:
        >>> sum_ = SparseSum(np.arange(3, dtype=np.int32), np.array([9.0, 1.0, 2.0]), np.array([1, 1, 1]))
        >>> clipped_to_median(sum_).values
        array([2., 1., 2.])
    """
    pieces = np.split(sum_.values, np.cumsum(sum_.counts)[:-1])
    norms = [float(np.linalg.norm(piece.astype(np.float64))) for piece in pieces]
    most = float(np.median(norms))
    clipped = [
        piece * piece.dtype.type(most / norm) if norm > most else piece
        for piece, norm in zip(pieces, norms, strict=True)
    ]
    return dataclasses.replace(sum_, values=np.concatenate(clipped))


class Kept(Protocol):
    """The common parameters of a part, and how far this rank has come from them.

    Attributes:
        start: [n], equal on all ranks.
        velocity: [n], of the outer step; empty without momentum.
        sent: [n], the parameters as the exchange under way has them; empty without a delay.
    """

    start: Any
    velocity: Any
    sent: Any

    def begin(self) -> None:
        """The parameters as they are now are the common ones."""

    def return_to_start(self) -> None:
        """This rank goes on from `start`, and keeps what it has learned while an exchange was under way.

        A NaN of that time stays, too: all ranks hear of it in the next exchange.
        """

    def forget(self) -> None:
        """What this rank has learned while an exchange was under way is lost: it had diverged before."""

    def entry(self, number: int, name: str) -> Entry:
        """A common parameter, for ranks to compare."""

    def to_host(self, name: str) -> np.ndarray:
        """`start`, `velocity` or `sent`, [n]."""

    def from_host(self, name: str, values: np.ndarray) -> None:
        """Replaces it."""


class RoundEngine(Engine, Protocol):
    """An engine whose parts' gradients are displacements; each part's `gradient` is `Kept`."""

    @property
    def starter(self) -> Starter:
        """Who runs coroutines; made when it is asked for first."""

    def advance(self) -> None:
        """Carries on what is under way, without waiting."""


class Buffers:
    """What a model has beside parameters, and no gradient moves: floats are averaged, others are rank 0's."""

    def __init__(self) -> None:
        self._known = self._sums()

    def entries(self) -> Sequence[Any]:
        """Those that have elements, as they are now: `drift.Entry` with `write`, which replaces its bytes."""
        raise NotImplementedError

    def wide(self, entry: Any) -> np.ndarray | None:
        """The elements of a float in float64, one behind the other; None of what is none."""
        raise NotImplementedError

    def assign(self, entry: Any, wide: np.ndarray) -> None:
        """Replaces a float."""
        raise NotImplementedError

    def _sums(self) -> dict[str, bytes]:
        return {entry.name: entry.sums().tobytes() for entry in self.entries()}

    def changed(self) -> list[str]:
        """Names of those whose contents have changed on this rank since the last exchange."""
        return [name for name, sums in self._sums().items() if sums != self._known.get(name)]

    def shared(self, names: Sequence[str], root: int | None = None) -> Synchronization[None]:
        """Makes these equal on all ranks; where a root is given, all of them, and what it has."""
        some = [one for one in self.entries() if root is not None or one.name in names]
        kinds = yield from shared_lines({one.name: one.kind for one in some})
        if differing := differences(kinds, "nothing"):
            what = "; ".join(differing.values())
            raise StateMismatchError(f"buffer {what}. What differs by rank must be no buffer of the model")
        sums: dict[str, np.ndarray] = {}
        for one in some if root is None else ():
            if (wide := self.wide(one)) is not None:  # who has diverged spoils no other's
                sums[one.name] = np.append(wide, 1.0) if np.isfinite(wide).all() else np.zeros(wide.size + 1)
        if sums:
            total = yield AllReduce(np.concatenate(list(sums.values())))
            pieces = np.split(np.asarray(total), np.cumsum([*map(len, sums.values())])[:-1])
            sums = dict(zip(sums, pieces, strict=True))
        for one in some:
            if one.name in sums and (count := sums[one.name][-1]):
                self.assign(one, sums[one.name][:-1] / count)
            else:
                yield from _brought(one, root or 0)
        self._known = self._sums()


def _brought(entry: Any, root: int) -> Synchronization[None]:
    """Replaces a buffer by that of another rank, on all ranks."""
    own = entry.read()
    words = np.zeros(-(-own.size // 4), np.int32)
    words.view(np.uint8)[: own.size] = own
    received = np.ascontiguousarray((yield Broadcast(words, root)))
    entry.write(received.view(np.uint8)[: own.size])


class Rounds(Training):
    """Counts steps, and lets displacements be exchanged every so many of them.

    Attributes:
        rounds: what the user asks for.
        taken: local steps since the last exchange began.
        step: exchanges done.
    """

    engine: RoundEngine

    def __init__(
        self, engine: RoundEngine, rounds: RoundSettings, settings: Settings, facts: Facts, buffers: Buffers
    ) -> None:
        super().__init__(engine, rounds.recipe, settings, next(_labels))
        self.rounds, self._buffers = rounds, buffers
        self.taken = 0
        #: steps since the exchange under way began, and its first task; None where none is
        self._flying: int | None = None
        self._header: Any = None
        #: number of ranks, and residuals after an exchange given up here that others may have completed
        self._if_completed: tuple[int, Sequence[Mapping[str, Any]]] | None = None
        self._has_begun = False
        #: steps of this process, when the first of them was, and seconds that exchanges have held it up
        self._num_steps, self._since, self._held_up = 0, 0.0, 0.0
        self.begin(facts, self.first_plan_of(facts))

    @property
    def bytes_per_step(self) -> float:
        """Payload bytes that this rank sends in an exchange, over the local steps from one to the next."""
        mean = self.telemetry.mean
        return 0.0 if mean is None else mean.bytes_sent / self.rounds.every

    @property
    def share_computing(self) -> float:
        """The share of this process' time since its first step that exchanges have not held it up."""
        passed = time.perf_counter() - self._since
        return 1.0 - self._held_up / passed if self._num_steps else 1.0

    def summary(self) -> str:
        """In one line: bytes per local step, time computing, and the means of exchanges."""
        return (
            f"{self.step} exchanges, each after {self.rounds.every} steps: {self.bytes_per_step:,.0f} B per "
            f"step, {100 * self.share_computing:.1f} % of the time computing; {self.telemetry.summary()}"
        )

    def first_plan_of(self, facts: Facts) -> Plan:
        """Buckets of 32 MiB; where everything is sent, none."""
        parameters = [fact for fact, _ in facts.values()]
        if isinstance(self.recipe.sparsifier, Dense):
            return Plan((), tuple(fact.name for fact in parameters))
        return fixed_bytes(parameters)

    def build(self, plan: Plan) -> None:
        kept = self._kept("start", "velocity", "sent")
        super().build(plan)
        self._assign_kept(kept)

    def _kept(self, *names: str) -> dict[str, dict[str, Any]]:
        """What parts have of these (see `Kept`), by parameter."""
        kept: dict[str, dict[str, Any]] = {name: {} for name in names}
        for part, what in itertools.product(self.parts, kept):
            values = part.gradient.to_host(what)
            if values.size:
                for number, (name, place) in enumerate(zip(part.names, part.places, strict=True)):
                    kept[what][name] = part.shaped(number, values[slice(*place)])
        return kept

    def _assign_kept(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        for part, what in itertools.product(self.parts, kept):
            if kept[what].keys() >= set(part.names):
                flat = [part.flat(number, kept[what][name]) for number, name in enumerate(part.names)]
                part.gradient.from_host(what, np.concatenate(flat))

    # what ranks agree upon

    def before_step(self) -> None:
        """Before every step of the optimizer. All ranks meet in the first, and after a start or a load."""
        if not (self._has_begun and self.is_agreed):
            self.agree()
            self._since, self._num_steps, self._held_up = time.perf_counter(), 0, 0.0

    def agree(self, *, as_first: bool = False) -> None:
        """See `Training.agree`; who has just come, or is behind, takes what the furthest rank has.

        With `as_first` ranks that all begin take what the first one has, and need not begin alike.
        """
        if self._has_begun and self.is_agreed:
            return
        if self._flying is not None:  # it was under way when the collectives ended
            self.engine.advance()
            self._give_up()
        for part in self.parts:
            if not self._has_begun:
                part.gradient.begin()
            elif self._if_completed is None:  # parameters may have been loaded since something was sent
                part.gradient.forget()
        before, old_size = self.step, self.made_for[1]
        super().agree()
        if self.size > 1:
            try:
                self._together(self._follow_furthest(before, old_size, as_first))
            except BaseException:
                self.step = before  # what is common at the agreed step has not come
                raise
        self._has_begun, self._if_completed = True, None

    @property
    def _is_fresh(self) -> bool:
        return not self._has_begun

    def _follow_furthest(self, own_step: int, old_size: int, as_first: bool) -> Synchronization[None]:
        """Brings common parameters, velocity, buffers and the place in its round from the furthest rank."""
        own = [self._has_begun, own_step]
        told = yield from shared_lines([*own, self.taken])
        places = [place for *place, _ in told]
        furthest = max(places)
        root, num_new = places.index(furthest), [begun for begun, _ in places].count(False)
        if as_first or any(place != furthest for place in places):
            for part in self.parts:
                for what in ("start", "velocity"):
                    values = part.gradient.to_host(what)
                    if values.size:
                        received = yield Broadcast(np.ascontiguousarray(values).view(np.int32), root)
                        part.gradient.from_host(what, np.ascontiguousarray(received).view(values.dtype))
                if own != furthest or not self._has_begun:
                    part.gradient.return_to_start()
            yield from self._buffers.shared((), root)
            if self._if_completed is not None and own_step < furthest[1]:
                size, held = self._if_completed
                held = shared_out(held, kept_share(size, self.size), self.recipe.feedback)
                assign_residuals(self.parts, held, self._progress())
            self.taken = max(taken for *place, taken in told if place == furthest)
        num_lost = old_size + num_new - self.size
        if self.rank == root and self._has_begun and num_lost > 0:
            words = "%d ranks are gone, and what waited in their residuals; %d have come, after exchange %d"
            _log.warning(words, num_lost, num_new, own_step)
        yield from self._compare()

    def _compare(self) -> Synchronization[None]:
        """Whether the common parameters are equal on all ranks."""
        entries = [part.gradient.entry(*one) for part in self.parts for one in enumerate(part.names)]
        yield from self.drift.run(self.step, entries)

    # an exchange

    def after_step(self) -> None:
        """After every step of the optimizer: exchanges where it is time."""
        self.taken += 1
        self._num_steps += 1
        if self._flying is None and self.taken < self.rounds.every:
            return
        began = time.perf_counter()
        if self._flying is not None:
            self._flying += 1
            self.engine.advance()
            if self._flying >= self.rounds.delay:
                self._settle()
        if self.taken >= self.rounds.every:
            self._begin()
            if not self.rounds.delay:
                self._settle()
        self._held_up += time.perf_counter() - began

    def finish(self) -> None:
        """Ends a training: exchanges until all ranks have called it; all call it, at whatever step they are.

        Ranks that have skipped steps, or have had fewer batches, are met by the others' exchanges.
        """
        self.before_step()
        while True:
            self._begin(finishing=True)
            if self._settle():
                return

    def _begin(self, *, finishing: bool = False) -> None:
        """Starts an exchange, after the one that is under way."""
        if self._flying is not None:
            self._settle()
        starter = self.engine.starter
        self._header = starter.start("header", shared_lines([finishing, self._buffers.changed()]))
        for part in self.parts:
            if part.streams is not None:
                part.streams.note()
            part.start(starter)
        self._flying, self.taken, self._if_completed = 0, 0, None

    def _waited(self) -> list[BaseException]:
        tasks = [part.task for part in self.parts]
        self.engine.starter.wait(tasks)
        return [task.error for task in tasks if task.error is not None]

    def _of_all(self, errors: list[BaseException]) -> list[BaseException]:
        """Those of ranks, too, that exchange other shards of the same model."""
        return errors

    def _settle(self) -> bool:
        """Waits for the exchange under way and applies it; whether all ranks are finishing."""
        self._flying, starter = None, self.engine.starter
        idle = starter.idle_seconds
        try:
            starter.wait([self._header])
            told = self._header.value()
            errors = self._waited()
            diverged = any(self.rank in getattr(error, "where", ()) for error in errors)
            errors = self._of_all(errors)
        except Exception as error:
            if not isinstance(error, DeadlineError):  # after one of these a thread may go on
                self._give_up()
            raise
        verdict = self.policy.judge(errors)
        for part in self.parts:
            if verdict.error is not None:
                part.abandon(drop=verdict.drop)
            if diverged:  # what it sent has been taken out of its residual, and is needed no more
                part.gradient.forget()
        if verdict.error is not None:
            for part in self.parts:
                part.gradient.return_to_start()
            if verdict.outcome is not Outcome.SKIPPED:
                raise verdict.error
            return False
        reports = [part.apply(self._scale_of(part)) for part in self.parts]
        self.step += 1
        self.telemetry.record(self.step, reports, starter.idle_seconds - idle)
        changed = sorted({name for _, names in told for name in names})
        if changed:
            task = starter.start("buffers", self._buffers.shared(changed))
            starter.wait([task])
            task.value()
        if self.step >= self.drift.next_step:
            self._together(self._compare())
        return all(finishing for finishing, _ in told)

    def _give_up(self) -> None:
        """Of an exchange: parameters have what it would have brought, and it is due in the next step."""
        self._flying = None
        self.taken += self.rounds.every
        for part in self.parts:
            if part.streams is not None:
                part.streams.join()
        self._if_completed = self.made_for[1], self.held()[0]
        for part in self.parts:
            part.abandon(drop=True)

    def _scale_of(self, part: Any) -> float:
        if not isinstance(part.bucket.recipe.sparsifier, SelectAndGather):
            return 1.0 / self.size
        if self.rounds.clip:
            part.task.result = clipped_to_median(part.task.result)
        if self.rounds.combine == "ranks":
            return 1.0 / self.size
        part.task.result = mean_over_senders(part.task.result)
        return 1.0

    # checkpoints

    def save(self, **more: Any) -> dict[str, Any]:
        """See `Training.save`; an exchange under way is settled first, so all ranks save at the same step."""
        if self._flying is not None:
            self._settle()
        local = {"taken": self.taken, "has_begun": self._has_begun, **self._kept("start", "velocity")}
        return super().save(local=local, **more)

    def load(self, entry: Mapping[str, Any] | None) -> None:
        """See `Training.load`; without an entry the parameters as they are then are the common ones."""
        if self._flying is not None:
            self._settle()
        local = {} if entry is None else self._checked_local(entry)
        super().load(entry)
        self._has_begun, self._if_completed = bool(local.get("has_begun")), None
        self.taken = int(local.get("taken", 0))
        self._assign_kept({what: local.get(what, {}) for what in ("start", "velocity")})

    def _checked_local(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        local = entry.get("local")
        if not isinstance(local, Mapping):
            raise StateMismatchError("the saved state is of a training that synchronized every step")
        shapes = {name: tuple(fact.shape or ()) for name, (fact, _) in self.facts.items()}
        for what in ("start", "velocity"):
            wanted = shapes if what == "start" or self.rounds.outer.momentum else {}
            found = {name: tuple(values.shape) for name, values in local.get(what, {}).items()}
            if found != wanted:
                raise StateMismatchError(f"local.{what} in the saved state has other parameters, or shapes")
        return local
