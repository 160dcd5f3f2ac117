"""Ranks compare settings before they synchronize, and their parameters from time to time afterwards.

A sparsifier's state lives longer than Horovod: elastic training restarts Horovod, with surviving and with new
ranks; and a checkpoint may be loaded on some ranks alone. A rank cannot notice this by itself, since its
number and the number of ranks may be the same as before. So all ranks communicate after every start of the
collectives (a token that every ``hvd.init()`` changes) and after every load.

First they compare what has to be equal (`compare`): each rank sends one dictionary, under a name that does
not depend on it, so that ranks with different arguments meet there, too. Then they compare steps, plans and
states (`agreed_status`). If any differ, all continue from the furthest rank: each makes fresh states for its
rank, at the agreed step and by the agreed plan, and multiplies its residuals by ``Q / P``, from P ranks to Q,
since a sum is divided by the number of ranks. So the mean residual stays, but for residuals of ranks that are
gone.

Later errors (a loop that changes parameters on one rank, a state that one rank loaded, a flipped bit in
memory) raise nothing by themselves. So every N steps each rank computes checksums of what has to be equal,
and all compare one hash in one message (`DriftCheck`); if hashes differ, a second message finds the arrays
that do. Gradients, residuals and batch statistics differ between ranks by design, and are not compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_sparse import __version__
from horovod_sparse.collectives import AllGather, Synchronization, gather_values
from horovod_sparse.errors import DriftError, StateMismatchError
from horovod_sparse.plans import ParameterFacts, Plan
from horovod_sparse.training.collective_errors import listed
from horovod_sparse.training.settings import TRANSPORT_VARIABLE, Settings, requested_transport

#: raise it with every change of messages: ranks with different protocol numbers refuse each other
PROTOCOL = 7
#: number of differences that an error lists
_SHOWN = 8
_TRAINED = "trained parameter"


def declaration(compression: object, engine: str, **arguments: object) -> dict[str, str]:
    """Returns a text for each argument that has to be equal on all ranks."""
    if hasattr(compression, "describe"):
        words = compression.describe()
    else:  # one of Horovod's own, which are classes
        name = str(getattr(compression, "__name__", type(compression).__name__))
        words = {"NoneCompressor": "none", "FP16Compressor": "fp16"}.get(name, name)
    given = {"compression": words, "engine": engine, TRANSPORT_VARIABLE: requested_transport(), **arguments}
    version = {"version": f"{__version__} (protocol {PROTOCOL})"}
    return {name: str(value) for name, value in given.items()} | version


def compare(given: Mapping[str, str], parameters: Sequence[ParameterFacts] = ()) -> Synchronization[None]:
    """Compares arguments (text by name) of all ranks; raises on all if one differs, and lists the values.

    Every rank calls it first: with different arguments, ranks would later wait for each other's collectives
    for ever, or add up unrelated elements.
    """
    everyone = yield from gather_values({**given, **describe_parameters(parameters)})
    if differing := differences(everyone, "not given"):
        more = f"; so do {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        advice = " (what is trained, too)" if any(name.startswith(_TRAINED) for name in differing) else ""
        first = "; ".join([*differing.values()][:_SHOWN])
        raise StateMismatchError(f"{first}{more}; give all ranks the same{advice}")


@dataclass(frozen=True)
class RankStatus:
    """A rank's step, plan and states, which it sends to all others to agree where to continue."""

    step: int
    #: hash of the sparsifiers' states, without fields that differ between ranks; see `shared_digest`
    digest: str
    #: (rank, size) that the states were made for
    made_for: tuple[int, int]
    plan: Plan = field(default_factory=lambda: Plan(()))
    #: tells the collectives of this training from those of another with the same names; may differ
    label: str = ""
    #: with two levels the rank's column: states have to be equal within it
    column: int = 0
    #: True with two levels if the rank holds residuals of whole parameters, not only of its shard
    has_foreign_shards: bool = False


@dataclass(frozen=True)
class AgreedStatus:
    """The step and plan from which all ranks continue: those of the furthest rank."""

    #: True if all ranks reset the sparsifiers' states
    resets: bool
    step: int
    plan: Plan
    reason: str = ""
    #: rank 0's prefix for collectives
    label: str = ""
    #: True if a rank may hold residuals of other ranks' shards
    has_foreign_shards: bool = False


def agreed_status(status: RankStatus) -> Synchronization[AgreedStatus]:
    """Compares all ranks' steps, plans and states, and returns from where all continue."""
    plan = status.plan.to_dict()
    digest = _digest(json.dumps(plan, sort_keys=True).encode())
    ranks = yield from gather_values({**vars(status), "plan": digest})

    def by_rank(name: str) -> list[Any]:
        return [one[name] for one in ranks]

    steps, columns, reason = by_rank("step"), by_rank("column"), ""
    moved = [rank for rank, place in enumerate(by_rank("made_for")) if place != [rank, len(ranks)]]
    if moved:
        old_rank, old_size = ranks[moved[0]]["made_for"]
        reason = f"rank {moved[0]} of {len(ranks)} was rank {old_rank} of {old_size}"
    elif len(set(steps)) > 1:
        reason = values_by_rank("have done {} steps", steps)
    elif len(set(by_rank("plan"))) > 1:
        reason = "plans differ"
    elif len(set(zip(columns, by_rank("digest"), strict=True))) > len(set(columns)):
        reason = "states differ"
    furthest = max(steps)
    agreed = AgreedStatus(bool(reason), furthest, status.plan, reason, ranks[0]["label"])
    if not reason:
        return replace(agreed, has_foreign_shards=any(by_rank("has_foreign_shards")))
    plans = yield from gather_values(plan)
    return replace(agreed, plan=Plan.from_dict(plans[steps.index(furthest)]), has_foreign_shards=True)


def differences(everyone: Sequence[Mapping[str, str]], missing: str) -> dict[str, str]:
    """Returns a text for each name whose value differs between ranks; `missing` stands for no value."""
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    values = {name: [theirs.get(name, missing) for theirs in everyone] for name in names}
    apart = {name: each for name, each in values.items() if len(set(each)) > 1}
    return {name: f"{name} differs: {values_by_rank('have {}', each)}" for name, each in apart.items()}


def values_by_rank(words: str, values: Sequence[object]) -> str:
    """Returns the different values, each with its ranks: ``ranks [0, 2] have 7, ranks [1] 0``."""
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    first, *others = ranks
    told = [words.format(first), *others]
    return ", ".join(f"ranks {where} {one}" for where, one in zip(ranks.values(), told, strict=True))


def describe_parameters(parameters: Sequence[ParameterFacts]) -> dict[str, str]:
    """Returns a text about each parameter that has to be equal on all ranks; devices may differ."""
    return {
        f"{_TRAINED} {item.name}": f"{item.num_elements} elements of {item.dtype}, "
        f"shape {list(item.shape)}, group {item.group}, density {item.density}"
        for item in parameters
    }


def plan_of_first_rank(plan: Plan, parameters: Sequence[ParameterFacts]) -> Synchronization[Plan]:
    """Returns rank 0's plan on all ranks; raises if ranks have different parameters."""
    yield from compare({}, parameters)
    return Plan.from_dict((yield from gather_values(plan.to_dict()))[0])


#: how often each name was taken, counted at the first communication, which all ranks have in common: a rank
#: may make further optimizers for itself alone
_taken: Counter[tuple[str, str]] = Counter()


def next_label(prefix: str, model: Iterable[tuple[Sequence[int], str]]) -> str:
    """Returns a prefix for names of collectives, unique in this process, made of shapes and dtypes.

    Names of parameters are not in it: Keras counts layers, so a second model of a process has other ones.
    """
    described = repr(sorted((tuple(shape), dtype) for shape, dtype in model))
    digest = hashlib.sha256(described.encode()).hexdigest()[:8]
    number = _taken[prefix, digest]
    _taken[prefix, digest] += 1
    return f"{prefix}.{digest}" + (f".{number}" if number else "")


def common_names(
    label: str, parameters: Sequence[ParameterFacts]
) -> Synchronization[tuple[str, dict[str, str]]]:
    """Returns rank 0's label, and a mapping of this rank's parameter names to rank 0's."""
    own = [(item.name, item.num_elements, item.dtype) for item in parameters]
    everyone = yield from gather_values([label, own])
    common_label, first = everyone[0]
    names = [name for name, *_ in own]
    theirs = [name for name, *_ in first]
    mine, other = ([(re.sub(r"_?\d+", "", name), *rest) for name, *rest in one] for one in (own, first))
    chosen = theirs if mine == other and set(theirs) != set(names) else names
    return common_label, dict(zip(names, chosen, strict=True))


#: number of checksums: 512 sums of 64-bit words stay in the first-level cache
COLUMNS = 512
_WORD_BYTES = 8


class Replicated(Protocol):
    """An array with a name that has to be equal on all ranks; ranks compare its checksums."""

    @property
    def name(self) -> str: ...

    @property
    def dtype_and_shape(self) -> str: ...

    def checksums(self) -> NDArray[np.uint64]:
        """Returns the checksums (`word_sums`) of the array's bytes, computed where the array is."""


@dataclass(frozen=True)
class ReplicatedArray:
    """A `Replicated` array in host memory."""

    name: str
    array: np.ndarray

    @property
    def dtype_and_shape(self) -> str:
        return f"{self.array.dtype.name}{list(self.array.shape)}"

    def checksums(self) -> NDArray[np.uint64]:
        return word_sums(np.ascontiguousarray(self.array).reshape(-1).view(np.uint8))


def word_sums(values: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Returns 512 checksums of the bytes: sums of every 512th 64-bit word, modulo 2**64.

    One changed bit always shows; several do, unless they cancel out within 512 words' distance to the bit.
    """
    row = COLUMNS * _WORD_BYTES
    whole = values.size // row * row
    sums = np.add.reduce(values[:whole].view(np.uint64).reshape(-1, COLUMNS), axis=0, dtype=np.uint64)
    if whole < values.size:
        rest = np.zeros(row, np.uint8)
        rest[: values.size - whole] = values[whole:]
        sums = sums + rest.view(np.uint64)
    return np.asarray(sums, np.uint64)


class DriftCheck:
    """Compares all ranks' models every `check_every` steps; raises `DriftError` on all if they differ."""

    def __init__(self, settings: Settings) -> None:
        self.every = settings.check_every or 0
        #: the step after which all ranks compare; inf for never
        self.next_step = math.inf
        self.compare_next(0)

    def compare_next(self, step: int) -> None:
        """Makes ranks compare their models after the next step, for example after a load."""
        self.next_step = step + 1 if self.every else math.inf

    def schedule_next(self, step: int) -> None:
        """Schedules the next comparison of models, by the step alone, so all ranks compare together."""
        self.next_step = (step // self.every + 1) * self.every if self.every else math.inf

    def compare(self, step: int, entries: Sequence[Replicated]) -> Synchronization[None]:
        self.schedule_next(step)
        if differing := (yield from differing_arrays(entries)):
            more = f"; {len(differing)} differ: {listed(list(differing))}" if len(differing) > 1 else ""
            raise DriftError(f"after step {step} {next(iter(differing.values()))}{more}")


def differing_arrays(entries: Sequence[Replicated]) -> Synchronization[dict[str, str]]:
    """Returns a text for each entry that differs between ranks: one collective, or two if one differs."""
    digests = {entry.name: _digest(entry.dtype_and_shape.encode(), entry.checksums()) for entry in entries}
    total = _digest(*(f"{name}={digest};".encode() for name, digest in sorted(digests.items())))
    own = np.frombuffer(bytes.fromhex(total), np.int32)
    gathered = np.array((yield AllGather(own))).reshape(-1, own.size)
    if (gathered == gathered[0]).all():
        return {}
    return differences((yield from gather_values(digests)), "nothing")


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
