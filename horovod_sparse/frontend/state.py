"""The state of one rank's training in a checkpoint: saved, loaded, and for another number of ranks.

Residuals belong to parameters and are saved by name, in the parameter's shape; states of sparsifiers belong
to buckets. Both differ from rank to rank, so every rank saves an entry of its own to resume exactly. What
happens otherwise:

* same ranks, same plan: training continues bit for bit;
* another plan: residuals are kept, sparsifier states start anew (one line in the log);
* another number of ranks: residuals are kept and scaled, see `redistributed`; states start anew;
* all ranks load one rank's entry: each gets that rank's residual, an estimate of the mean;
* a checkpoint without the entry (a dense run's): residuals start at zero.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse.errors import ArgumentError, StateMismatchError
from horovod_sparse.feedback import Feedback, LowPass, Progress, Recipe
from horovod_sparse.feedback.state import from_plain, to_plain
from horovod_sparse.frontend.engine import Engine
from horovod_sparse.frontend.parts import assign_residuals, held_residuals
from horovod_sparse.merging import Plan

_FORMAT = 1
_log = logging.getLogger("horovod_sparse")


def saved_entry(engine: Engine, array: Callable[[np.ndarray], Any] = np.copy, **more: Any) -> dict[str, Any]:
    """The entry of this rank: numbers, strings, and arrays as the engine's parts give them.

    Args:
        engine: between two steps.
        array: makes the checkpoint's kind of array of a sparsifier's (which it must copy).
        **more: what else the entry says.
    """
    rank, size = engine.place
    residuals, *companions = held_residuals(engine.parts, engine.recipe.feedback.num_companions)
    return {
        "format": _FORMAT,
        "algorithm": engine.recipe.sparsifier.name,
        "recipe": engine.recipe.describe(),
        "rank": rank,
        "size": size,
        "step": engine.step,
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


def check_entry(entry: Mapping[str, Any], recipe: Recipe, advice: str) -> None:
    """Refuses what was saved of another algorithm or feedback, or by another version.

    Args:
        entry: as `saved_entry` or `redistributed` made it.
        recipe: that it is loaded for.
        advice: what is used now ("{}"), and what to do about it.

    Raises:
        StateMismatchError: saying which.
    """
    if entry.get("format") != _FORMAT:
        raise StateMismatchError(
            f"the saved state has format {entry.get('format')}, this version reads format {_FORMAT}"
        )
    if entry["algorithm"] != recipe.sparsifier.name:
        used = advice.format(recipe.describe())
        raise StateMismatchError(f"the saved state is of {entry['recipe']}, {used}")
    if not companions_fit(entry, recipe.feedback):
        raise StateMismatchError(f"the saved state is of another feedback than {recipe.feedback}")


def load_entry(
    engine: Engine, entry: Mapping[str, Any], factor: float, names: Mapping[str, str] | None = None
) -> None:
    """Continues from an entry that fits. Needs no collective.

    Args:
        engine: whose parameters have their parts already, between two steps.
        entry: of the same parameters, checked by `check_entry`.
        factor: by which residuals are multiplied: `share_factor`, or `kept_share` for a rank's own.
        names: what saved names are called here, where they differ.
    """
    saved, size = Plan.from_dict(entry["plan"]), engine.place[1]
    called = (lambda name: name) if names is None else names.__getitem__
    plan = Plan(
        tuple(tuple(map(called, bucket)) for bucket in saved.buckets), tuple(map(called, saved.dense))
    )
    kept = plan == engine.plan and entry["size"] == size and not entry.get("resized")
    buckets = [part.bucket for part in engine.sparse]
    states = [
        from_plain(bucket.recipe.sparsifier.init(bucket.info), one["state"])
        for bucket, one in zip(buckets, entry["buckets"] if kept else (), strict=kept)
    ]
    progress = {
        name: Progress.from_plain(one, one["state"]["step"])
        for bucket_names, one in zip(plan.buckets, entry["buckets"], strict=True)
        for name in bucket_names
    }
    held = [
        {called(name): values * factor for name, values in by_name.items()}
        for by_name in (entry["residuals"], *entry["companions"])
    ]
    assign_residuals(engine.parts, held, progress)
    engine.step = int(entry["step"])
    for bucket, state in zip(buckets, states, strict=kept):
        bucket.state = state
    if not kept:
        what = f"another plan ({plan})" if entry["size"] == size else f"{entry['size']} ranks"
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
    """Whether what was saved beside the residuals is what a feedback keeps there.

    Args:
        saved: with "companions", and "feedback" if it is not of an earlier version.
        feedback: that it is loaded for.

    Example:
        >>> saved = {"companions": ["a velocity"], "feedback": "momentum"}
        >>> companions_fit(saved, LowPass())
        False
    """
    if len(saved["companions"]) != feedback.num_companions:
        return False
    name = saved.get("feedback")
    if name is None:  # saved before there was a filter
        return not isinstance(feedback, LowPass)
    return feedback.num_companions == 0 or name == feedback_name(feedback)


def share_factor(old_rank: int, old_size: int, size: int) -> float:
    """What a holder of an old rank's residual multiplies it by, so that the mean over ranks is kept.

    Of P old ranks and Q new ones, old rank o belongs to new rank o mod Q if Q < P, and to all new ranks
    r with r mod P = o otherwise. Each of its h holders takes ``e_o * Q / (P * h)``; so the mean over new
    ranks is ``1/Q * sum_o h * e_o * Q / (P * h)``, the mean over old ranks.

    Example:
        >>> share_factor(0, 2, 2), share_factor(0, 2, 1), share_factor(0, 1, 2)
        (1.0, 0.5, 1.0)
    """
    holders = len(range(old_rank, size, old_size)) if size > old_size else 1
    return size / (old_size * max(holders, 1))


def redistributed(entries: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """The entry for one rank of another number of ranks, so that the mean residual is kept exactly.

    Args:
        entries: of all old ranks, in any order.
        rank: new rank, from 0.
        size: new number of ranks.

    Returns:
        An entry to load; see `share_factor` for what is in it.

    Raises:
        StateMismatchError: if the entries are not those of all old ranks of one run.
        ArgumentError: if there is no such rank.
    """
    if not 0 <= rank < size:
        raise ArgumentError("rank", rank, f"a rank of {size}, from 0")
    by_rank = {entry["rank"]: entry for entry in entries}
    old_size = len(entries)
    if sorted(by_rank) != list(range(old_size)) or any(entry["size"] != old_size for entry in entries):
        raise StateMismatchError(
            f"entries of ranks {sorted(entry['rank'] for entry in entries)} were given, of runs with "
            f"{sorted({entry['size'] for entry in entries})} ranks: give one of every rank of one run"
        )
    if old_size == size:
        return dict(by_rank[rank])
    mine = [rank % old_size] if size > old_size else range(rank, old_size, size)
    shares = [(by_rank[old], share_factor(old, old_size, size)) for old in mine]
    return {
        **by_rank[mine[0]],
        "rank": rank,
        "size": size,
        # nothing is left to scale, and no bucket's state fits
        "resized": True,
        "residuals": _sum([(entry["residuals"], factor) for entry, factor in shares]),
        "companions": [
            _sum([(entry["companions"][i], factor) for entry, factor in shares])
            for i in range(len(by_rank[0]["companions"]))
        ],
    }


def _sum(shares: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, Any]:
    """Sums of factor times array, by name."""
    total: dict[str, Any] = {}
    for arrays, factor in shares:
        for name, values in arrays.items():
            total[name] = total[name] + values * factor if name in total else values * factor
    return total
