"""`network_share`: the network may take so much of a step. Whether that comes true; what is chosen anew."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

from horovod_sparse.collectives import Synchronization
from horovod_sparse.planning.calibration.steps import BackwardTimes, linked, mean_times
from horovod_sparse.planning.request import Decision
from horovod_sparse.planning.warmup import WarmUp, told_by_first
from horovod_sparse.plans.dense import ClusterFacts
from horovod_sparse.plans.plan import Plan

_log = logging.getLogger("horovod_sparse")

#: ranks compare what was measured every so many steps, of which the last few are recorded
PERIOD, _RECORDED = 12, 10
#: the plan changes where the share is so many times too large, or too small, in two looks
_TOO_MUCH, _TOO_LITTLE = 1.2, 0.6
#: or in one, where it is off by so many times more, which no other program has caused
_AT_ONCE = 2.0
#: a larger density that turns out to be too much within three looks is tried again after so many steps, and
#: after twice as many each time
_REST, _TRIAL = 2 * PERIOD, 3 * PERIOD
#: and another density has to be so many times this one
_WORTH = 1.5


class Following(WarmUp):
    """Holds the network's share of a training: measures now and then, and chooses anew where it is off.

    Ranks count steps, which are the same on all of them; what each has measured they share before anything is
    decided from it, so all go on alike. A link is told from what was waited for: the time of every collective
    is multiplied by what makes the prediction for the plan in use come out as it was measured.
    """

    _steps, _rest, _wait, _raised, _seen, _stopped, _warned = 0, 0, _REST, -_TRIAL, 0, False, ""

    def after_step(self, plan: Plan, step: int, waited: float = math.nan) -> Plan | None:
        """See `WarmUp.after_step`; once something is decided, ranks compare shares every `PERIOD` steps."""
        if self.decision is None or self._stopped:
            return super().after_step(plan, step, waited)
        self._steps += 1
        self._rest = max(0, self._rest - 1)
        place = self._steps % PERIOD
        self._end(waited)
        if self._recorder is not None and place == 0:
            return self._review(plan)
        if place == PERIOD - _RECORDED:
            self._record(0, _RECORDED)
        self._begin()
        return None

    def stop_measuring(self) -> None:
        """See `WarmUp.stop_measuring`: some rank would not be there where the others compare."""
        super().stop_measuring()
        self._stopped = True

    @property
    def position(self) -> str:
        """As far as `WarmUp`'s, and steps since it has decided."""
        return f"{super().position} {self._steps} {self._rest} {self._wait} {self._raised} {self._seen}"

    def tell(self) -> None:
        """See `WarmUp.tell`; every rank says once what to write where no plan keeps to the share."""
        super().tell()
        remedy = "" if self.decision is None else self.decision.remedy
        line, _, _ = remedy.partition(": predicted")  # the share predicted differs a little with every look
        if line not in ("", self._warned):
            self._warned = line
            _log.warning("no plan keeps to %s: write %s", self.request.share_words, remedy)

    def _keep(self) -> None:
        super()._keep()
        if self._own is not None and not any(self._own.backward_seconds.values()):
            # gradients came all at once: two thirds of computing are backward
            whole, names = self._own.forward_seconds, list(self._own.backward_seconds)
            each = dict.fromkeys(names, 2 / 3 * whole / max(1, len(names)))
            self._own = dataclasses.replace(self._own, backward_seconds=each, forward_seconds=whole / 3)

    def _review(self, plan: Plan) -> Plan | None:
        self._keep()
        share, decision, own = self.request.share, self.decision, self._own
        if decision is None or share is None:
            return None
        rests, before = self._rest > 0, self._seen

        def coroutine(where: ClusterFacts, **_: Any) -> Synchronization[Decision]:
            measured = yield from mean_times(own)
            found = share_measured(measured)
            off, whole = _off(found, share.limit), not plan.buckets and plan.values is None
            far = off if _off(found, share.limit, _AT_ONCE) else before
            fine = off == 0 and not (decision.remedy and found <= share.limit)
            futile = rests if decision.remedy and off > 0 else off < 0 and (rests or whole)
            if fine or futile or off not in (0, far):
                return dataclasses.replace(decision, measured=found)
            density = self._sparsifier.density if plan.density is None else plan.density
            sent = self._sparsifier.sent_as(density, plan.values if plan.buckets else None)
            given = plan, self._parameters, sent, where.size, where.topology
            profile = linked(decision.profile, measured, *given)
            asked = self.request, where, self._parameters, self._sparsifier
            changed = yield from told_by_first(*asked, profile)
            kept = plan if _alike(plan, changed.plan) else changed.plan
            return dataclasses.replace(changed, plan=kept, measured=found)

        self.decision = changed = self._measuring.decided(self._parameters, self._topology(), coroutine)
        self._seen = _off(changed.measured, share.limit)
        predicted, tried = decision.predicted_seconds, changed.profile is not decision.profile
        if self._measuring.rank == 0:
            off = changed.measured - (1.0 - predicted["without network"] / predicted["taken"])
            told = f"measured: {changed.measured:.1%} of an iteration is network, "
            told += f"{100 * off:+.1f} points to the prediction"
            _log.info("%s%s", told, "" if changed.plan == plan else "; chosen anew")
        if not tried:
            return None
        if changed.measured <= share.limit:
            self._raised, self._rest = self._steps, 0
        else:
            self._wait = 2 * self._wait if self._steps - self._raised <= _TRIAL else _REST
            self._rest = self._wait
        if changed.plan == plan and changed.remedy == decision.remedy:
            self._rest = self._wait
            return None
        self.tell()
        return None if changed.plan == plan else changed.plan


def _alike(one: Plan, other: Plan) -> bool:
    """Whether a change is not worth its fresh sparsifiers: both dense, or nearly as dense as each other."""
    if not (one.buckets and other.buckets) or one.values != other.values:
        return (one.buckets, one.values) == (other.buckets, other.values)
    ratio = (one.density or 1.0) / (other.density or 1.0)
    return 1 / _WORTH < ratio < _WORTH


def _off(found: float, limit: float, times: float = 1.0) -> int:
    """1 where the share is so many times too large, -1 where it could be larger."""
    return 1 if found > times * _TOO_MUCH * limit else -1 if found < _TOO_LITTLE * limit / times else 0


def share_measured(times: BackwardTimes) -> float:
    """Of an iteration that is network; where nobody knows what was waited for, all that is not computing."""
    if not times.iteration_seconds:
        return 0.0
    computing = times.forward_seconds + math.fsum(times.backward_seconds.values())
    known = not math.isnan(times.network_seconds)
    seconds = times.network_seconds if known else times.iteration_seconds - computing
    return max(0.0, seconds / times.iteration_seconds)
