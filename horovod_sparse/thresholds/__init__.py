"""How a threshold is found and steered."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from horovod_sparse.arrays.protocol import Accumulator
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.thresholds.scaling import ThresholdScaling, ThresholdState
from horovod_sparse.thresholds.sketch import Sketch

__all__ = ["RULES", "Sketch", "ThresholdRule", "ThresholdScaling", "ThresholdState", "threshold_rule"]


@runtime_checkable
class ThresholdRule(Protocol):
    """Finds a threshold for a step, and learns from the count that it led to."""

    def find(self, accumulator: Accumulator, num_selected: int, state: ThresholdState) -> float:
        """This step's threshold."""

    def wanted(self, num_hits: int, num_selected: int, state: ThresholdState) -> int:
        """How many elements of its window a rank sends, when `num_hits` there reach the threshold."""

    def steer(self, count: int, num_selected: int, state: ThresholdState) -> None:
        """Learns from the union count of this step."""


RULES: dict[str, type] = {"sketch": Sketch, "paper": ThresholdScaling}


def threshold_rule(rule: str | ThresholdRule) -> ThresholdRule:
    """A rule by its name, or the rule itself.

    Raises:
        UnknownNameError: there is no rule of that name.
        ArgumentError: it is neither a name nor a rule.

    Example:
        >>> threshold_rule("sketch")
        Sketch(exponent=0.5, limit=16.0, memory=0.85)
    """
    if isinstance(rule, str):
        if rule not in RULES:
            raise UnknownNameError("threshold rule", rule, RULES)
        made: ThresholdRule = RULES[rule]()
        return made
    if not isinstance(rule, ThresholdRule):
        raise ArgumentError("threshold", rule, f"one of {', '.join(sorted(RULES))}, or a ThresholdRule")
    return rule
