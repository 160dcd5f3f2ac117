"""Saved residuals: at another number of ranks, and whether they are of the same feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from horovod_sparse.errors import ArgumentError, StateMismatchError
from horovod_sparse.feedback import Feedback, LowPass


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
