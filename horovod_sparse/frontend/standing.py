"""After every start of Horovod: where all ranks stand, and whether their states go on or start anew together.

A sparsifier's state lives longer than Horovod. In elastic training Horovod is started again, with survivors
that have trained and with workers that have not; a checkpoint may be loaded on some ranks, or one of another
step. Sizes and ranks may be what they were, so nothing but an exchange tells. Used by both front ends alike:

1. At the first synchronization after a start, and after a state was loaded, before any bucket communicates,
   every rank carries out `agreed_start`, once for all buckets. That it is due must not depend on what a rank
   finds different: a front end remembers under which start of Horovod (a token that every ``hvd.init()``
   changes) its states were agreed upon. A fresh process has agreed under none.
2. If `Start.anew`, each rank makes fresh states for its present place (`Sparsifier.init`) at `Start.step`, by
   `Start.plan`, and multiplies its residuals by `kept_share`. A worker that has just come holds zeros.
3. Otherwise states are equal already, and nothing changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import StateMismatchError
from horovod_sparse.frontend.agreement import check_same_model
from horovod_sparse.frontend.lines import shared_lines
from horovod_sparse.merging import ParameterFacts, Plan

__all__ = ["Standing", "Start", "agreed_start", "kept_share"]


@dataclass(frozen=True)
class Standing:
    """Where one rank stands.

    Attributes:
        step: synchronizations that its training has done.
        digest: of the sparsifiers' states, as far as they are equal on all ranks; see
            `horovod_sparse.feedback.state.shared_digest`.
        place: (rank, size) that the states were made for.
        plan: which parameters form which bucket.
        parameters: of the model.
        settings: what has to be equal on all ranks, in words, by argument.
        measuring: how far this rank has come with what all measure together, before all plan anew together.
        label: by which the rank tells the names of this training's collectives from those of another that
            has parameters of the same names; need not be equal.
        told: what others have to know to start anew where this rank stands, by bucket: plain values, such as
            `horovod_sparse.feedback.Progress.to_plain` gives.
    """

    step: int
    digest: str
    place: tuple[int, int]
    plan: Plan = field(default_factory=lambda: Plan(()))
    parameters: Sequence[ParameterFacts] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    measuring: str = ""
    label: str = ""
    told: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> dict[str, tuple[int, str, int, float]]:
        """What must be equal of every parameter; devices may differ where every rank has one of its own."""
        return {
            item.name: (item.num_elements, item.dtype, item.group, item.density) for item in self.parameters
        }


@dataclass(frozen=True)
class Start:
    """What all ranks go on with.

    Attributes:
        anew: whether the sparsifiers' states start anew, on all ranks.
        step: of the training, the same on all ranks: the furthest of all.
        plan: of the first rank that is furthest.
        reason: why states start anew, in words; empty where they do not.
        label: of the first rank.
        told: by that rank, where states start anew.
        measures: whether what is measured may go on, since all have come equally far.
    """

    anew: bool
    step: int
    plan: Plan
    reason: str = ""
    label: str = ""
    told: Mapping[str, Any] = field(default_factory=dict)
    measures: bool = True


def agreed_start(standing: Standing) -> Synchronization[Start]:
    """Compares where all ranks stand: one collective, and one more where something differs.

    Args:
        standing: of this rank.

    Returns:
        The same on all ranks.

    Raises:
        StateMismatchError: on every rank alike, if a setting differs, or if they train different models.

    Example:
        >>> from horovod_sparse.simulation import run_lockstep
        >>> survivor, newcomer = Standing(step=7, digest="a", place=(0, 2)), Standing(0, "b", place=(1, 2))
        >>> start = run_lockstep([agreed_start(survivor), agreed_start(newcomer)])[1]
        >>> start.anew, start.step, start.reason
        (True, 7, 'ranks [0] have done 7 steps, ranks [1] 0')
    """
    plan, model = standing.plan.to_dict(), standing.model()
    everyone = yield from shared_lines(
        [
            standing.step,
            standing.digest,
            standing.place,
            _digest([plan, model]),
            dict(standing.settings),
            standing.measuring,
            standing.label,
        ]
    )
    steps, digests, places, plans, settings, measuring, labels = zip(*everyone, strict=True)
    _check_settings(settings)
    reason = ""
    if moved := [rank for rank, place in enumerate(places) if place != [rank, len(everyone)]]:
        rank = moved[0]
        reason = f"rank {rank} of {len(everyone)} was rank {places[rank][0]} of {places[rank][1]}"
    elif len(set(steps)) > 1:
        reason = _apart("have done {} steps", steps)
    elif len(set(plans)) > 1:
        reason = "plans differ"
    elif len(set(digests)) > 1:
        reason = "states differ"
    measures = len(set(measuring)) == 1
    if not reason:
        return Start(False, standing.step, standing.plan, label=labels[0], measures=measures)
    furthest = max(steps)
    told = dict(standing.told) if standing.step == furthest else {}
    everyone = yield from shared_lines([plan, model, told])
    check_same_model([model for _, model, _ in everyone])
    plan, _, told = everyone[steps.index(furthest)]
    return Start(True, furthest, Plan.from_dict(plan), reason, labels[0], told, measures)


def kept_share(old_size: int, size: int) -> float:
    """What a rank that goes on multiplies its residuals by: ``Q / P``, from P ranks to Q.

    A gradient that waits in a residual is applied with the weight it was computed for, 1 / P: so the mean
    over ranks stays, but for what ranks that are gone have taken with them. Newcomers hold zeros.

    Args:
        old_size: P.
        size: Q.

    Example:
        >>> kept_share(2, 3)
        1.5
    """
    return size / old_size


def _check_settings(everyone: Sequence[Mapping[str, str]]) -> None:
    for name in sorted({name for settings in everyone for name in settings}):
        values = [settings.get(name, "not given") for settings in everyone]
        if len(set(values)) > 1:
            raise StateMismatchError(f"{name} differs: {_apart('have {}', values)}; give all ranks the same")


def _apart(words: str, values: Sequence[object]) -> str:
    """The different values, each with its ranks: "ranks [0, 2] have 7, ranks [1] 0"."""
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    first, *others = ranks
    told = [
        f"ranks {ranks[first]} {words.format(first)}",
        *(f"ranks {ranks[item]} {item}" for item in others),
    ]
    return ", ".join(told)


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
