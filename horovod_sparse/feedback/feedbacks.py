"""Feedbacks, by name: each folds a gradient into the residual before a selection."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from horovod_sparse.arrays import FoldRule
from horovod_sparse.checks import check_number
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.sparsifiers.base import BucketInfo


class Rates(NamedTuple):
    """Learning rate of one step, age of the companions, and ratio of a whole batch's step to a rank's.

    Attributes:
        rate: the optimizer's learning rate; 1 if the caller multiplies the sum by it.
        age: number of steps that went into the companions.
        longer: how many times longer the whole batch's step is than one rank's; see `AdamFeedback`.
    """

    rate: float = 1.0
    age: int = 0
    longer: float = 1.0


#: cached, since most steps have the same rule, and making one checks its arguments
_fold_rule = functools.lru_cache(maxsize=64)(FoldRule)


class Feedback:
    """Says how residual and gradient become the accumulator, from which the sparsifier selects.

    A subclass is a frozen dataclass that overrides methods. All of them can clip gradients.
    """

    #: its name in recipes as text; empty if text cannot name it
    text_name: ClassVar[str] = ""
    #: number of arrays of n elements beside the residual
    num_companions: ClassVar[int] = 0
    #: True if messages hold steps that include the learning rate
    applies_rate: ClassVar[bool] = False
    #: True if ranks also step ahead by their largest unsent elements, until the next pass
    steps_ahead: ClassVar[bool] = False
    #: True if companions add up over ranks as residuals do, so that a new number of ranks scales them
    adds_up: ClassVar[bool] = True

    clip_norm: float | None = None
    #: how much of the residual lasts from one step to the next
    decay: float = 1.0

    def __post_init__(self) -> None:
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, "a norm above 0, or None")

    def rule(self, info: BucketInfo, rates: Rates) -> FoldRule:
        """Returns the `FoldRule` of one step, with its learning rate and the companions' age."""
        # clip_norm bounds the sum over ranks; one rank's gradient gets less
        norm = None if self.clip_norm is None else self.clip_norm / math.sqrt(info.size)
        return _fold_rule(decay=self.decay, clip_norm=norm, **self._rule_arguments(rates))

    def _rule_arguments(self, rates: Rates) -> dict[str, Any]:
        """Returns the arguments of `FoldRule` that are this feedback's own, beside decay and clip_norm."""
        return {}

    def moment_factor(self, age: int, new_age: int) -> float:
        """Returns the factor that turns a companion of `age` steps into one of `new_age` steps."""
        return 1.0

    def for_dense(self) -> Any:
        """Returns the feedback for a bucket of which all elements are sent: by default the same."""
        return self

    @property
    def changes_dense(self) -> bool:
        """True if this feedback changes gradients even where all elements are sent (momentum, clipping)."""
        return self.num_companions > 0 or self.clip_norm is not None

    def for_shards(self, count: int) -> Any:
        """Returns the feedback for one of `count` shards; its clip_norm is the bucket's over sqrt(count)."""
        if self.clip_norm is None:
            return self
        return dataclasses.replace(self, clip_norm=self.clip_norm / math.sqrt(count))  # type: ignore[type-var]


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """Keeps unsent elements for later steps: ``acc = residual + gradient``, ``residual = acc - sent``.

    The papers fold the learning rate in (``acc = e + eta * G``); Horovod's optimizers receive gradients and
    multiply by eta later. Both are equal while eta is constant. When eta changes, old gradients are applied
    with the new rate, as the public programs do.

    Args:
        clip_norm: of a rank's gradient of a bucket, times sqrt(P); None for no clipping. See
            `MomentumCorrection`.
        decay: in (0, 1]: ``acc = decay residual + gradient``. Below 1 the residual forgets old rounds, as in
            SparseLoCo (0.95).

    Source: Seide et al. 2014; ExDyna and MiCRO, Algorithm 1.

    Example:
        >>> ErrorFeedback().changes_dense
        False
    """

    text_name: ClassVar[str] = "error"

    clip_norm: float | None = None
    decay: float = 1.0

    def __post_init__(self) -> None:
        check_number("decay", self.decay, "a number in (0, 1]", "(0, 1]")
        super().__post_init__()


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """Drops unsent elements: ``acc = gradient``. For comparison; it does not converge in general.

    Args:
        clip_norm: see `ErrorFeedback`.
    """

    text_name: ClassVar[str] = "none"
    decay = 0.0

    clip_norm: float | None = None


@dataclass(frozen=True)
class MomentumCorrection(Feedback):
    """``u = m u + g,  acc = e + u``; sent elements are cleared in the residual e and in the velocity u.

    With plain error feedback, momentum does not accumulate for unsent gradients. Here every rank applies
    momentum before it selects, so the optimizer must be SGD without momentum (an ArgumentError otherwise);
    therefore it is no default. Weight decay stays with the optimizer, outside of the velocity.

    Args:
        momentum: m, in [0, 1).
        nesterov: ``acc = e + g + m u`` instead: what Nesterov's momentum of PyTorch's SGD adds.
        masking: clear the velocity where values were sent (momentum factor masking), so that stale
            momentum does not push on.
        clip_norm: largest L2 norm of a rank's gradient of a bucket, times sqrt(P); None for no clipping.
            Local clipping by ``clip_norm / sqrt(P)`` bounds the norm of the sum as global clipping by
            clip_norm would, if gradients of different ranks are independent.

    Source: Lin et al., ICLR 2018 (DGC), Sections 3.1-3.3. Departure: clipping is by bucket, since a norm
    over all parameters is known only after the whole backward pass.

    Example:
        >>> MomentumCorrection(momentum=0.9).num_companions
        1
    """

    text_name: ClassVar[str] = "momentum"
    num_companions: ClassVar[int] = 1  # the velocity

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        check_number("momentum", self.momentum, "a number in [0, 1)", "[0, 1)")
        super().__post_init__()

    def _rule_arguments(self, rates: Rates) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov, "masking": self.masking}

    def for_dense(self) -> MomentumCorrection:
        """Returns a copy without masking: where all is sent, masking would always clear the velocity."""
        return dataclasses.replace(self, masking=False)


@dataclass(frozen=True)
class OwnStep:
    """Rule, weights and rates that turn a parameter group's gradients into an optimizer's steps in one pass.

    Attributes:
        feedback: the rule that folds gradients.
        weights: the factors of gradient and parameter; their weighted sum is folded.
        shrink: factor that multiplies the parameters: decoupled weight decay.
        rate: learning rate.
        matrices: `Matrices`, which makes steps of whole parameters before the fold; None but for Muon.
    """

    feedback: Feedback
    weights: tuple[float, float]
    shrink: float
    rate: float
    matrices: Any = None


class Rule(Feedback):
    """Base of feedbacks that make each rank's gradient an optimizer's step; residuals hold steps.

    A new one is a copy of `sgd.py` (a line of the fold) or `muon.py` (anything else), and a name in
    `rules.RULES`.
    """

    applies_rate: ClassVar[bool] = True
    #: names of PyTorch's and of Keras' optimizers with this rule
    optimizers: ClassVar[tuple[str, ...]] = ()
    keras: ClassVar[tuple[str, ...]] = ()
    #: the companion's name in the state of PyTorch's optimizer, and Keras' attribute of it, with its sign
    moment: ClassVar[str]
    keras_moment: ClassVar[str]
    keras_sign: ClassVar[float] = 1.0
    #: PyTorch's settings that the rule does not follow, and why
    refused: ClassVar[Mapping[str, str]] = {}
    #: True if it needs whole parameters, so no shards
    takes_whole: ClassVar[bool] = False
    #: the smallest and the largest density that cost no accuracy, where these are known
    densities: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def with_group_settings(self, groups: Sequence[Mapping[str, Any]]) -> Rule:
        """Returns the rule with momentum and nesterov of PyTorch's groups if it is SGD's, else unchanged."""
        return self

    def own_step(self, kind: str, group: Mapping[str, Any], age: int) -> OwnStep:
        """Returns the `OwnStep` of a PyTorch parameter group for one pass, by its present settings.

        Args:
            kind: name of the optimizer's class in PyTorch: "Adam", "AdamW", "SGD", ...
            group: one of its parameter groups.
            age: number of passes before this one.
        """
        raise NotImplementedError

    def keras_own_step(self, optimizer: Any, rate: float, age: int) -> OwnStep:
        """Returns a Keras optimizer's `OwnStep` by its present settings, without weight decay."""
        raise NotImplementedError


def decay_weights(group: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the factors (of gradient and parameter) by which PyTorch adds weight decay to a gradient.

    Example:
        >>> decay_weights({"maximize": True, "weight_decay": 0.1, "lr": 1.0})
        (-1.0, 0.1)
    """
    return -1.0 if group.get("maximize") else 1.0, float(group["weight_decay"])


@dataclass(frozen=True)
class BestFeedback(Feedback):
    """Placeholder that a front end replaces by the `Rule` of the wrapped optimizer.

    Args:
        clip_norm: see `MomentumCorrection`.
    """

    text_name: ClassVar[str] = "best"
    applies_rate: ClassVar[bool] = True

    clip_norm: float | None = None

    def _rule_arguments(self, rates: Rates) -> dict[str, Any]:
        raise UnsupportedError("feedback='best' is the optimizer's rule: wrap the optimizer, or give 'adam'")
