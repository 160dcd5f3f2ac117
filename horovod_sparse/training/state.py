"""The state of one rank's training in a checkpoint: saved, loaded, and for another number of ranks.

Residuals belong to parameters and are saved by name, in the parameter's shape; states of sparsifiers belong
to buckets. Both differ from rank to rank, so every rank saves an entry of its own.

* same ranks, same plan: training continues bit for bit;
* another plan: residuals are kept, sparsifier states start anew (one line in the log);
* another number of ranks: residuals are kept and scaled, see `redistributed`; states start anew, and
  how alike ranks' gradients are is learned anew;
* all ranks load one rank's entry: each gets that rank's residual, an estimate of the mean. With two levels an
  entry has its own shard only, and others' start at zero: every rank has to load its own;
* a checkpoint without the entry (a dense run's): residuals start at zero.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from horovod_sparse.errors import ArgumentError, StateMismatchError
from horovod_sparse.feedback import FEEDBACKS, Feedback, Progress, Recipe, TwoLevelBucket
from horovod_sparse.plans.plan import Plan
from horovod_sparse.topology import Topology
from horovod_sparse.training.encoding import as_array, from_plain, is_number, to_plain
from horovod_sparse.training.parts import Part, assign_residuals, held_residuals, shared_out

FORMAT = 2
#: far more than there will ever be; beyond, arithmetic on them would overflow
_MOST_RANKS, _MOST_STEPS = 2**31 - 1, 2**53
_LIST = list, tuple
#: fields that are one value or a list: their type, in words, too; and what is meant where one is missing
_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "algorithm": (str, "text"),
    "recipe": (str, "text"),
    "feedback": (str, "text", ""),
    "levels": (_LIST, "a list of whole numbers", ()),
    "resized": (bool, "True or False", False),
    "companions": (_LIST, "a list"),
    "buckets": (_LIST, "a list"),
}
_log = logging.getLogger("horovod_sparse")


class Holder(Protocol):
    """A training (`horovod_sparse.training.training`), as far as its state is saved and loaded."""

    recipe: Recipe
    step: int

    @property
    def rank_and_size(self) -> tuple[int, int]: ...
    @property
    def topology(self) -> Topology | None: ...
    @property
    def facts(self) -> Mapping[str, tuple[Any, Any]]: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def parts(self) -> Sequence[Part]: ...
    @property
    def sparse(self) -> Sequence[Any]: ...


def saved_entry(engine: Holder, array: Callable[[np.ndarray], Any] = np.copy, **more: Any) -> dict[str, Any]:
    """The entry of this rank: numbers, strings, and arrays as the engine's parts give them."""
    (rank, size), levels = engine.rank_and_size, _levels_of(engine)
    residuals, *companions = held_residuals(engine.parts, engine.recipe.feedback.num_companions)
    return {
        "format": FORMAT,
        "algorithm": engine.recipe.sparsifier.name,
        "recipe": engine.recipe.describe(),
        "rank": rank,
        "size": size,
        "step": engine.step,
        **({} if levels is None else {"levels": levels}),
        **more,
        "plan": engine.plan.to_dict(),
        "residuals": residuals,
        "companions": companions,
        "feedback": feedback_name(engine.recipe.feedback),
        "buckets": [
            {**part.bucket.progress.to_plain(), "state": to_plain(part.bucket.state, array)}
            for part in engine.sparse
        ],
    }


def check_entry(entry: Any, recipe: Recipe | None, advice: str) -> None:
    """Refuses what was saved of another algorithm or feedback, by another version, or is damaged."""
    if not isinstance(entry, Mapping):
        raise StateMismatchError(f"the saved state is {_words(entry)}, not a mapping")
    if type(entry.get("format")) is not int or entry["format"] != FORMAT:
        raise StateMismatchError(
            f"the saved state has format {_words(entry.get('format'))}, this version reads format {FORMAT}"
        )
    for name, (kind, wanted, *default) in _FIELDS.items():
        value = entry.get(name, *default)
        _expect(isinstance(value, kind), name, value, wanted)
    if recipe is not None and entry["algorithm"] != recipe.sparsifier.name:
        used = advice.format(recipe.describe())
        raise StateMismatchError(f"the saved state is of {entry['recipe']}, {used}")
    _whole(entry, "size", 1, _MOST_RANKS)
    _whole(entry, "rank", 0, entry["size"] - 1)
    _whole(entry, "step", 0, _MOST_STEPS)
    levels, buckets = entry.get("levels", ()), entry["buckets"]
    _expect(all(type(item) is int for item in levels), "levels", levels, "a list of whole numbers")
    plan = _saved_plan(entry.get("plan"))
    if recipe is not None and not companions_fit(entry, recipe.feedback):
        raise StateMismatchError(f"the saved state is of another feedback than {recipe.feedback}")
    held = {"residuals": entry.get("residuals")}
    held |= {f"companions[{number}]": one for number, one in enumerate(entry["companions"])}
    bucketed = {name for bucket in plan.buckets for name in bucket}
    for path, arrays in held.items():
        _check_arrays(path, arrays, bucketed, set(plan.names()))
    _expect(len(buckets) == len(plan.buckets), "buckets", buckets, f"a list of {len(plan.buckets)}")
    for number, one in enumerate(buckets):
        _check_bucket(f"buckets[{number}]", one)


def check_shapes(entry: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses arrays of other shapes than parameters have here."""
    for arrays in (entry["residuals"], *entry["companions"]):
        for name, values in arrays.items():
            if tuple(values.shape) != shapes[name]:
                raise StateMismatchError(
                    f"{name} has shape {shapes[name]}, the saved state has {tuple(values.shape)}"
                )


def checked_states(engine: Holder, entry: Mapping[str, Any]) -> list[Any] | None:
    """The sparsifiers' states of an entry, made and checked; nothing is changed."""
    (rank, size), plan = engine.rank_and_size, Plan.from_dict(entry["plan"])
    if plan != engine.plan or entry["size"] != size or entry.get("resized"):
        return None
    if list(entry.get("levels", ())) != (_levels_of(engine) or []):
        return None
    states = []
    for number, (part, one) in enumerate(zip(engine.sparse, entry["buckets"], strict=True)):
        bucket = part.bucket
        info = bucket.info
        if not isinstance(bucket, TwoLevelBucket):
            info = dataclasses.replace(info, rank=rank, size=size)
        fresh = bucket.recipe.sparsifier.init(info)
        states.append(from_plain(fresh, one["state"], f"buckets[{number}].state"))
    return states


def _levels_of(engine: Holder) -> list[int] | None:
    """Hosts, ranks on each, and the host and the place of this one; None for one level."""
    (rank, size), topology = engine.rank_and_size, engine.topology
    if topology is None or topology.size != size:
        return None
    return [topology.num_hosts, topology.per_host, *topology.place(rank)]


def _saved_plan(saved: Any) -> Plan:
    lists = [saved.get("dense")] if isinstance(saved, Mapping) else [None]
    if isinstance(saved, Mapping):
        buckets = saved.get("buckets")
        lists += [None] if not isinstance(buckets, (list, tuple)) else list(buckets)
    sound = all(isinstance(one, (list, tuple)) and all(isinstance(n, str) for n in one) for one in lists)
    _expect(sound, "plan", saved, "a plan: lists of names")
    try:
        return Plan.from_dict(saved)
    except ArgumentError as error:
        raise StateMismatchError(f"plan in the saved state is no plan ({error})") from error


def _check_arrays(path: str, arrays: Any, needed: set[str], known: set[str]) -> None:
    """Arrays by parameter: those of buckets all there, of a type that residuals have, and finite."""
    _expect(isinstance(arrays, Mapping), path, arrays, "arrays by parameter")
    for name in sorted(needed - set(arrays)):
        raise StateMismatchError(f"{path}[{name!r}] is missing in the saved state")
    for name, values in arrays.items():
        where = f"{path}[{_words(name)}]"
        _expect(name in known, where, values, "nothing: no parameter of its plan has this name")
        _check_array(where, values)


def _check_array(path: str, values: Any) -> None:
    array = as_array(values)
    sound = array is not None and array.dtype in (np.float32, np.float64)
    _expect(sound, path, values, "an array of float32 or float64")
    _expect(bool(np.isfinite(array).all()), path, values, "finite numbers")  # type: ignore[arg-type]


def _check_bucket(path: str, one: Any) -> None:
    """What a bucket's progress is made of; its state is checked against the sparsifier's own."""
    _expect(isinstance(one, Mapping), path, one, "a mapping")
    _expect("learning_rate" in one, f"{path}.learning_rate", "missing", "a number or None")
    for name in one.keys() & {"since", "summed"}:
        _whole(one, name, 0, _MOST_STEPS, f"{path}.")
    for name in one.keys() & {"learning_rate", "largest_rate", "scale"}:
        value = one[name]
        sound = (is_number(value) and 0.0 <= value < np.inf) or (value is None and name != "scale")
        _expect(sound, f"{path}.{name}", value, "a finite number, not negative")
    leans = one.get("leans", (0.0, 0.0))
    sound = isinstance(leans, (tuple, list)) and len(leans) == 2 and all(map(is_number, leans))
    sound = sound and 0.0 <= leans[0] <= leans[1] < np.inf
    _expect(sound, f"{path}.leans", leans, "two squares, the smaller one first")
    _expect(isinstance(one.get("state"), Mapping), f"{path}.state", one.get("state"), "a mapping")
    _whole(one["state"], "step", 0, _MOST_STEPS, f"{path}.state.")


def _whole(fields: Mapping[str, Any], name: str, least: int, most: int, path: str = "") -> None:
    value = fields.get(name)
    sound = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    _expect(sound, f"{path}{name}", value, f"a whole number from {least} to {most}")


def _expect(sound: bool, path: str, found: object, wanted: str) -> None:
    if not sound:
        raise StateMismatchError(f"{path} is {_words(found)} in the saved state, not {wanted}")


def _words(value: object) -> str:
    """What was found, briefly: it may be large, or nested without end."""
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    if isinstance(value, str):
        return repr(value[:40])
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if isinstance(shape, tuple) else "")


def load_entry(engine: Holder, entry: Mapping[str, Any], factor: float) -> None:
    """Continues from an entry that fits. Needs no collective."""
    size, plan = engine.rank_and_size[1], Plan.from_dict(entry["plan"])
    states = checked_states(engine, entry)
    resized = entry["size"] != size or entry.get("resized")
    forgotten = {"leans": (0.0, 0.0)} if resized else {}
    progress = {
        name: Progress.from_plain({**one, **forgotten}, one["state"]["step"])
        for bucket_names, one in zip(plan.buckets, entry["buckets"], strict=True)
        for name in bucket_names
    }
    # of what is dense nothing but the step was saved
    progress |= {name: Progress(int(entry["step"])) for name in plan.dense}
    held = shared_out([entry["residuals"], *entry["companions"]], factor, engine.recipe.feedback)
    assign_residuals(engine.parts, held, progress)
    engine.step = int(entry["step"])
    if states is not None:
        for part, state in zip(engine.sparse, states, strict=True):
            part.bucket.state = state
    else:
        what = f"another plan ({plan})" if entry["size"] == size else f"{entry['size']} ranks"
        if plan == engine.plan and entry["size"] == size:
            what = "other hosts, or another number of levels"
        if entry.get("resized"):
            what = "another number of ranks"
        _log.warning(
            "the checkpoint is of %s, now %d ranks, %s: residuals are kept, sparsifier states start anew",
            what,
            size,
            engine.plan,
        )


def feedback_name(feedback: Feedback) -> str:
    """By which an entry says what its companions are."""
    return getattr(feedback, "text_name", type(feedback).__name__)


def companions_fit(saved: Mapping[str, Any], feedback: Feedback) -> bool:
    """Whether what was saved beside the residuals is what a feedback keeps there."""
    if len(saved["companions"]) != feedback.num_companions:
        return False
    name = saved.get("feedback", feedback_name(feedback))  # earlier versions did not say
    return feedback.num_companions == 0 or name == feedback_name(feedback)


def share_factor(old_rank: int, old_size: int, size: int) -> float:
    """What a holder of an old rank's residual multiplies it by, so that the mean over ranks is kept.

    Of P old ranks and Q new ones, old rank o belongs to new rank o mod Q if Q < P, and to all new ranks
    r with r mod P = o otherwise. Each of its h holders takes ``e_o * Q / (P * h)``; so the mean over new
    ranks is ``1/Q * sum_o h * e_o * Q / (P * h)``, the mean over old ranks.
    """
    holders = len(range(old_rank, size, old_size)) if size > old_size else 1
    return size / (old_size * max(holders, 1))


def redistributed(entries: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """The entry for one rank of another number of ranks, so that the mean residual is kept exactly."""
    by_rank = {entry["rank"]: entry for entry in entries}
    old_size = len(entries)
    if sorted(by_rank) != list(range(old_size)) or any(entry["size"] != old_size for entry in entries):
        raise StateMismatchError(
            f"entries of ranks {sorted(entry['rank'] for entry in entries)} were given, of runs with "
            f"{sorted({entry['size'] for entry in entries})} ranks: give one of every rank of one run"
        )
    return joined([by_rank[old] for old in old_ranks_of(rank, old_size, size)], rank, size)


def old_ranks_of(rank: int, old_size: int, size: int) -> range:
    """Whose entries a rank goes on with at another number of ranks.

    Example:
        >>> list(old_ranks_of(0, 5, 2)), list(old_ranks_of(3, 2, 4))
        ([0, 2, 4], [1])
    """
    if not 0 <= rank < size:
        raise ArgumentError("rank", rank, f"a rank of {size}, from 0")
    return range(rank % old_size, old_size, size)


def joined(entries: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """The entry for one rank of another number of ranks, of those of `old_ranks_of` alone, in their order."""
    old_size = entries[0]["size"]
    if old_size == size:
        return dict(entries[0])
    shares = [(entry, share_factor(entry["rank"], old_size, size)) for entry in entries]
    adds_up = getattr(FEEDBACKS.get(entries[0].get("feedback", "error")), "adds_up", True)
    averaged = shares if adds_up else [(entry, 1.0 / len(entries)) for entry in entries]
    return {
        **entries[0],
        "rank": rank,
        "size": size,
        # nothing is left to scale, and no bucket's state fits
        "resized": True,
        "residuals": _sum([(entry["residuals"], factor) for entry, factor in shares]),
        "companions": [
            _sum([(entry["companions"][i], factor) for entry, factor in averaged])
            for i in range(len(entries[0]["companions"]))
        ],
    }


def _sum(shares: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, Any]:
    """Sums of factor times array, by name."""
    total: dict[str, Any] = {}
    for arrays, factor in shares:
        for name, values in arrays.items():
            if name in total and total[name].shape != values.shape:
                raise StateMismatchError(f"{name} has not the same shape in the states of all ranks")
            total[name] = total[name] + values * factor if name in total else values * factor
    return total
