"""Hard threshold: every rank sends all elements of at least a fixed magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from horovod_sparse.arrays import Accumulator
from horovod_sparse.checks import check_number
from horovod_sparse.errors import warn_once
from horovod_sparse.sparsifiers.base import BucketInfo, SelectAndGather, Selected, SparsifierState


@dataclass(frozen=True, kw_only=True)
class HardThreshold(SelectAndGather):
    """Each rank sends all elements with |acc| >= threshold; all ranks apply the sum.

    One round: an allgather of as many indices and values as pass. The count follows the gradient's
    scale, not `density`, which serves only to guess a threshold where none is given:
    ``1 / (2 sqrt(k))``, the default of public programs. The guess is logged once for each bucket. At
    density 1 (in a warm-up, say) everything is sent.

    Args:
        threshold: smallest magnitude that is sent, above 0, in units of the accumulator (gradients added up,
            not multiplied by the learning rate).
        density: k / n behind the guess.

    Source: Sahu et al., NeurIPS 2021 (hard-threshold sparsifier).
    """

    name: ClassVar[str] = "hard_threshold"

    threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            check_number("threshold", self.threshold, "a number above 0")

    def threshold_for(self, info: BucketInfo, step: int) -> float:
        """Returns the user's threshold, or a guessed one if none was given; 0 at density 1."""
        k = self.num_selected(info, step)
        if k == info.num_elements and self.density_at(step) == 1.0:
            return 0.0
        if self.threshold is not None:
            return self.threshold
        if info.rank == 0:
            words = "hard_threshold guesses 1 / (2 sqrt(k)) for %s: give threshold= to steer the density"
            warn_once(words, info.name)
        return 1.0 / (2.0 * math.sqrt(k))

    def select(self, accumulator: Accumulator, k: int, state: SparsifierState, info: BucketInfo) -> Selected:
        threshold = self.threshold_for(info, state.step)
        return Selected(accumulator.at_least(threshold), {"threshold": threshold})
