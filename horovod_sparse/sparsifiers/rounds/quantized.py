"""Defines the round of quantizers: one allgather of every rank's elements, a few bits each."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from horovod_sparse.arrays import Accumulator
from horovod_sparse.collectives import AllGather, Synchronization
from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.quantization import Quantization
from horovod_sparse.sparsifiers.base import BucketInfo, Sparsifier, SparsifierState, Traffic, WholeSum
from horovod_sparse.wire.quantized import HEADER, blank, quantized_words, sum_quantized


@dataclass(frozen=True, kw_only=True)
class Quantizer(Sparsifier):
    """Every rank sends all elements in few bits (`quantization`); what that loses stays in its residual."""

    density_scope: ClassVar[Literal["per rank", "global"]] = "global"
    has_density: ClassVar[bool] = False

    density: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        planes = self.quantization.planes  # which checks its arguments
        for name, only in (
            ("density", 1.0),
            ("values", "exact"),
            ("indices", "int32"),
            ("quantum", 1),
            ("schedule", None),
        ):
            if getattr(self, name) != only:
                allowed = f"{only!r}: {self.name} sends every element, in {planes} bits"
                raise ArgumentError(name, getattr(self, name), allowed)

    @property
    @abc.abstractmethod
    def quantization(self) -> Quantization:
        """Says how elements become bits."""

    @property
    def votes(self) -> bool:
        """True if the sum has the signs that most ranks have."""
        return False

    def key(self, info: BucketInfo, step: int) -> int:
        """Returns the 64 bits from which a rank draws the random numbers of a step; 0 if it draws none."""
        return 0

    def synchronize(
        self, accumulator: Accumulator, state: SparsifierState, info: BucketInfo
    ) -> Synchronization[tuple[WholeSum, SparsifierState]]:
        n, dtype, code, votes = info.num_elements, info.value_dtype, self.quantization, self.votes
        key = self.key(info, state.step)
        message = blank(code, n, dtype, accumulator.report)
        accumulator.quantize(code, key, message[HEADER:])
        gathered = yield AllGather(message)
        found = sum_quantized(gathered, info.size, code, n, dtype, votes=votes)
        if votes:  # every rank's part of what is applied
            accumulator.subtract(found.values / dtype.type(info.size))
        return WholeSum(found.values, np.full(info.size, n), found.notes), state

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        """Declares a header, the units of groups, and every element's bits, the same in every step."""
        words = quantized_words(self.quantization, info.num_elements, info.value_dtype)
        return (Traffic(AllGather, 4 * words),)
