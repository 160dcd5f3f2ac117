"""What ranks agree upon before they synchronize: where they stand, their plan, and names of collectives.

A sparsifier's state lives longer than Horovod. In elastic training Horovod is started again, with survivors
that have trained and with workers that have not; a checkpoint may be loaded on some ranks, or one of another
step. Sizes and ranks may be what they were, so nothing but an exchange tells. Used by both front ends alike:

0. First of all ranks compare what has to be equal, by `compared`: under one name whatever is compared, so
   that ranks which do not do the same meet there, and nowhere else.
1. At the first synchronization after a start, and after a state was loaded, before any bucket communicates,
   every rank carries out `agreed_start`, once for all buckets. That it is due must not depend on what a rank
   finds different: a front end remembers under which start of Horovod (a token that every ``hvd.init()``
   changes) its states were agreed upon. A fresh process has agreed under none.
2. If `Start.anew`, each rank makes fresh states for its present place (`Sparsifier.init`) at `Start.step`, by
   `Start.plan`, and multiplies its residuals by `kept_share`. A worker that has just come holds zeros.
3. Otherwise states are equal already, and nothing changes.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from horovod_sparse._version import __version__
from horovod_sparse.collectives import AllGather, Synchronization
from horovod_sparse.errors import StateMismatchError
from horovod_sparse.frontend.messages import TRANSPORT_VARIABLE, transport_asked
from horovod_sparse.merging import ParameterFacts, Plan


def shared_lines(value: Any) -> Synchronization[list[Any]]:
    """What every rank gave, in rank order.

    Args:
        value: of this rank: numbers, strings, None, and lists and dicts of them.

    Example:
        >>> from horovod_sparse.simulation import run_lockstep
        >>> run_lockstep([shared_lines({"rank": rank}) for rank in range(2)])[0]
        [{'rank': 0}, {'rank': 1}]
    """
    line = json.dumps(value).encode()
    line += b" " * (-(len(line) + 1) % 4) + b"\n"
    gathered = yield AllGather(np.frombuffer(line, np.int32))
    return [json.loads(item) for item in np.array(gathered).tobytes().splitlines()]


def settings(compression: object, engine: str, **arguments: object) -> dict[str, str]:
    """What has to be equal on all ranks, in words, by argument; the code that runs among it.

    Args:
        compression: a recipe, or the name of what else is done to gradients.
        engine: who synchronizes them.
        **arguments: that change what is applied.
    """
    describe = getattr(compression, "describe", lambda: str(compression))
    given = {"compression": describe(), "engine": engine, TRANSPORT_VARIABLE: transport_asked(), **arguments}
    return {name: str(value) for name, value in given.items()} | {"version": _code_version()}


@functools.cache
def _code_version() -> str:
    """The package's version, and a digest of its files: of two checkouts the version may be the same."""
    digest, root = hashlib.blake2b(digest_size=6), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{__version__} ({digest.hexdigest()})"


def compared(given: Mapping[str, str], parameters: Sequence[ParameterFacts] = ()) -> Synchronization[None]:
    """Refuses ranks that do not do the same: one collective, and one more where their models differ.

    Every rank begins with it, whatever it goes on with: where ranks would go on differently, they would wait
    for each other's collectives for ever, or add up what does not belong together.

    Args:
        given: by `settings`.
        parameters: of the model; none where others compare them.

    Raises:
        StateMismatchError: on every rank alike: all settings that differ, with values and ranks, or the
            first parameter that does.

    Example:
        >>> from horovod_sparse.simulation import run_lockstep
        >>> ranks = [compared({"op": op}) for op in ("Sum", "Average")]
        >>> print(run_lockstep(ranks, keep_errors=True)[0])
        op differs: ranks [0] have Sum, ranks [1] Average; give all ranks the same
    """
    model = model_of(parameters)
    everyone = yield from shared_lines([dict(given), _digest(model)])
    names = dict.fromkeys(name for theirs, _ in everyone for name in theirs)
    values = {name: [theirs.get(name, "not given") for theirs, _ in everyone] for name in names}
    differing = [
        f"{name} differs: {ranks_apart('have {}', each)}"
        for name, each in values.items()
        if len(set(each)) > 1
    ]
    if differing:
        raise StateMismatchError(f"{'; '.join(differing)}; give all ranks the same")
    if len({digest for _, digest in everyone}) > 1:
        check_same_model((yield from shared_lines(model)))


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
        measuring: how far this rank has come with what all measure together, before all plan anew together.
        label: by which the rank tells the names of this training's collectives from those of another that
            has parameters of the same names; need not be equal.
        told: what others have to know to start anew where this rank stands, by bucket: plain values, such as
            `horovod_sparse.feedback.Progress.to_plain` gives.
        column: with two levels, whose states have to be equal to this rank's: those of its column.
        elsewhere: whether this rank holds something of others' shards.
    """

    step: int
    digest: str
    place: tuple[int, int]
    plan: Plan = field(default_factory=lambda: Plan(()))
    parameters: Sequence[ParameterFacts] = ()
    measuring: str = ""
    label: str = ""
    told: Mapping[str, Any] = field(default_factory=dict)
    column: int = 0
    elsewhere: bool = False


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
        elsewhere: whether some rank holds something of others' shards.
    """

    anew: bool
    step: int
    plan: Plan
    reason: str = ""
    label: str = ""
    told: Mapping[str, Any] = field(default_factory=dict)
    measures: bool = True
    elsewhere: bool = False


def agreed_start(standing: Standing) -> Synchronization[Start]:
    """Compares where all ranks stand: one collective, and one more where something differs.

    Args:
        standing: of this rank.

    Returns:
        The same on all ranks.

    Raises:
        StateMismatchError: on every rank alike, if they train different models.

    Example:
        >>> from horovod_sparse.simulation import run_lockstep
        >>> survivor, newcomer = Standing(step=7, digest="a", place=(0, 2)), Standing(0, "b", place=(1, 2))
        >>> start = run_lockstep([agreed_start(survivor), agreed_start(newcomer)])[1]
        >>> start.anew, start.step, start.reason
        (True, 7, 'ranks [0] have done 7 steps, ranks [1] 0')
    """
    plan, model = standing.plan.to_dict(), model_of(standing.parameters)
    everyone = yield from shared_lines(
        [
            standing.step,
            standing.digest,
            standing.place,
            _digest([plan, model]),
            standing.measuring,
            standing.label,
            standing.column,
            standing.elsewhere,
        ]
    )
    steps, digests, places, plans, measuring, labels, columns, elsewhere = zip(*everyone, strict=True)
    reason = ""
    if moved := [rank for rank, place in enumerate(places) if place != [rank, len(everyone)]]:
        rank = moved[0]
        reason = f"rank {rank} of {len(everyone)} was rank {places[rank][0]} of {places[rank][1]}"
    elif len(set(steps)) > 1:
        reason = ranks_apart("have done {} steps", steps)
    elif len(set(plans)) > 1:
        reason = "plans differ"
    elif len(set(zip(columns, digests, strict=True))) > len(set(columns)):
        reason = "states differ"
    measures = len(set(measuring)) == 1
    if not reason:
        held = any(elsewhere)
        return Start(False, standing.step, standing.plan, "", labels[0], {}, measures, held)
    furthest = max(steps)
    told = dict(standing.told) if standing.step == furthest else {}
    everyone = yield from shared_lines([plan, model, told])
    check_same_model([model for _, model, _ in everyone])
    plan, _, told = everyone[steps.index(furthest)]
    # other buckets have other shards
    return Start(True, furthest, Plan.from_dict(plan), reason, labels[0], told, measures, True)


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


def ranks_apart(words: str, values: Sequence[object]) -> str:
    """The different values, each with its ranks.

    Args:
        words: before the first value, with a place for it.
        values: of every rank.

    Example:
        >>> ranks_apart("have {}", [7, 0, 7])
        'ranks [0, 2] have 7, ranks [1] 0'
    """
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


def describe_model(plan: Plan, parameters: Sequence[ParameterFacts]) -> bytes:
    """A rank's plan and parameters as one line, to be gathered from all ranks."""
    return json.dumps([plan.to_dict(), model_of(parameters)]).encode() + b"\n"


def model_of(parameters: Sequence[ParameterFacts]) -> dict[str, tuple[object, ...]]:
    """What must be equal of every parameter; devices may differ where every rank has one of its own."""
    return {
        item.name: (item.num_elements, item.dtype, item.group, item.density, item.shape)
        for item in parameters
    }


def agreed_plan(gathered: bytes) -> Plan:
    """The plan of the first rank.

    Args:
        gathered: what `describe_model` gave on every rank, one behind the other in rank order.

    Raises:
        StateMismatchError: on every rank alike, if the models differ.

    Example:
        >>> facts = [ParameterFacts("weight", 10)]
        >>> line = describe_model(Plan((("weight",),)), facts)
        >>> agreed_plan(line + line).buckets
        (('weight',),)
    """
    everyone = [json.loads(line) for line in gathered.splitlines()]
    check_same_model([model for _, model in everyone])
    return Plan.from_dict(everyone[0][0])


def check_same_model(models: Sequence[Mapping[str, Any]]) -> None:
    """Refuses ranks that train different models.

    Args:
        models: by rank: what must be equal of every parameter, by name.

    Raises:
        StateMismatchError: naming a parameter that differs.
    """
    first = models[0]
    for rank, other in enumerate(models):
        if differing := sorted(
            name for name in first.keys() | other.keys() if first.get(name) != other.get(name)
        ):
            name = differing[0]
            here, there = (model.get(name, "missing") for model in (first, other))
            raise StateMismatchError(
                f"ranks 0 and {rank} do not train the same model: {name} is {here} here and {there} there "
                f"(elements, dtype, parameter group, density, shape); {len(differing)} parameters differ. "
                "Check requires_grad, too"
            )


#: how often a name was taken. Where something is communicated first, which all ranks do: a rank may make
#: optimizers, tapes and models for itself alone, and counting those where they are made would give the next
#: ones of this rank other names than the other ranks' have, and all would wait for ever
_taken: Counter[tuple[str, str]] = Counter()


def next_label(prefix: str, model: Iterable[tuple[Sequence[int], str]]) -> str:
    """A name for collectives that no other one of this process has, and others of the same model do not get.

    Names of parameters are not in it: Keras counts layers, so a second model of a process has other ones.

    Args:
        prefix: of the name: what it is for, and for which process set.
        model: shape and dtype of every parameter, in any order.

    Example:
        >>> first, second = (next_label("example", [((3, 2), "float32")]) for _ in range(2))
        >>> second == f"{first}.1"
        True
    """
    described = repr(sorted((tuple(shape), dtype) for shape, dtype in model))
    digest = hashlib.sha256(described.encode()).hexdigest()[:8]
    number = _taken[prefix, digest]
    _taken[prefix, digest] += 1
    return f"{prefix}.{digest}" + (f".{number}" if number else "")


def common_names(
    label: str, parameters: Sequence[ParameterFacts]
) -> Synchronization[tuple[str, dict[str, str]]]:
    """The first rank's label, and its names of parameters where they only differ by name.

    Names of buckets, and with them the random numbers of their sparsifiers, come from names of parameters.

    Args:
        label: from `next_label`.
        parameters: of this rank.

    Returns:
        The label, and by this rank's names those that all ranks use: the first rank's where elements and
        dtypes agree in their order, this rank's own otherwise.

    Example:
        >>> from horovod_sparse.simulation import run_lockstep
        >>> ranks = [common_names(f"{i}", [ParameterFacts(f"dense_{i}", 3)]) for i in (1, 0)]
        >>> run_lockstep(ranks)[1]
        ('1', {'dense_0': 'dense_1'})
    """
    own = [(item.name, item.num_elements, item.dtype) for item in parameters]
    everyone = yield from shared_lines([label, own])
    common_label, first = everyone[0]
    names = [name for name, *_ in own]
    theirs = [name for name, *_ in first]
    alike = [list(item[1:]) for item in own] == [item[1:] for item in first]
    chosen = theirs if alike and set(theirs) != set(names) else names
    return common_label, dict(zip(names, chosen, strict=True))
