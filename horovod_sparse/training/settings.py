"""`Settings`: the arguments of a training beside its sparsifier, for every front end."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from horovod_sparse.checks import check_count, check_number, whole_number
from horovod_sparse.errors import ArgumentError, UnknownNameError, UnsupportedError
from horovod_sparse.plans import Plan
from horovod_sparse.training.deadline import deadline_of

#: what `on_nonfinite` may be
RAISE, SKIP = "raise", "skip"
#: what `levels` may be
LEVELS = "flat", "host"

#: environment variables with defaults, also for Horovod's own optimizer, which takes no such argument
EVERY_VARIABLE = "HOROVOD_SPARSE_CHECK_EVERY"
_EVERY = 1000
#: "auto": MPI carries messages between two ranks where it can; "pairs": it carries all rounds of sparsifiers;
#: "alltoall": Horovod carries everything. Equal on all ranks.
TRANSPORT_VARIABLE = "HOROVOD_SPARSE_TRANSPORT"
TRANSPORTS = ("auto", "alltoall", "pairs")


class CommonOptions(TypedDict, total=False):
    """Keyword arguments that every front end takes; `Settings` explains them."""

    plan: Plan | None
    on_nonfinite: str
    check_every: int | None
    levels: str


class WaitingOptions(CommonOptions, total=False):
    """Keyword arguments of front ends with a deadline: those over torch.distributed."""

    deadline_seconds: float | None


class PlannedOptions(WaitingOptions, total=False):
    """Keyword arguments of front ends that make plans: TensorFlow's."""

    bucket_bytes: int | None
    merging: Any
    tensor_selection: Any
    profile: Any


class SettingsOptions(PlannedOptions, total=False):
    """Keyword arguments of PyTorch's front end over Horovod: all settings."""

    synchronize_at: str
    max_grad_norm: float | None


#: options that are allowed without a sparsifier
_HARMLESS = {"levels": "flat", "on_nonfinite": RAISE, "synchronize_at": "backward", "every": 1, "delay": 0}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a training that are not part of its recipe; users give them as keyword arguments.

    All are taken by `horovod_sparse.torch.DistributedOptimizer`; TensorFlow's front ends take all but
    `synchronize_at` and `max_grad_norm`; `horovod_sparse.ddp` takes `plan`, `on_nonfinite`, `check_every`,
    `levels` and `deadline_seconds`.

    Attributes:
        plan: which parameters form which bucket, in place of `groups` and `bucket_bytes`.
        bucket_bytes: bytes of gradients in a bucket; 32 MiB by default.
        merging: how buckets are made: "layerwise", "single", "omgs", "optimal",
            ``fixed(num_elements=...)``, ``fixed(bytes=...)`` (`horovod_sparse.merging.fixed`), a function
            of a workload and a cost model, or a `Plan`. "omgs", "optimal" and a function need `profile`.
        tensor_selection: which parameters are sparsified: "cost" (where it pays, by measured times), "all",
            ``min_elements(...)`` (`horovod_sparse.merging.min_elements`), or a function that returns a bool
            for a parameter's facts. By default buckets of fewer than 65,536 elements stay dense, with one
            warning, unless another argument about buckets is given.
        profile: a `horovod_sparse.merging.Profile`, which ``hvd.measured_profile(...)`` makes, or the path of
            a saved one, the same on all ranks; with `levels` "flat".
        synchronize_at: "backward" synchronizes during the backward pass; "step" begins when `step` or
            `synchronize` is called, without overlap, so that trainers may change a rank's own gradients
            before (Lightning's ``gradient_clip_val``, clipping by Hugging Face's Trainer).
        max_grad_norm: scales all synchronized gradients down to this norm over all of them, as
            ``torch.nn.utils.clip_grad_norm_`` after `synchronize` does. (The `clip_norm` of
            a feedback clips each rank's own gradients before they are accumulated, by bucket.)
        deadline_seconds: after so many seconds of waiting for other ranks `DeadlineError` is raised (a graph
            of TensorFlow quotes it); 0 waits for ever. By default HOROVOD_SPARSE_DEADLINE_SECONDS, or 300.
        on_nonfinite: what happens if a gradient is NaN or Inf on some rank. "raise"; "skip": no rank
            applies the step, which the telemetry counts. What "skip" means to each front end: `step`
            does nothing, but raises where it has a closure, and behind a `torch.amp.GradScaler` the scaler
            skips; with `horovod_sparse.ddp` no parameter has a gradient after ``backward()``, so PyTorch's
            optimizers leave all as it is; an optimizer of Keras does not step, and `iterations` does not
            count; a tape gives zeros and its `skipped` is true, which has to guard the update
            (``if not tape.skipped: optimizer.apply_gradients(...)``).
        check_every: every so many steps, and after the first step that follows a start or a load, ranks
            compare checksums of their parameters, and of the optimizer's state and settings where these are
            known; 0 for never. By default HOROVOD_SPARSE_CHECK_EVERY, or 1000. If any differ, every rank
            raises a `DriftError`, which names the arrays and ranks that differ.
        levels: "flat": all ranks are alike; "host": gradients are summed densely within each host first, and
            sparsified between hosts, see docs/merging.md.

    `plan` and Horovod's `groups` exclude each other and all of `bucket_bytes`, `merging` and
    `tensor_selection`; `bucket_bytes` is short for ``merging=fixed(bytes=...)``. Environment variables are
    read when a front end is made.
    """

    plan: Plan | None = None
    bucket_bytes: int | None = None
    merging: Any = None
    tensor_selection: Any = None
    profile: Any = None
    synchronize_at: str = "backward"
    max_grad_norm: float | None = None
    deadline_seconds: float | None = None
    on_nonfinite: str = RAISE
    check_every: int | None = None
    levels: str = LEVELS[0]

    def __post_init__(self) -> None:
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise ArgumentError("plan", self.plan, "a horovod_sparse.merging.Plan: Plan(buckets, dense)")
        if self.bucket_bytes is not None:
            check_count("bucket_bytes", self.bucket_bytes, "a whole number of bytes, 1 or more")
        if self.synchronize_at not in ("backward", "step"):
            raise ArgumentError("synchronize_at", self.synchronize_at, "'backward' or 'step'")
        if self.max_grad_norm is not None:
            allowed = "a norm above 0, or None"
            check_number("max_grad_norm", self.max_grad_norm, allowed)
        seconds = deadline_of(self.deadline_seconds)
        if self.on_nonfinite not in (RAISE, SKIP):
            raise ArgumentError("on_nonfinite", self.on_nonfinite, "'raise' or 'skip'")
        every = _checked_interval(self.check_every)
        if self.levels not in LEVELS:
            raise UnknownNameError("levels", str(self.levels), LEVELS)
        if self.levels != "flat" and self.profile is not None:
            raise ArgumentError("levels", self.levels, "'flat' with profile=, which has no times of levels")
        requested_transport()  # raises if the environment names an unknown one
        resolved = {"deadline_seconds": seconds if seconds < math.inf else 0.0}
        for name, value in {**resolved, "check_every": every}.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls, options: Mapping[str, Any], front_end: str, taken: type[Any], beside: Collection[str] = ()
    ) -> Settings:
        """Makes settings of keyword arguments; raises for an unknown one, and suggests a known name."""
        known = [*taken.__annotations__, *beside]
        for name in (one for one in options if one not in taken.__annotations__):
            hint = "".join(f"did you mean {near}? " for near in difflib.get_close_matches(name, known, 1))
            if name in {field.name for field in fields(cls)}:
                hint = "it is for other front ends. "
            raise UnknownNameError(f"argument of {front_end}", name, known, hint)
        return cls(**options)

    @property
    def planning(self) -> dict[str, Any]:
        names = "plan", "bucket_bytes", "merging", "tensor_selection", "profile"
        return {name: getattr(self, name) for name in names}

    def describe(self) -> dict[str, object]:
        """Returns the settings that have to be equal on all ranks, but no plan."""
        names = "max_grad_norm", "synchronize_at", "on_nonfinite", "check_every", "levels"
        return {name: getattr(self, name) for name in names}


def raise_if_no_sparsifier(options: Mapping[str, Any], compression: object) -> None:
    """Raises if options for a sparsifier were given, but `compression` is none."""
    given = [one for one, value in options.items() if value not in (None, _HARMLESS.get(one))]
    if given:
        raise ArgumentError("compression", compression, f"a sparsifier, or leave {', '.join(given)} out")


def _checked_interval(check_every: Any) -> int:
    """Returns the number of steps between comparisons of ranks: the argument, or the environment's."""
    name, every = "check_every", check_every
    if every is None:
        name, text = EVERY_VARIABLE, os.environ.get(EVERY_VARIABLE, "").strip() or str(_EVERY)
        every = text if whole_number(text) < 0 else whole_number(text)
    check_count(name, every, "a number of steps, or 0 for never", low=0)
    return int(every)


def requested_transport() -> str:
    wanted = os.environ.get(TRANSPORT_VARIABLE, "").strip() or "auto"
    if wanted not in TRANSPORTS:
        raise UnknownNameError(TRANSPORT_VARIABLE, wanted, TRANSPORTS)
    return wanted


def check_transport(hvd: Any) -> None:
    """Raises if the user asked for the transport "pairs" while Horovod runs on Gloo instead of MPI."""
    if requested_transport() == "pairs" and hvd.is_initialized() and not hvd.mpi_enabled():
        raise UnsupportedError(
            f"{TRANSPORT_VARIABLE}=pairs needs Horovod on MPI, and it runs on Gloo here: messages between "
            "pairs of ranks go over MPI alone. Unset it, or launch with horovodrun --mpi"
        )
