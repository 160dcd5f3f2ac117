"""One bucket per parameter, made when its first gradient arrives: what the drop-in compressor keeps."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from horovod_sparse.errors import StateMismatchError, UnsupportedError
from horovod_sparse.feedback import Bucket, Progress, Recipe, resumed
from horovod_sparse.feedback.state import from_plain, shared_digest, to_plain
from horovod_sparse.frontend.agreement import Standing, Start, kept_share
from horovod_sparse.frontend.state import companions_fit, feedback_name
from horovod_sparse.merging import Plan
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.torch.memory import GradientMemory, memory_of
from horovod_sparse.torch.tensors import dtype_name, on_host

__all__ = ["ParameterBuckets"]


@dataclass
class _Entry:
    bucket: Bucket
    memory: GradientMemory
    parameter: weakref.ref[torch.Tensor]


class ParameterBuckets:
    """Buckets by parameter name.

    Args:
        recipe: what to do with every one of them.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._entries: dict[str, _Entry] = {}
        self._saved: dict[str, Mapping[str, Any]] = {}  # loaded before the bucket exists
        #: with what states began that all ranks started anew: those of new buckets, too
        self._start = Start(False, 0, Plan(()))

    def get(
        self, name: str, parameter: torch.Tensor, gradient: torch.Tensor, place: tuple[int, int]
    ) -> Bucket:
        """The parameter's bucket, at a place (rank, size).

        Raises:
            UnsupportedError: if the name already belongs to another parameter.
        """
        info = BucketInfo(name, gradient.numel(), *place, str(dtype_name(gradient)))
        memory = memory_of(gradient.device, name)
        entry = self._entries.get(name)
        if entry is not None:
            owner = entry.parameter()
            if owner is not None and owner is not parameter:
                raise UnsupportedError(
                    f"two parameters are called {name}: give every optimizer a compressor of its own, "
                    "and every parameter of it another name (named_parameters)"
                )
            if owner is parameter and entry.bucket.info == info and entry.memory is memory:
                return entry.bucket
        recipe = self._recipe.for_parameter(name, gradient.numel())
        bucket = Bucket(info, recipe, memory.accumulator(info, recipe), timed=True)
        new = _Entry(bucket, memory, weakref.ref(parameter))
        bucket.restart(resumed(Progress(), self._start.told.get(name), self._start.step))
        same = entry is not None and entry.parameter() is parameter
        if entry is not None and same and entry.bucket.info.num_elements == info.num_elements:
            _take_over(new, entry)
        if name in self._saved:
            _load(new, self._saved.pop(name))
        self._entries[name] = new
        return new.bucket

    def take_up(
        self, name: str, parameter: torch.Tensor, gradient: torch.Tensor, place: tuple[int, int]
    ) -> None:
        """Makes the parameter's bucket where its state was loaded before, so that `standing` knows of it."""
        if name in self._saved and name not in self._entries:
            self.get(name, parameter, gradient, place)

    def standing(self, place: tuple[int, int]) -> Standing:
        """Where this rank stands; at a place, unless its states were made for another."""
        buckets = {
            name: entry.bucket for name, entry in self._entries.items() if entry.parameter() is not None
        }
        places = {(bucket.info.rank, bucket.info.size) for bucket in buckets.values()}
        return Standing(
            max((bucket.state.step for bucket in buckets.values()), default=0),
            shared_digest({name: bucket.state for name, bucket in buckets.items()}),
            next(iter(places - {place}), place),
            settings={"compression": self._recipe.describe()},
            told={name: bucket.progress.to_plain() for name, bucket in buckets.items()},
        )

    def start_anew(self, start: Start, place: tuple[int, int]) -> None:
        """Fresh states, as all ranks have agreed; residuals are kept, and so is their mean."""
        self._start = start
        for name, entry in list(self._entries.items()):
            if entry.parameter() is None:
                del self._entries[name]
                continue
            old = entry.bucket
            info = dataclasses.replace(old.info, rank=place[0], size=place[1])
            recipe = self._recipe.for_parameter(name, info.num_elements)
            entry.bucket = Bucket(info, recipe, old.accumulator, timed=True)
            entry.bucket.restart(resumed(old.progress, start.told.get(name), start.step))
            factor = kept_share(old.info.size, info.size)
            if factor != 1.0:
                companions = [values * factor for values in entry.memory.companions(old.accumulator)]
                old.accumulator.assign(old.accumulator.values() * old.info.value_dtype.type(factor))
                entry.memory.assign_companions(old.accumulator, companions)

    def state_dict(self) -> dict[str, Any]:
        """Residual, learning rate and the sparsifier's state by parameter name: tensors and plain values."""
        saved = {name: dict(state) for name, state in self._saved.items()}
        saved |= {name: _save(entry) for name, entry in self._entries.items()}
        return {"algorithm": self._recipe.sparsifier.name, "parameters": saved}

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str] | None = None) -> None:
        """Takes over what `state_dict` gave. What belongs to parameters without a bucket waits for it.

        Args:
            state: the saved one.
            names: of all parameters, where they are known.

        Raises:
            StateMismatchError: if something does not fit; nothing has been taken over then.
        """
        saved, algorithm = on_host(state["parameters"]), self._recipe.sparsifier.name
        if state["algorithm"] != algorithm:
            raise StateMismatchError(f"the saved state is one of {state['algorithm']}, not of {algorithm}")
        unknown = sorted(set(saved) - set(saved if names is None else names))
        if unknown:
            raise StateMismatchError(f"the saved state has parameters that are not here: {unknown}")
        for name, entry in self._entries.items():
            if name in saved:
                _check(entry, saved[name])
        for name, entry in self._entries.items():
            if name in saved:
                _load(entry, saved[name])
        self._saved = {name: one for name, one in saved.items() if name not in self._entries}


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def _take_over(new: _Entry, old: _Entry) -> None:
    """Goes on with what was kept for the same parameter, which may have another type or device now."""
    new.bucket.restart(old.bucket.progress)
    if new.memory is old.memory and new.bucket.info.value_dtype == old.bucket.info.value_dtype:
        new.bucket.accumulator = old.bucket.accumulator
    else:
        new.bucket.accumulator.assign(old.bucket.accumulator.values())
        new.memory.assign_companions(new.bucket.accumulator, old.memory.companions(old.bucket.accumulator))


def _save(entry: _Entry) -> dict[str, Any]:
    bucket = entry.bucket
    return {
        "residual": _tensor(bucket.accumulator.values()),
        "companions": [_tensor(array) for array in entry.memory.companions(bucket.accumulator)],
        "feedback": feedback_name(bucket.recipe.feedback),
        **bucket.progress.to_plain(),
        "size": bucket.info.size,
        "sparsifier": to_plain(bucket.state, _tensor),
    }


def _check(entry: _Entry, saved: Mapping[str, Any]) -> Any:
    """The saved state of the sparsifier, if everything fits the bucket."""
    bucket, info = entry.bucket, entry.bucket.info
    feedback = bucket.recipe.feedback
    if int(saved["size"]) != info.size:
        raise StateMismatchError(
            f"the saved state of {info.name} is one of {saved['size']} ranks, now there are {info.size}: "
            "load it into as many ranks, start with an empty residual, or train with "
            "horovod_sparse.torch.DistributedOptimizer, whose state can be redistributed"
        )
    if saved["residual"].numel() != info.num_elements or not companions_fit(saved, feedback):
        raise StateMismatchError(
            f"the saved state of {info.name} has {saved['residual'].numel()} elements and "
            f"{len(saved['companions'])} arrays beside the residual, the parameter has {info.num_elements} "
            f"and {feedback}: it belongs to another model or to another feedback"
        )
    return from_plain(bucket.recipe.sparsifier.init(info), saved["sparsifier"])


def _load(entry: _Entry, saved: Mapping[str, Any]) -> None:
    bucket = entry.bucket
    state = _check(entry, saved)
    bucket.restart(Progress.from_plain(saved, state.step))
    bucket.state = state
    bucket.accumulator.assign(saved["residual"].numpy())
    companions = [companion.numpy() for companion in saved["companions"]]
    entry.memory.assign_companions(bucket.accumulator, companions)
