"""SignSGD with error feedback: one bit of every element, and the mean of their magnitudes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from horovod_sparse.kernels.quantization import Quantization
from horovod_sparse.sparsifiers.rounds.quantized import Quantizer


@dataclass(frozen=True, kw_only=True)
class SignSGD(Quantizer):
    """Every rank sends the sign of every element, and the mean magnitude.

    ``sent_i = mean |acc_i| sign(acc_i),  sum = sum_i sent_i,  residual_i = acc_i - sent_i``

    One round: an allgather of n bits and one float, of which each rank makes the sum for itself. A 0 counts
    as positive.

    Args:
        group: elements that share a mean, a multiple of 32; 0 for all of a bucket. Layers of different size
            in one bucket are better off with groups.

    Source: Karimireddy et al., ICML 2019, Algorithm 1 (EF-SignSGD). Departures: an element that is 0 has a
    sign; means have 24 bits, also for float64.
    """

    name: ClassVar[str] = "signsgd"

    group: int = 0

    @property
    def quantization(self) -> Quantization:
        return Quantization(group=self.group)
