"""SignSGD with error feedback: one bit of every element, and the mean of their magnitudes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from horovod_sparse.errors import UnknownNameError
from horovod_sparse.kernels.quantization import Quantization
from horovod_sparse.sparsifiers.rounds.quantized import Quantizer


@dataclass(frozen=True, kw_only=True)
class SignSGD(Quantizer):
    """Every rank sends the sign of every element, and the mean magnitude.

    ``sent_i = mean |acc_i| sign(acc_i),  sum = sum_i sent_i,  residual_i = acc_i - sent_i``

    One round: an allgather of n bits and one float, of which each rank makes the sum for itself. A 0 counts
    as positive.

    With ``vote="majority"`` the sum is P times the mean of these means, with the sign that most ranks have (0
    where there are as many of either). Error feedback would not converge there: what a rank alone holds back
    grows without limit while the others outvote it. So that takes ``feedback="none"``.

    Args:
        group: elements that share a mean, a multiple of 32; 0 for all of a bucket. Layers of different size
            in one bucket are better off with groups.
        vote: "mean" (of what the ranks send) or "majority".

    Source: Karimireddy et al., ICML 2019, Algorithm 1 (EF-SignSGD); majority vote: Bernstein et al., ICML
    2018, distributed training by majority vote. Departures: an element that is 0 has a sign; signs of the
    majority are multiplied by the mean of magnitudes, so that learning rates keep their meaning; means have
    24 bits, also for float64.
    """

    name: ClassVar[str] = "signsgd"

    group: int = 0
    vote: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vote not in ("mean", "majority"):
            raise UnknownNameError("vote of signsgd", str(self.vote), ("mean", "majority"))

    @property
    def quantization(self) -> Quantization:
        return Quantization(group=self.group)

    @property
    def votes(self) -> bool:
        return self.vote == "majority"

    @property
    def why_diverges(self) -> str:
        return "what a rank alone holds back is never sent while others outvote it" if self.votes else ""
