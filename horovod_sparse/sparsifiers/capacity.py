"""For how many elements messages have room, so that their lengths repeat from step to step."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from horovod_sparse.checks import out_of_range

#: weight of a step in the mean and the variance, once there were as many steps
_WEIGHT = 1 / 16
#: room is left for the mean of what was needed and so many standard deviations; the rest waits for a step
_DEVIATIONS = 2.0
#: room that is made anew is larger by this, so that it lasts; where it is too large by the second, it shrinks
_SPARE, _TOO_LARGE = 1 + 1 / 16, 1.5
#: messages that were full grow by this: nobody knows how much more was needed
_FULL = 1.25
#: fewer elements than this are no message's length: the header is as long as four
_LEAST = 16
#: padding may make a round longer by half, or by so many elements in all: half a millisecond at 1 Gbit/s
_PADDED, _FEW = 1.5, 16_384
#: where padding was too much it has to be less than this part of that before there is any again
_AGAIN = 0.8
#: lengths are rounded up to so many significant bits: a schedule that changes the density a little keeps them
_BITS = 5


@dataclass(frozen=True)
class Capacity:
    """Room in the messages of a round, as a multiple of what is asked for; the same on all ranks.

    It follows the largest count of any rank, which all ranks know from the messages' headers, by its mean and
    its spread in the last steps. The first step's messages are as long as they have to be.

    Attributes:
        ratio: elements of room by elements asked for; 0 where messages are as long as what is in them.
        mean: of the largest count by what was asked for.
        variance: of the same.
        steps: that were learned from.
    """

    ratio: float = 0.0
    mean: float = 0.0
    variance: float = 0.0
    steps: int = 0

    def flaw(self, _fresh: Capacity) -> str:
        """Of a loaded one: see `out_of_range`."""
        most = 2.0**31
        steps = (0, int(1 / _WEIGHT))
        return out_of_range(self, ratio=(0, most), mean=(0, most), variance=(0, most * most), steps=steps)

    def __deepcopy__(self, memo: object) -> Capacity:
        return self  # every step copies its state, and nothing of this changes

    def room(self, asked: int, most: int) -> int:
        """Elements that every rank's message has room for in this step; 0: as many as there are.

        Args:
            asked: elements that density asks for.
            most: elements there are.

        Example:
            >>> Capacity(ratio=0.15).room(1000, 100_000), Capacity(ratio=0.15).room(1010, 100_000)
            (152, 152)
            >>> Capacity().room(1000, 100_000)
            0
        """
        if self.ratio == 0.0:
            return 0
        elements = max(_LEAST, math.ceil(self.ratio * asked))
        grain = 1 << max(0, elements.bit_length() - _BITS)
        return min(most, -(-elements // grain) * grain)

    def learned(self, counts: np.ndarray, asked: int) -> Capacity:
        """With the counts of one more step.

        Room stays what it is while it is enough for what is needed on average and twice its spread, and not
        much more than that. Where ranks or steps differ so much that a round would be longer by half,
        messages are as long as what is in them.

        Args:
            counts: int [P], elements in every rank's message.
            asked: elements that density asked for.

        Example:
            >>> capacity = Capacity()
            >>> for count in (1000, 1010, 990, 1005):
            ...     capacity = capacity.learned(np.array([count, 980]), 1000)
            ...     print(capacity.room(1000, 100_000))
            1152
            1152
            1152
            1152
        """
        needed, total = int(counts.max()), int(counts.sum())
        share = needed / asked
        weight = max(1.0 / (self.steps + 1), _WEIGHT)
        change = share - self.mean
        mean = self.mean + weight * change
        variance = (1.0 - weight) * (self.variance + weight * change * change)
        # chance alone gives a count m a spread of sqrt(m), whatever the few steps so far have shown
        wanted = mean + _DEVIATIONS * math.sqrt(max(variance, mean / asked))
        ratio, room = self.ratio, self.room(asked, 1 << 31)
        if room and needed >= room:
            ratio = max(wanted, share * _FULL) * _SPARE
        elif wanted > ratio or ratio > _TOO_LARGE * wanted:
            ratio = wanted * _SPARE
        most = max(_PADDED * total, total + _FEW)
        learned = dataclasses.replace(
            self, ratio=ratio, mean=mean, variance=variance, steps=min(self.steps + 1, int(1 / _WEIGHT))
        )
        if self.ratio == 0.0 and self.steps:  # padding was too much
            most *= _AGAIN
        if counts.size * learned.room(asked, 1 << 31) > most:
            return dataclasses.replace(learned, ratio=0.0)
        return learned
