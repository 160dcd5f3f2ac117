"""One bucket per parameter, found by its gradient and made when the first arrives: what a drop-in keeps."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from horovod_sparse.errors import ArgumentError, StateMismatchError, UnsupportedError
from horovod_sparse.feedback import Bucket, Progress, Recipe, resumed
from horovod_sparse.feedback.state import from_plain, shared_digest, to_plain
from horovod_sparse.plans.plan import Plan
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.tensors.flat_gradient import memory_of
from horovod_sparse.tensors.layout import dtype_name, on_host
from horovod_sparse.tensors.memory import GradientMemory
from horovod_sparse.training.agreement import AgreedStatus, RankStatus, kept_share
from horovod_sparse.training.state import check_parameters, companions_fit, feedback_name


class NamedParameters:
    """Parameters by name, and by the gradient they hold.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> parameters = NamedParameters(layer.named_parameters())
        >>> layer.bias.grad = torch.zeros(1)
        >>> parameters.owner(layer.bias.grad)[0]
        'bias'
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._pairs: list[tuple[str, torch.Tensor]] = [_checked(pair) for pair in named_parameters]
        names = [name for name, _ in self._pairs]
        twice = (
            sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        )
        if twice:
            raise ArgumentError("named_parameters", twice, "every name once")
        # backward visits parameters in nearly the same order every time: look first at the one that
        # followed last time, so that a step costs O(L) look-ups and not O(L^2)
        self._last = 0
        self._follower = {i: i - 1 for i in range(len(self._pairs))}

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def names(self) -> list[str]:
        """All names, in the order given."""
        return [name for name, _ in self._pairs]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All parameters, in the order given."""
        return [parameter for _, parameter in self._pairs]

    def owner(self, gradient: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Name and parameter whose `.grad` is this very tensor; None if there is none."""
        guess = self._follower.get(self._last, 0)
        for i in (guess, *range(len(self._pairs))):
            if 0 <= i < len(self._pairs) and self._pairs[i][1].grad is gradient:
                self._follower[self._last] = i
                self._last = i
                return self._pairs[i]
        return None

    def owner_or_copy(self, gradient: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """As `owner`; None only for what must be the dense copy of a sparse gradient (sparse_as_dense)."""
        owner = self.owner(gradient)
        if owner is None and not any(
            parameter.grad is not None and parameter.grad.is_sparse for _, parameter in self._pairs
        ):
            raise UnsupportedError(
                f"a tensor of shape {tuple(gradient.shape)} is no gradient of a parameter that this "
                f"compressor knows ({', '.join(self.names[:4])}, ...): a sparsifier keeps a residual for "
                "every parameter, so it compresses nothing else. If you pass named_parameters to the "
                "compressor, name them all"
            )
        return owner


def _checked(pair: Any) -> tuple[str, torch.Tensor]:
    if (
        not isinstance(pair, tuple)
        or len(pair) != 2
        or not isinstance(pair[0], str)
        or not isinstance(pair[1], torch.Tensor)
    ):
        raise ArgumentError(
            "named_parameters", pair, "pairs (name, parameter), as from model.named_parameters()"
        )
    return pair


@dataclass
class _Entry:
    bucket: Bucket
    memory: GradientMemory
    parameter: weakref.ref[torch.Tensor]


class ParameterBuckets:
    """Buckets by parameter name."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._entries: dict[str, _Entry] = {}
        self._saved: dict[str, Mapping[str, Any]] = {}  # loaded before the bucket exists
        #: with what states began that all ranks started anew: those of new buckets, too
        self._start = AgreedStatus(False, 0, Plan(()))

    def get(
        self, name: str, parameter: torch.Tensor, gradient: torch.Tensor, place: tuple[int, int]
    ) -> Bucket:
        """The parameter's bucket, at a place (rank, size)."""
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
        self._recipe.refuse_auto("Horovod's own optimizer")
        recipe = self._recipe.for_parameter(name, gradient.numel())
        bucket = Bucket(info, recipe, memory.accumulator(info, recipe))
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
        """Makes the parameter's bucket where its state was loaded before, so that `status` knows of it."""
        if name in self._saved and name not in self._entries:
            self.get(name, parameter, gradient, place)

    def status(self, place: tuple[int, int]) -> RankStatus:
        """Where this rank stands; at a place, unless its states were made for another."""
        buckets = {
            name: entry.bucket for name, entry in self._entries.items() if entry.parameter() is not None
        }
        places = {(bucket.info.rank, bucket.info.size) for bucket in buckets.values()}
        return RankStatus(
            max((bucket.state.step for bucket in buckets.values()), default=0),
            shared_digest({name: bucket.state for name, bucket in buckets.items()}),
            next(iter(places - {place}), place),
            told={name: bucket.progress.to_plain() for name, bucket in buckets.items()},
        )

    def start_anew(self, start: AgreedStatus, place: tuple[int, int]) -> None:
        """Fresh states, as all ranks have agreed; residuals are kept, and so is their mean."""
        self._start = start
        for name, entry in list(self._entries.items()):
            if entry.parameter() is None:
                del self._entries[name]
                continue
            old = entry.bucket
            info = dataclasses.replace(old.info, rank=place[0], size=place[1])
            recipe = self._recipe.for_parameter(name, info.num_elements)
            entry.bucket = Bucket(info, recipe, old.accumulator)
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
        """Takes over what `state_dict` gave. What belongs to parameters without a bucket waits for it."""
        try:
            state = on_host(state)
        except RecursionError as error:
            raise StateMismatchError("the saved state is nested without end") from error
        check_parameters(state)
        saved, algorithm = state["parameters"], self._recipe.sparsifier.name
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
