"""Errors of this package; each message says which argument to change."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence


class HorovodSparseError(Exception):
    """Base of all errors of this package."""


class ArgumentError(HorovodSparseError, ValueError):
    """An argument has a value that is not allowed.

    Example:
        >>> raise ArgumentError("density", 2.0, "a number in (0, 1]")
        Traceback (most recent call last):
        horovod_sparse.errors.ArgumentError: density=2.0 is not allowed: give a number in (0, 1]
    """

    def __init__(self, argument: str, given: object, allowed: str) -> None:
        self.argument, self.given, self.allowed = argument, given, allowed
        super().__init__(argument, given, allowed)

    def __str__(self) -> str:
        given = repr(self.given)
        given = f"{type(self.given).__name__}(...)" if "\n" in given else given  # a model, an optimizer
        return f"{self.argument}={given} is not allowed: give {self.allowed}"


class UnknownNameError(ArgumentError):
    """A name of an argument, algorithm or rule is unknown; the error lists the known ones, after `hint`.

    Example:
        >>> str(UnknownNameError("sparsifier", "topq", ["topk", "micro"]))
        "unknown sparsifier 'topq': the known ones are micro, topk"
    """

    def __init__(self, kind: str, given: str, known: Iterable[str], hint: str = "") -> None:
        self.kind, self.known, self.hint = kind, sorted(known), hint
        HorovodSparseError.__init__(self, kind, given, self.known, hint)
        self.argument, self.given, self.allowed = kind, given, ", ".join(self.known)

    def __str__(self) -> str:
        return f"unknown {self.kind} {self.given!r}: {self.hint}the known ones are {self.allowed}"


class UnsupportedError(HorovodSparseError):
    """Options that cannot work together (Adasum, join); the error says what to use instead."""


class HorovodMissingError(HorovodSparseError, ImportError):
    """Horovod, or its binding for this framework, is not installed."""

    @classmethod
    def explained(cls, reason: str) -> HorovodMissingError:
        """Returns the error with this reason, and a link to how Horovod is built."""
        return cls(
            f"{reason}. Horovod 0.28.1 does not build against today's PyTorch and TensorFlow as it is "
            "published: scripts/setup of horovod_sparse builds it, docs/install.md says how to do it by hand."
        )


class NonFiniteGradientError(HorovodSparseError, ArithmeticError):
    """A gradient holds NaN or Inf on some rank; raised on every rank.

    All ranks cancelled the step: nothing was applied, and the next step may go on. The affected rank's
    gradients of this step are dropped, as far as the front end still has them; those of the other ranks stay
    in their residuals. `where` names, for each affected rank, the parameter (or "element i") of the first
    one.
    """

    #: ranks whose gradients were summed before a check: one of them is affected then
    hosts: Sequence[Sequence[int]] = ()

    def __init__(self, bucket: str, where: dict[int, str]) -> None:
        self.bucket, self.where = bucket, where
        super().__init__(bucket, where)

    @property
    def finding(self) -> str:
        """The first part of the error's text: which ranks and parameters have NaN or Inf."""
        words: dict[str, None] = {}
        for rank, place in sorted(self.where.items()):
            host = next((host for host in self.hosts if rank in host and len(host) > 1), None)
            who = f"rank {rank}" if host is None else f"one of ranks {', '.join(map(str, host))} of a host"
            words[f"{who}: {place}"] = None
        return f"the gradient of {self.bucket} is not finite ({'; '.join(words)})"

    def __str__(self) -> str:
        return (
            f"{self.finding}. No rank applied this step; "
            "lower the learning rate, clip the gradient, or look at that parameter's loss"
        )


class NonFiniteSumError(NonFiniteGradientError):
    """A sum over ranks is NaN or Inf though every rank's gradient is finite; raised on every rank.

    All ranks cancelled the step, as for a gradient that is not finite: all gradients are dropped. `parameter`
    has the first such element; `where` names no rank.
    """

    def __init__(self, bucket: str, where: dict[int, str], parameter: str = "") -> None:
        super().__init__(bucket, where)
        self.parameter = parameter

    @property
    def finding(self) -> str:
        return (
            f"the sum over ranks of {self.bucket} is more than its type holds ({self.parameter}), though the "
            "gradient of every rank is finite"
        )


class EditedGradientError(HorovodSparseError, RuntimeError):
    """A gradient was changed after its synchronization had begun; raised on every rank.

    No rank applied the step. The residuals keep the gradients from before the change; with two levels, where
    ranks of a host read each other's gradients in place, perhaps those from after it. `where` names the
    changed gradients of each rank that changed some, if this rank knows them.
    """

    def __init__(self, bucket: str, where: dict[int, str]) -> None:
        self.bucket, self.where = bucket, where
        super().__init__(bucket, where)

    def __str__(self) -> str:
        places = "; ".join(f"rank {rank}: {what}" for rank, what in sorted(self.where.items()))
        return (
            f"gradients were changed between backward and step ({places}), when their synchronization had "
            "begun already: the change would be lost. No rank applied this step. Change them after "
            "optimizer.synchronize(), and then call step() within optimizer.skip_synchronize(); or give "
            "DistributedOptimizer of horovod_sparse.torch synchronize_at='step', with which changes of a "
            "rank's own gradients count; or let its max_grad_norm=... clip what is applied"
        )


class CollectiveMismatchError(HorovodSparseError, RuntimeError):
    """Ranks asked for different collectives in the same round, which would wait for each other for ever."""


class DeadlineError(HorovodSparseError, TimeoutError):
    """A collective waited longer than the timeout for some ranks; the process cannot go on training.

    `missing` has the ranks that do not wait for it, and what else they wait for, if they do; None if unknown.
    """

    def __init__(self, bucket: str, round: int, seconds: float, missing: dict[int, str] | None) -> None:
        self.bucket, self.round, self.seconds, self.missing = bucket, round, seconds, missing
        super().__init__(bucket, round, seconds, missing)

    def __str__(self) -> str:
        if self.missing is None:
            who = "this rank cannot tell which ranks are missing: rank 0 logs a warning after 60 s"
        elif not self.missing:
            who = "all ranks wait for it, so the network or the library below does not go on"
        else:
            told = [
                f"rank {rank} "
                + (f"waits for {what}" if what else "does not wait: it computes, or has stopped")
                for rank, what in sorted(self.missing.items())
            ]
            who = "; ".join(told)
        return (
            f"round {self.round} of {self.bucket} has waited {self.seconds:g} s for other ranks ({who}). End "
            "this process, and resume from a checkpoint. If a step may take longer, since one rank evaluates "
            "or saves, give deadline_seconds=, or HOROVOD_SPARSE_DEADLINE_SECONDS; 0 waits for ever"
        )


class MessageError(HorovodSparseError, RuntimeError):
    """A message from another rank does not have the expected form."""


class StateMismatchError(HorovodSparseError, RuntimeError):
    """A saved state does not fit: it is of another algorithm, model, or number of ranks."""


class DriftError(StateMismatchError):
    """Parameters or optimizer state differ between ranks; raised on every rank."""

    def __str__(self) -> str:
        return (
            f"{super().__str__()}. Ranks train different models from here on: look for what changes "
            "parameters on some ranks alone (a load, an initialization, a step that not all take), broadcast "
            "them before training, and resume from a checkpoint"
        )


class CheckpointError(HorovodSparseError, RuntimeError):
    """A checkpoint could not be written, or its files are incomplete, changed or damaged."""


class ProfileMismatchError(HorovodSparseError, ValueError):
    """A saved profile cannot be used: it lacks measurements, or was made for another cluster or model."""


@functools.cache
def warn_once(words: str, *arguments: object) -> None:
    """Logs a warning, but only once per process for the same words and arguments."""
    logging.getLogger("horovod_sparse").warning(words, *arguments)
