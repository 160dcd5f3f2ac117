"""Residuals and sparsifier states in an optimizer's `state_dict`.

Residuals belong to parameters and are saved by parameter name, in the parameter's shape; states of
sparsifiers belong to buckets. Both differ from rank to rank, so every rank saves a file of its own to
resume exactly. What happens otherwise:

* same ranks, same plan: training continues bit for bit;
* another plan: residuals are kept, sparsifier states start anew (one line in the log);
* another number of ranks: residuals are kept and scaled, see `redistribute`; states start anew;
* all ranks load one rank's file: each gets that rank's residual, an estimate of the mean;
* ranks load files of different steps, or some load and others do not: residuals are kept, states start anew
  on all ranks, at the furthest step (`horovod_sparse.frontend.agreement`);
* elastic training takes back what this worker saved at another number of ranks: residuals times Q / P;
* of parameters that have joined the training (`add_param_group`, thawed layers): join them before what was
  saved with them is loaded; what was saved before they had joined loads at any time;
* a checkpoint without the entry (a dense run's): residuals start at zero.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.errors import ArgumentError, StateMismatchError, UnsupportedError
from horovod_sparse.feedback import Progress
from horovod_sparse.feedback.state import from_plain, to_plain
from horovod_sparse.frontend.agreement import kept_share
from horovod_sparse.frontend.parts import assign_residuals, held_residuals
from horovod_sparse.frontend.state import companions_fit, feedback_name
from horovod_sparse.merging import Plan
from horovod_sparse.pytorch.layout import on_host
from horovod_sparse.torch.synchronizer import GradientSynchronizer

__all__ = ["ENTRY", "load", "redistribute", "save"]

#: where an optimizer's state_dict has it; optimizers of PyTorch pass over what they do not know
ENTRY = "horovod_sparse"
_FORMAT = 1

_log = logging.getLogger("horovod_sparse")


def save(synchronizer: GradientSynchronizer) -> dict[str, Any]:
    """The entry of this rank, of tensors, numbers and strings alone (``torch.load(weights_only=True)``).

    Raises:
        UnsupportedError: while a bucket is under way: what it has sent is in no residual any more, and
            in no gradient yet.
    """
    if any(part.task is not None for part in synchronizer.parts):
        raise UnsupportedError(
            "an optimizer is saved between steps: call optimizer.step() or optimizer.synchronize() first"
        )
    held = held_residuals(synchronizer.parts, synchronizer.recipe.feedback.num_companions)
    return {
        "format": _FORMAT,
        "algorithm": synchronizer.recipe.sparsifier.name,
        "recipe": synchronizer.recipe.describe(),
        "rank": synchronizer.rank,
        "size": synchronizer.size,
        "step": synchronizer.step,
        "plan": synchronizer.plan.to_dict(),
        "residuals": held[0],
        "companions": held[1:],
        "feedback": feedback_name(synchronizer.recipe.feedback),
        "buckets": [
            {
                **part.bucket.progress.to_plain(),
                "state": to_plain(part.bucket.state, lambda array: torch.from_numpy(array.copy())),
            }
            for part in synchronizer.sparse
        ],
    }


def load(synchronizer: GradientSynchronizer, entry: Mapping[str, Any] | None) -> None:
    """Continues from an entry; from nothing, if there is none. Needs no collective.

    Args:
        synchronizer: with no step under way.
        entry: as `save` or `redistribute` made it.

    Raises:
        StateMismatchError: if parameters, shapes or the algorithm differ. Nothing has been loaded then.
    """
    if entry is None:
        synchronizer.take_place()
        assign_residuals(synchronizer.parts, (), {})
        synchronizer.step = 0
        return
    _check(synchronizer, entry)
    synchronizer.take_place()
    entry = on_host(entry)
    plan = Plan.from_dict(entry["plan"])
    if not set(plan.names()) <= set(synchronizer.facts):
        synchronizer.take_in()
    size = entry["size"]
    kept = plan == synchronizer.plan and size == synchronizer.size and not entry.get("resized")
    buckets = [part.bucket for part in synchronizer.sparse]
    states = [
        from_plain(bucket.recipe.sparsifier.init(bucket.info), saved["state"])
        for bucket, saved in zip(buckets, entry["buckets"] if kept else (), strict=kept)
    ]
    progress = {
        name: Progress.from_plain(saved, saved["state"]["step"])
        for names, saved in zip(plan.buckets, entry["buckets"], strict=True)
        for name in names
    }
    # in elastic training, what this worker saved when there were more or fewer: no other has a share in it
    own = size in synchronizer.sizes
    factor = kept_share(size, synchronizer.size) if own else _factor(entry["rank"], size, synchronizer.size)
    held = [
        {name: values * factor for name, values in by_name.items()}
        for by_name in (entry["residuals"], *entry["companions"])
    ]
    assign_residuals(synchronizer.parts, held, progress)
    synchronizer.step = entry["step"]
    for bucket, state in zip(buckets, states, strict=kept):
        bucket.state = state
    if not kept:
        what = f"another plan ({plan})" if size == synchronizer.size else f"{size} ranks"
        _log.warning(
            "the checkpoint is of %s, now %d ranks, %s: residuals are kept, sparsifier states start anew",
            what,
            synchronizer.size,
            synchronizer.plan,
        )


def redistribute(entries: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """The entry for one rank of another number of ranks, so that the mean residual is kept exactly.

    Of P old ranks and Q new ones, old rank o belongs to new rank o mod Q if Q < P, and to all new ranks
    r with r mod P = o otherwise. Each of its h holders takes ``e_o * Q / (P * h)``; so the mean over new
    ranks is ``1/Q * sum_o h * e_o * Q / (P * h)``, the mean over old ranks.

    Args:
        entries: of all old ranks, in any order.
        rank: new rank, from 0.
        size: Q.

    Returns:
        An entry for `load`: ``state["horovod_sparse"] = redistribute(...)``.

    Raises:
        StateMismatchError: if the entries are not those of all old ranks of one run.
        ArgumentError: if there is no such rank.
    """
    if not 0 <= rank < size:
        raise ArgumentError("rank", rank, f"a rank of {size}, from 0")
    by_rank = {entry["rank"]: on_host(entry) for entry in entries}
    old_size = len(entries)
    if sorted(by_rank) != list(range(old_size)) or any(entry["size"] != old_size for entry in entries):
        raise StateMismatchError(
            f"entries of ranks {sorted(entry['rank'] for entry in entries)} were given, of runs with "
            f"{sorted({entry['size'] for entry in entries})} ranks: give one of every rank of one run"
        )
    if old_size == size:
        return dict(by_rank[rank])
    mine = [rank % old_size] if size > old_size else range(rank, old_size, size)
    shares = [(by_rank[old], _factor(old, old_size, size)) for old in mine]
    return {
        **by_rank[mine[0]],
        "rank": rank,
        "size": size,
        # `load` has nothing left to scale, and no bucket's state fits
        "resized": True,
        "residuals": _sum([(entry["residuals"], factor) for entry, factor in shares]),
        "companions": [
            _sum([(entry["companions"][i], factor) for entry, factor in shares])
            for i in range(len(by_rank[0]["companions"]))
        ],
    }


def _sum(shares: Sequence[tuple[Mapping[str, torch.Tensor], float]]) -> dict[str, torch.Tensor]:
    """Sums of factor times tensor, by name."""
    total: dict[str, torch.Tensor] = {}
    for tensors, factor in shares:
        for name, values in tensors.items():
            total[name] = total[name] + values * factor if name in total else values * factor
    return total


def _factor(old_rank: int, old_size: int, size: int) -> float:
    """What a holder of an old rank's residual multiplies it by."""
    holders = len(range(old_rank, size, old_size)) if size > old_size else 1
    return size / (old_size * max(holders, 1))


def _check(synchronizer: GradientSynchronizer, entry: Mapping[str, Any]) -> None:
    if entry.get("format") != _FORMAT:
        raise StateMismatchError(
            f"the saved state has format {entry.get('format')}, this version reads format {_FORMAT}"
        )
    if entry["algorithm"] != synchronizer.recipe.sparsifier.name:
        raise StateMismatchError(
            f"the saved state is of {entry['recipe']}, the optimizer uses {synchronizer.recipe.describe()}: "
            "use the same algorithm, or delete state_dict['horovod_sparse'] to start with no residual"
        )
    known = synchronizer.facts | synchronizer.joining()
    saved = set(Plan.from_dict(entry["plan"]).names())
    # of parameters that have joined, residuals are saved or zeros
    unknown, lacking = saved - set(known), set(synchronizer.facts) - saved - synchronizer.joined
    if unknown or lacking:
        raise StateMismatchError(
            f"the saved state is of another model: it has {sorted(unknown) or 'nothing'} that this one "
            f"has not, and lacks {sorted(lacking) or 'nothing'}"
        )
    if not companions_fit(entry, synchronizer.recipe.feedback):
        raise StateMismatchError(
            f"the saved state is of another feedback than {synchronizer.recipe.feedback}"
        )
    for name, values in entry["residuals"].items():
        shape = tuple(known[name][1].shape)
        if tuple(values.shape) != shape:
            raise StateMismatchError(f"{name} has shape {shape}, the saved state has {tuple(values.shape)}")
