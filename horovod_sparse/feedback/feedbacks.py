"""What happens to a gradient before selection, and to what was not selected after it; by name."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from horovod_sparse.arrays import FoldRule
from horovod_sparse.checks import check_number
from horovod_sparse.errors import ArgumentError, UnknownNameError, UnsupportedError
from horovod_sparse.sparsifiers.base import BucketInfo


class Rates(NamedTuple):
    """What a fold is told of its step.

    Attributes:
        before: learning rate whose gradients the residual is made of; None where unknown.
        now: of this step; where a rate is 0, or very small, what a residual can follow. See `Progress.at`.
        given: of this step, as the optimizer has it.
        age: steps that the companions are made of.
        longer: by how much steps of the whole batch are longer than one rank's; see `AdamFeedback`.
    """

    before: float | None
    now: float | None
    given: float | None = None
    age: int = 0
    longer: float = 1.0


#: a value that is the same in most steps, and checks itself when it is made
_fold_rule = functools.lru_cache(maxsize=64)(FoldRule)


class Feedback:
    """Says how a gradient and the residual become the accumulator, in one pass.

    A subclass is a frozen dataclass, and overrides what it does otherwise. All of them clip gradients, and
    can let the residual follow the learning rate.
    """

    #: in recipes written as text; empty where none can name it
    text_name: ClassVar[str] = ""
    #: arrays of n elements that it needs beside the residual
    num_companions: ClassVar[int] = 0
    #: whether what is not sent is sent later
    keeps_residual: ClassVar[bool] = True
    #: whether what is sent is a step, the learning rate included, that nothing is to multiply any more
    applies_rate: ClassVar[bool] = False
    #: whether companions add up over ranks as residuals do, and are shared out among others like these
    adds_up: ClassVar[bool] = True

    clip_norm: float | None = None
    scale_residual: bool = False
    #: how much of the residual lasts from one step to the next
    decay: float = 1.0

    def __post_init__(self) -> None:
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, "a norm above 0, or None", low=0.0, high=math.inf)

    def rule(self, info: BucketInfo, rates: Rates) -> FoldRule:
        """How a step's gradient is folded in: the residual times decay, and eta_before / eta_now if asked.

        Example:
            >>> bucket, falling = BucketInfo("b", 9), Rates(0.1, 0.05)
            >>> both = ErrorFeedback(scale_residual=True), ErrorFeedback()
            >>> [feedback.rule(bucket, falling).decay for feedback in both]
            [2.0, 1.0]
        """
        # of the sum over ranks; what one rank's gradient may have is less
        norm = None if self.clip_norm is None else self.clip_norm / math.sqrt(info.size)
        return _fold_rule(decay=self.units(rates) * self.decay, clip_norm=norm, **self._own(rates))

    def units(self, rates: Rates) -> float:
        """Returns by what the residual is multiplied to follow the learning rate."""
        # a rate of 0 (the first step of some warm-ups) has no quotient: what was held back is kept as it is
        return rates.before / rates.now if self.scale_residual and rates.before and rates.now else 1.0

    def _own(self, rates: Rates) -> dict[str, Any]:
        """Arguments of `FoldRule` that this feedback alone gives."""
        return {}

    def with_settings(self, settings: Mapping[str, float]) -> Any:
        """With what an optimizer says of its arguments, by their names, where nobody has said otherwise."""
        found = {name: value for name, value in settings.items() if getattr(self, name, value) is None}
        return dataclasses.replace(self, **found) if found else self  # type: ignore[type-var]

    def moved(self, age: int, new_age: int) -> float:
        """What companions made of `age` steps are multiplied by where they pass for such of `new_age`."""
        return 1.0

    def for_dense(self) -> Any:
        """The feedback of a parameter that is sent whole."""
        return self

    @property
    def changes_dense(self) -> bool:
        """Whether a gradient that is sent whole is changed before: by momentum, a moment, or clipping."""
        return self.num_companions > 0 or self.clip_norm is not None

    def for_shards(self, count: int) -> Any:
        """The feedback of each of so many shards of a bucket: all of them together may have its norm."""
        if self.clip_norm is None:
            return self
        return dataclasses.replace(self, clip_norm=self.clip_norm / math.sqrt(count))  # type: ignore[type-var]


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """What is not sent stays: ``acc = residual + gradient``, ``residual = acc - sent``.

    The papers fold the learning rate in (``acc = e + eta * G``); Horovod's optimizers receive
    gradients and multiply by eta later. The two are equal while eta is constant. When eta changes,
    old gradients are applied with the new learning rate, as the public programs do. `scale_residual`
    keeps the papers' form: the residual is multiplied by eta_before / eta_now, so that a gradient is
    always applied with the learning rate of the step that computed it.

    That form is for plain SGD alone. Momentum and adaptive moments outlive the step: what a falling rate
    has enlarged is in them still when the rate has come back, or spoils the estimate of a gradient's
    size. In no order of rates is the residual enlarged more than ten times (see `Progress.at`).

    Args:
        scale_residual: follow changes of the learning rate, as the papers' equations do; for optimizers
            without momentum or moments.
        clip_norm: of a rank's gradient of a bucket, times sqrt(P); None for no clipping. See
            `MomentumCorrection`.
        decay: in (0, 1]: ``acc = decay residual + gradient``. Below 1 what waits for long is forgotten, as in
            SparseLoCo (0.95), where steps of the past rounds point elsewhere by then.

    Source: Seide et al. 2014; ExDyna and MiCRO, Algorithm 1.

    Example:
        >>> ErrorFeedback().scale_residual
        False
    """

    text_name: ClassVar[str] = "error"

    scale_residual: bool = False
    clip_norm: float | None = None
    decay: float = 1.0

    def __post_init__(self) -> None:
        check_number("decay", self.decay, "a number in (0, 1]", low=0.0, high=1.0)
        super().__post_init__()


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """What is not sent is lost: ``acc = gradient``. For comparison; it does not converge in general.

    Args:
        clip_norm: see `ErrorFeedback`.
    """

    text_name: ClassVar[str] = "none"
    keeps_residual: ClassVar[bool] = False

    clip_norm: float | None = None

    def _own(self, rates: Rates) -> dict[str, Any]:
        return {"keep_residual": False}


@dataclass(frozen=True)
class MomentumCorrection(Feedback):
    """``u = m u + g,  acc = e + u``; sent positions are cleared in e and in u.

    With plain error feedback, a gradient that is held back for many steps misses the momentum it would
    have gathered. Here momentum is applied before, on every rank, so the optimizer must not apply it
    again: use SGD without momentum (with it an ArgumentError is raised). Weight decay stays with the
    optimizer, and so out of the velocity.

    It is nobody's default, not even of `DGC`, because it is right only together with a change of the
    user's optimizer, which a drop-in must not ask for.

    Args:
        momentum: m, in [0, 1).
        nesterov: ``acc = e + g + m u`` instead: what Nesterov's momentum of PyTorch's SGD adds.
        masking: clear the velocity where values were sent (momentum factor masking), so that stale
            momentum does not push on.
        clip_norm: largest L2 norm of a rank's gradient of a bucket, times sqrt(P); None for no clipping.
            Local clipping by ``clip_norm / sqrt(P)`` bounds the norm of the sum as global clipping by
            clip_norm would, if gradients of different ranks are independent.
        scale_residual: see `ErrorFeedback`; the velocity, made of gradients, is not scaled.

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
    scale_residual: bool = False

    def __post_init__(self) -> None:
        check_number(
            "momentum",
            self.momentum,
            "a number in [0, 1)",
            low=0.0,
            high=1.0,
            include_low=True,
            include_high=False,
        )
        super().__post_init__()

    def _own(self, rates: Rates) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov, "masking": self.masking}

    def for_dense(self) -> MomentumCorrection:
        """Unmasked: a velocity that is cleared in every step would be none."""
        return dataclasses.replace(self, masking=False)


@dataclass(frozen=True)
class VelocityFeedback(Feedback):
    """``u = m u + g,  acc = e + eta u``: SGD's own step on each rank, whose velocity nothing clears.

    With Nesterov's momentum ``acc = e + eta (g + m u)``. At density 1 that is SGD with momentum of the mean
    gradient: momentum is linear. Weight decay and dampening come with the gradient.

    Args:
        momentum: m, in [0, 1); 0 keeps no velocity. None: the optimizer's.
        nesterov: whether the optimizer has it; None: the optimizer's.
        clip_norm: see `MomentumCorrection`.

    Example:
        >>> VelocityFeedback(momentum=0.5).rule(BucketInfo("b", 9), Rates(None, None, 0.25)).rate
        0.25
    """

    text_name: ClassVar[str] = "sgd"
    applies_rate: ClassVar[bool] = True

    momentum: float | None = None
    nesterov: bool | None = None
    clip_norm: float | None = None

    @property
    def num_companions(self) -> int:  # type: ignore[override]
        """The velocity, where there is momentum."""
        return int(bool(self.momentum))

    def _own(self, rates: Rates) -> dict[str, Any]:
        if not self.momentum:
            return {}  # the rate comes with the gradient
        rate = 1.0 if rates.given is None else rates.given
        nesterov = bool(self.nesterov)
        return {"momentum": self.momentum, "nesterov": nesterov, "masking": False, "rate": rate}


@dataclass(frozen=True)
class Normalizing(Feedback):
    """What waits and is sent are steps of gradients that a second moment v of their rank has normalized.

    A normalizer says which: by its defaults, and whether v is corrected for its beginning at 0.
    """

    num_companions: ClassVar[int] = 1  # the second moment
    applies_rate: ClassVar[bool] = True
    adds_up: ClassVar[bool] = False
    default_beta2: ClassVar[float]
    #: whether v is divided by ``1 - beta2^t``
    corrected: ClassVar[bool]

    beta2: float | None = None
    eps: float | None = None
    clip_norm: float | None = None
    whole_batch: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.whole_batch, bool):
            raise ArgumentError("whole_batch", self.whole_batch, "True or False")
        for name, value, most, allowed in (
            ("beta2", self.beta2, 1.0, "a number between 0 and 1, or None"),
            ("eps", self.eps, math.inf, "a number above 0, or None"),
        ):
            if value is not None:
                check_number(name, value, allowed, low=0.0, high=most, include_high=False)
        super().__post_init__()

    @property
    def _beta2(self) -> float:
        return self.default_beta2 if self.beta2 is None else self.beta2

    def _own(self, rates: Rates) -> dict[str, Any]:
        return {
            "masking": False,
            "moment": self._beta2,
            "eps": 1e-8 if self.eps is None else self.eps,
            # where none is known who applies the sum multiplies it
            "rate": rates.longer * (1.0 if rates.given is None else rates.given),
            "count": rates.age + 1 if self.corrected else math.inf,
        }

    def moved(self, age: int, new_age: int) -> float:
        """Between two buckets the estimate stays, whose bias depends on the number of steps."""
        if not age:
            return 0.0
        return (1.0 - self._beta2**new_age) / (1.0 - self._beta2**age) if self.corrected else 1.0


@dataclass(frozen=True)
class AdamFeedback(Normalizing):
    """``acc = e + s eta z``, ``z = g / (sqrt(v / (1 - beta2^t)) + eps)``, ``v = beta2 v + (1 - beta2) g^2``.

    An optimizer with moments behind plain error feedback meets every element as a spike: its second moment
    becomes 1 / density times too large, and its first one pushes on in a direction that is old already. So a
    gradient is normalized where it is still dense, on its rank, and the *step* waits and is sent. There is no
    first moment: error feedback is one, with a memory of 1 / density steps. What comes back is applied as it
    is, after AdamW's decay: ``theta = theta (1 - eta weight_decay) - mean over ranks``. PyTorch's
    `DistributedOptimizer` and `attach` let the user's AdamW do that, and take eta, beta2 and eps from it.

    Of which gradient v is: of this rank's own, in float32 or float64. A loss's scale is divided out before,
    and clipping comes before, too. Passes that are accumulated count once, as the optimizer would see their
    sum. With two levels v is of the host's sum. A gradient that is not finite, or whose square is not, leaves
    v as it is; a gradient that is dropped with its step is taken out of v, to the rounding of its sum. What
    was sent is not cleared in v. Checkpoints hold v and the number of its steps. At another number of ranks a
    rank averages v of the ranks whose residuals it takes over; where other ranks share hosts v starts anew.

    Args:
        beta2: in (0, 1); None: the optimizer's, or 0.999 where none is known.
        eps: above 0; None: the optimizer's, or 1e-8.
        clip_norm: see `MomentumCorrection`.
        whole_batch: steps as long as those of the mean gradient, whose v is up to P times smaller than that
            of one rank's part of the batch: ``s = (mean |g_i|^2 / |mean g_i|^2)^(1/2)``, at most sqrt(P),
            of means over about 30 steps. Ranks learn it from how far each one's gradient leans along random
            signs that they share, which spare bits of their messages tell. False: s = 1.

    Example:
        >>> AdamFeedback(beta2=0.99).with_settings({"beta2": 0.95, "eps": 1e-6})
        AdamFeedback(beta2=0.99, eps=1e-06, clip_norm=None, whole_batch=True)
    """

    text_name: ClassVar[str] = "adam"
    default_beta2: ClassVar[float] = 0.999
    corrected: ClassVar[bool] = True


@dataclass(frozen=True)
class RMSpropFeedback(Normalizing):
    """As `AdamFeedback`, but ``z = g / (sqrt(v) + eps)``: the first steps are large, as RMSprop's.

    Args:
        beta2: of v, called alpha or rho elsewhere; None: the optimizer's, or 0.99 where none is known.
        eps: see `AdamFeedback`.
        clip_norm: see `MomentumCorrection`.
        whole_batch: see `AdamFeedback`.

    Example:
        >>> RMSpropFeedback(beta2=0.9).rule(BucketInfo("b", 9), Rates(None, None, 0.1)).count
        inf
    """

    text_name: ClassVar[str] = "rmsprop"
    default_beta2: ClassVar[float] = 0.99
    corrected: ClassVar[bool] = False


@dataclass(frozen=True)
class BestFeedback(Feedback):
    """The most accurate one for the optimizer at hand, which a front end puts in its place.

    "adam" for Adam and AdamW, "rmsprop" for RMSprop, "error" for SGD. A momentum m is left out, and the rate
    becomes ``eta / (1 - m)``: error feedback is a momentum itself.

    Args:
        clip_norm: see `MomentumCorrection`.
    """

    text_name: ClassVar[str] = "best"
    applies_rate: ClassVar[bool] = True

    clip_norm: float | None = None

    def _own(self, rates: Rates) -> dict[str, Any]:
        raise UnsupportedError("feedback='best' is decided by an optimizer, which nobody has told here")


FEEDBACKS: dict[str, type[Feedback]] = {
    "adam": AdamFeedback,
    "best": BestFeedback,
    "error": ErrorFeedback,
    "momentum": MomentumCorrection,
    "none": NoFeedback,
    "rmsprop": RMSpropFeedback,
    "sgd": VelocityFeedback,
}


def feedback_named(name: str | Feedback) -> Feedback:
    """A feedback by its name, or the feedback itself.

    Example:
        >>> feedback_named("momentum").momentum
        0.9
    """
    if isinstance(name, str):
        if name not in FEEDBACKS:
            raise UnknownNameError("feedback", name, FEEDBACKS)
        made: Feedback = FEEDBACKS[name]()
        return made
    if not isinstance(name, Feedback) or isinstance(name, type):
        raise ArgumentError("feedback", name, f"one of {', '.join(sorted(FEEDBACKS))}, or a Feedback")
    return name
