"""How dense a step may be for nothing: the largest density whose iteration is no longer than at the least."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from horovod_sparse.feedback import AutoDensity
from horovod_sparse.plans.plan import Plan


@dataclass(frozen=True)
class DensityChoice:
    """A density, with the plan that goes with it.

    Attributes:
        limits: it was chosen within.
        plan: buckets and density.
        seconds: of the predicted iteration.
        least_seconds: at the least density, under the plan that is best there.
        longer_seconds: at the next larger one that was compared; None at the largest.
    """

    limits: AutoDensity
    plan: Plan
    seconds: float
    least_seconds: float
    longer_seconds: float | None

    @property
    def density(self) -> float:
        """That was chosen."""
        return self.limits.least if self.plan.density is None else self.plan.density

    @property
    def reason(self) -> str:
        """Why, in words."""
        least, most = self.limits.least, self.limits.most
        text = f"density {self.density:g}: predicted iteration {1e3 * self.seconds:.4g} ms, "
        text += f"{1e3 * self.least_seconds:.4g} ms at {least:g}; "
        if self.longer_seconds is None:
            return text + f"no more than {most:g} was asked for"
        text += f"the next denser one takes {1e3 * self.longer_seconds:.4g} ms, "
        return text + f"more than {self.limits.tolerance:.0%} longer"


def densest_plan(
    limits: AutoDensity,
    plan_at: Callable[[float], Plan],
    seconds_of: Callable[[Plan, float], float],
) -> DensityChoice:
    """The largest of the candidates at which the iteration is at most `tolerance` longer than at the least.

    Bisection over the densities, since an iteration becomes no shorter where more is sent; a plan is made at
    each that is looked at. Where messages are fused that is not quite so: therefore all plans met on the way
    are tried at all densities afterwards, the largest first.

    Args:
        limits: least, most, and tolerance.
        plan_at: makes the plan for a density.
        seconds_of: predicts the iteration of a plan at a density.

    Returns:
        The choice; its plan says the density.

    Example:
        >>> whole = Plan((("weight",),))
        >>> limits = AutoDensity(tolerance=0.1)
        >>> choice = densest_plan(limits, lambda density: whole, lambda plan, density: 1 + 5 * density)
        >>> choice.density, choice.reason.partition(":")[0]
        (0.0194, 'density 0.0194')
    """
    candidates = limits.candidates
    plans: dict[Plan, None] = {}

    def best_at(density: float, *, anew: bool = True) -> tuple[float, Plan]:
        if anew:
            plans[plan_at(density)] = None
        found = [(seconds_of(plan, density), plan) for plan in plans]
        return min(found, key=lambda item: item[0])

    least_seconds, _ = best_at(candidates[0])
    most_seconds = least_seconds * (1.0 + limits.tolerance)
    low, high = 0, len(candidates)
    while high - low > 1:
        # the largest first: where communication is hidden whole, that is all
        middle = high - 1 if (low, high) == (0, len(candidates)) else (low + high) // 2
        low, high = (middle, high) if best_at(candidates[middle])[0] <= most_seconds else (low, middle)
    for position in range(len(candidates) - 1, low, -1):
        if best_at(candidates[position], anew=False)[0] <= most_seconds:
            low = position
            break
    density = candidates[low]
    seconds, plan = best_at(density, anew=False)
    longer = None if low == len(candidates) - 1 else best_at(candidates[low + 1], anew=False)[0]
    return DensityChoice(limits, dataclasses.replace(plan, density=density), seconds, least_seconds, longer)
