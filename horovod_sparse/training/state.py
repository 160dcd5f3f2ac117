"""A rank's checkpoint entry: made, checked, loaded, and converted to another number of ranks.

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
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.errors import ArgumentError, StateMismatchError
from horovod_sparse.feedback import FEEDBACKS, Feedback, Progress, Recipe
from horovod_sparse.plans import Plan
from horovod_sparse.topology import Topology
from horovod_sparse.training.encoding import from_plain, to_plain
from horovod_sparse.training.parts import rescaled

FORMAT = 4
_log = logging.getLogger("horovod_sparse")


@dataclass(frozen=True)
class _Header:
    """A checkpoint entry without its arrays: recipe, plan, step, ranks and each bucket's progress."""

    algorithm: str = ""
    recipe: str = ""
    #: the feedback as text: it defines what the companions are
    feedback: str = ""
    rank: int = 0
    size: int = 1
    step: int = 0
    #: number of ranks of each host, then all ranks, host by host; empty for one level
    hosts: tuple[int, ...] = ()
    #: True if the residuals were redistributed to another number of ranks; states then do not fit
    resized: bool = False


def saved_entry(training: Any, array: Callable[[np.ndarray], Any] = np.copy, **more: Any) -> dict[str, Any]:
    """Returns this rank's checkpoint entry; `array` copies a sparsifier's arrays."""
    (rank, size), recipe = training.rank_and_size, training.recipe
    (residuals, *companions), topology = training.residuals_and_progress()[0], training.topology_for(None)
    names = recipe.sparsifier.name, recipe.describe(), _feedback_name(recipe.feedback)
    hosts = () if topology is None else (topology.per_host, *itertools.chain(*topology.hosts))
    return {
        "format": FORMAT,
        **to_plain(_Header(*names, rank, size, training.step, hosts)),
        **more,
        "plan": training.plan.to_dict(),
        "residuals": residuals,
        "companions": companions,
        "buckets": [
            {**to_plain(part.bucket.progress), "state": to_plain(part.bucket.state, array)}
            for part in training.sparse
        ],
    }


def check_entry(entry: Any, recipe: Recipe | None, advice: str) -> None:
    """Raises if an entry is damaged, or of another algorithm, feedback or version."""
    try:
        _check_fields(entry, recipe, advice)
    except StateMismatchError:
        raise
    except Exception as error:  # damaged values can raise anything
        raise StateMismatchError(
            f"the saved state cannot be read ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _check_fields(entry: Any, recipe: Recipe | None, advice: str) -> None:
    if entry["format"] != FORMAT:
        raise StateMismatchError(
            f"the saved state has format {str(entry['format'])[:40]}, this version reads format {FORMAT}"
        )
    fields = {item.name for item in dataclasses.fields(_Header)}
    head: _Header = from_plain(_Header(), {name: entry[name] for name in fields & set(entry)}, "entry")
    if recipe is not None and head.algorithm != recipe.sparsifier.name:
        raise StateMismatchError(f"the saved state is of {head.recipe}, {advice.format(recipe.describe())}")
    hosts = topology_of(entry)
    if head.step < 0 or not 0 <= head.rank < head.size or (hosts and hosts.size != head.size):
        raise StateMismatchError(f"the saved state is damaged: {head}")
    companions = list(entry["companions"])
    if recipe is not None:
        wanted = recipe.feedback.num_companions
        if len(companions) != wanted or (wanted and head.feedback != _feedback_name(recipe.feedback)):
            raise StateMismatchError(f"the saved state is of {head.recipe}, not of {recipe.feedback}")
    plan = Plan.from_dict(entry["plan"])
    bucketed = {name for bucket in plan.buckets for name in bucket}
    held = {"residuals": entry["residuals"]}
    held |= {f"companions[{number}]": one for number, one in enumerate(companions)}
    for path, arrays in held.items():
        if not bucketed <= set(arrays) <= set(plan.names()):
            raise StateMismatchError(f"{path} of the saved state have not its plan's parameters: damaged")
        for name, values in arrays.items():
            array = np.asarray(values)
            sound = tuple(values.shape) == array.shape and array.dtype in (np.float32, np.float64)
            if not sound or not np.isfinite(array).all():
                raise StateMismatchError(f"{path}[{name!r}] of the saved state is no array of finite floats")
    for number, (one, _) in enumerate(zip(entry["buckets"], plan.buckets, strict=True)):
        _parse_progress(one, f"buckets[{number}]")


def _feedback_name(feedback: Feedback) -> str:
    return feedback.text_name or type(feedback).__name__


def _parse_progress(one: Mapping[str, Any], path: str = "") -> Progress:
    fields = dict(one)
    del fields["state"]  # which is checked against the sparsifier's own
    progress: Progress = from_plain(Progress(), fields, path)
    if not 0 <= progress.since <= progress.step:
        raise StateMismatchError(f"{path}.since is {progress.since}, not 0 to {progress.step}: damaged")
    return progress


def check_shapes(entry: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises if an entry's arrays do not have the shapes of the parameters with the same names."""
    for arrays in (entry["residuals"], *entry["companions"]):
        for name, values in arrays.items():
            if tuple(values.shape) != shapes[name]:
                raise StateMismatchError(
                    f"{name} has shape {shapes[name]}, the saved state has {tuple(values.shape)}"
                )


def checked_states(training: Any, entry: Mapping[str, Any]) -> list[Any] | None:
    """Returns an entry's sparsifier states by bucket, or None if plan or ranks differ; loads nothing."""
    (rank, size), plan = training.rank_and_size, Plan.from_dict(entry["plan"])
    if plan != training.plan or entry["size"] != size or entry["resized"]:
        return None
    topology = topology_of(entry)
    if topology != training.topology_for(entry) or (topology is not None and entry["rank"] != rank):
        return None
    states = []
    for number, (part, one) in enumerate(zip(training.sparse, entry["buckets"], strict=True)):
        bucket = part.bucket
        info = dataclasses.replace(bucket.whole, rank=rank, size=size)
        if topology is not None:
            from horovod_sparse.feedback.two_level_bucket import shard_of  # not needed with one level

            info = shard_of(info, topology)
        fresh = bucket.recipe.sparsifier.init(info)
        state = from_plain(fresh, one["state"], f"buckets[{number}].state")
        if state.step != one["step"]:
            raise StateMismatchError(f"buckets[{number}].state.step is {state.step}, not {one['step']}")
        states.append(state)
    return states


def topology_of(entry: Mapping[str, Any]) -> Topology | None:
    """Returns which ranks shared a host when the entry was saved, or None for one level."""
    if not entry["hosts"]:
        return None
    per_host, *ranks = entry["hosts"]
    return Topology(tuple(tuple(ranks[at : at + per_host]) for at in range(0, len(ranks), per_host)))


def load_entry(training: Any, entry: Mapping[str, Any], factor: float) -> None:
    """Loads a checked entry into a training, its residuals times `factor`. Does not communicate."""
    size, plan = training.rank_and_size[1], Plan.from_dict(entry["plan"])
    states = checked_states(training, entry)
    forgotten = {"leans": (0.0, 0.0)} if entry["size"] != size or entry["resized"] else {}
    progress = {
        name: _parse_progress({**one, **forgotten})
        for bucket_names, one in zip(plan.buckets, entry["buckets"], strict=True)
        for name in bucket_names
    }
    # of dense parameters only the step was saved
    progress |= {name: Progress(int(entry["step"])) for name in plan.dense}
    held = rescaled([entry["residuals"], *entry["companions"]], factor, training.recipe.feedback)
    training.load_residuals(held, progress)
    training.step = int(entry["step"])
    if states is not None:
        for part, state in zip(training.sparse, states, strict=True):
            part.bucket.state = state
    else:
        then, now = (f"{entry['size']} ranks", str(plan)), (f"{size} ranks", str(training.plan))
        changed = [f"{old}, now {new}" for old, new in zip(then, now, strict=True) if old != new]
        words = "residuals are kept, sparsifier states are reset: the checkpoint has %s"
        _log.warning(words, "; ".join(changed) or "other buckets or hosts")


def residual_factor(old_rank: int, old_size: int, size: int) -> float:
    """Returns the factor for an old rank's residual at a new number of ranks, so that the mean stays.

    Of P old ranks and Q new ones, old rank o belongs to new rank o mod Q if Q < P, and to all new ranks
    r with r mod P = o otherwise. Each of its h holders takes ``e_o * Q / (P * h)``; so the mean over new
    ranks is ``1/Q * sum_o h * e_o * Q / (P * h)``, the mean over old ranks.
    """
    holders = len(range(old_rank, size, old_size)) if size > old_size else 1
    return size / (old_size * max(holders, 1))


def redistributed(entries: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Returns the entry for a rank at a new number of ranks, made of all old ranks' entries."""
    by_rank = {entry["rank"]: entry for entry in entries}
    old_size = len(entries)
    if sorted(by_rank) != list(range(old_size)) or any(entry["size"] != old_size for entry in entries):
        raise StateMismatchError(
            f"entries of ranks {sorted(entry['rank'] for entry in entries)} were given, of runs with "
            f"{sorted({entry['size'] for entry in entries})} ranks: give one of every rank of one run"
        )
    return joined([by_rank[old] for old in old_ranks_of(rank, old_size, size)], rank, size)


def old_ranks_of(rank: int, old_size: int, size: int) -> range:
    """Returns which old ranks' entries this rank takes over when the number of ranks has changed.

    Example:
        >>> list(old_ranks_of(0, 5, 2)), list(old_ranks_of(3, 2, 4))
        ([0, 2, 4], [1])
    """
    if not 0 <= rank < size:
        raise ArgumentError("rank", rank, f"a rank from 0 to {size - 1}")
    return range(rank % old_size, old_size, size)


def joined(entries: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Joins old ranks' entries into one entry for a rank at a new number of ranks."""
    old_size = entries[0]["size"]
    if old_size == size:
        return dict(entries[0])
    shares = [(entry, residual_factor(entry["rank"], old_size, size)) for entry in entries]
    adds_up = FEEDBACKS.get(entries[0]["feedback"], Feedback).adds_up
    averaged = shares if adds_up else [(entry, 1.0 / len(entries)) for entry in entries]
    passes = {}
    if "passes" in entries[0]:
        moved = [[factor, entry["passes"]["moves"]] for entry, factor in shares]
        passes["passes"] = {**entries[0]["passes"], "shares": moved}
    return {
        **entries[0],
        **passes,
        "rank": rank,
        "size": size,
        # residuals are scaled already, and no bucket's state fits another number of ranks
        "resized": True,
        "residuals": _weighted_sum([(entry["residuals"], factor) for entry, factor in shares]),
        "companions": [
            _weighted_sum([(entry["companions"][i], factor) for entry, factor in averaged])
            for i in range(len(entries[0]["companions"]))
        ],
    }


def _weighted_sum(shares: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, Any]:
    """Returns the sum of factor times array over several dicts, name by name."""
    total: dict[str, Any] = {}
    for arrays, factor in shares:
        for name, values in arrays.items():
            if name in total and total[name].shape != values.shape:
                raise StateMismatchError(f"{name} has different shapes in the ranks' saved states")
            total[name] = total[name] + values * factor if name in total else values * factor
    return total
