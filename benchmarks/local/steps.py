"""Every sparsifier's whole local step, through its own coroutine, for `scripts/bench local`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.timing import Work
from horovod_sparse.arrays import FoldReport, FoldRule, GradientParts, HostAccumulator
from horovod_sparse.collectives import AllGather, Request, part
from horovod_sparse.feedback import Bucket, recipe
from horovod_sparse.kernels import apply_scaled_sum, apply_sum, clear_all
from horovod_sparse.kernels.quantization import encode
from horovod_sparse.sparsifiers import ALGORITHMS, DRAGONN, BucketInfo
from horovod_sparse.sparsifiers.exclusive import ExclusiveThreshold
from horovod_sparse.sparsifiers.exdyna import ExDynaState
from horovod_sparse.sparsifiers.rounds.quantized import Quantizer
from horovod_sparse.wire import WireFormat, pack
from horovod_sparse.wire.message import unpack_sum
from horovod_sparse.wire.quantized import HEADER, blank

#: largest time of a step by that of one copy of the gradient
BUDGETS = {"topk": 3.5, "micro": 2.5, "exdyna": 2.5, "randomk": 2.0, "adam": 2.2}
_BUDGET = 4.0
#: share of DRAGONN's slots that something falls into: 1 - 1 / e
_FILLED = 0.63
#: messages that are decoded, of one total length
_COUNTS = (2, 4, 8, 16)


class StepWorks:
    """Steps of one rank of P, on one gradient, without the network.

    What other ranks would have sent is made beforehand. There is no feedback, which costs the same as
    error feedback, and lets every round meet the same accumulator.

    Args:
        source: the gradient, float32 [n]; not changed.
        density: kept fraction.
        num_ranks: P.
        seed: of the generator.
    """

    def __init__(self, source: NDArray[np.float32], density: float, num_ranks: int, seed: int = 0) -> None:
        self._source, self._density, self._ranks = source, density, num_ranks
        self._budgets = density == 0.001  # what they are meant for
        self._n = source.size
        self._k = max(1, round(density * self._n))
        self._gradient = np.zeros_like(source)
        self._memory = HostAccumulator(self._n, density=density)
        generator = np.random.default_rng(seed)
        self._whole = [self._message(generator, self._k, True) for _ in range(num_ranks - 1)]
        self._slots = [
            self._message(generator, round(_FILLED * self._k), True, quantum=self._k)
            for _ in range(num_ranks - 1)
        ]
        self._windowed = [
            self._message(generator, self._k // num_ranks, False, part(self._n, rank, num_ranks))
            for rank in range(1, num_ranks)
        ]
        self._quantized: dict[str, NDArray[np.int32]] = {}
        total = self._k * 8
        self._decoded = {
            count: [self._message(generator, total // count, True) for _ in range(count)] for count in _COUNTS
        }
        self._one = np.zeros(0, np.float32)
        #: its memory is made when it is measured
        self._adam: Bucket | None = None

    def _message(
        self,
        generator: np.random.Generator,
        count: int,
        values: bool,
        window: tuple[int, int] | None = None,
        quantum: int = 1,
    ) -> NDArray[np.int32]:
        start, stop = window or (0, self._n)
        drawn = np.unique(generator.integers(start, stop, min(count, stop - start), np.int32))
        numbers = generator.standard_normal(drawn.size, np.float32) if values else None
        return pack(drawn, numbers, FoldReport(), format=WireFormat(quantum=quantum))

    def _refill(self) -> None:
        np.copyto(self._gradient, self._source)

    def _threshold(self) -> float:
        """What a user of a hard threshold would have found by trying."""
        self._refill()
        self._memory.fold(self._gradient, FoldRule(keep_residual=False))
        return self._memory.kth_magnitude(self._k)

    def _bucket(self, name: str) -> Bucket:
        arguments: dict[str, Any] = {"threshold": self._threshold()} if name == "hard_threshold" else {}
        if not issubclass(ALGORITHMS[name], Quantizer):
            arguments |= {"density": self._density}
        made = recipe(name, feedback="none", **arguments)
        return Bucket(BucketInfo(name, self._n, 0, self._ranks), made, self._memory)

    def _codes(self, quantizer: Quantizer) -> NDArray[np.int32]:
        """What every other rank sends: the codes of the gradient itself."""
        if quantizer.name not in self._quantized:
            code = quantizer.quantization
            message = blank(code, self._n, np.dtype(np.float32), FoldReport())
            encode(self._source, code, 0, message[HEADER:])
            self._quantized[quantizer.name] = message
        return self._quantized[quantizer.name]

    def _answer(self, request: Request, others: list[NDArray[np.int32]]) -> Any:
        if isinstance(request, AllGather):
            return np.concatenate([request.buffer, *others])
        return request.buffer.copy()  # type: ignore[union-attr]

    def run(self, bucket: Bucket) -> None:
        """A step: fold, selection, packing, unpacking of P messages, zeros and the sum in the gradient.

        As the front ends do it: the gradient stays readable until its sum is there.
        """
        others = self._whole
        if isinstance(bucket.recipe.sparsifier, Quantizer):
            others = [self._codes(bucket.recipe.sparsifier)] * (self._ranks - 1)
        if isinstance(bucket.recipe.sparsifier, ExclusiveThreshold):
            others = self._windowed
        elif isinstance(bucket.recipe.sparsifier, DRAGONN):
            others = self._slots
        # the step that messages of others tell; and this rank searches the first window, or leads
        bucket.state = replace(bucket.state, step=0)
        if isinstance(bucket.state, ExDynaState):  # and windows lie where the others' messages come from
            fresh: Any = bucket.recipe.sparsifier.init(bucket.info)
            bucket.state = replace(bucket.state, partitions=fresh.partitions)
        coroutine = bucket.step(GradientParts([self._gradient]))
        request = next(coroutine)
        try:
            while True:
                request = coroutine.send(self._answer(request, others))
        except StopIteration as stop:
            places = None if stop.value.whole else stop.value.indices
            apply_scaled_sum(self._gradient, places, stop.value.values, 1.0 / self._ranks)

    def _step(self, name: str) -> Work:
        bucket = self._bucket(name)
        role = {"cltk": ", leader", "micro": " (n/P searched)", "exdyna": " (n/P searched)"}.get(name, "")
        budget = BUDGETS.get(name, _BUDGET) if self._budgets else None
        if issubclass(ALGORITHMS[name], Quantizer):
            budget = None  # every rank's n elements are decoded: budgets are those of sparsifiers
        return Work(f"{name}{role}, P={self._ranks}", partial(self.run, bucket), self._refill, budget)

    def _step_of_adam(self) -> None:
        """Top-k's, which keeps a residual and a second moment."""
        if self._adam is None:
            made = recipe("topk", density=self._density, feedback="adam")
            memory = HostAccumulator(self._n, density=self._density, companions=1)
            self._adam = Bucket(BucketInfo("topk", self._n, 0, self._ranks), made, memory)
        self.run(self._adam)

    def _decode(self, count: int) -> None:
        sum_ = unpack_sum(np.concatenate(self._decoded[count]), count, WireFormat(), self._n, np.float32)
        apply_sum(self._gradient, sum_.indices, sum_.values)

    def _decode_densely(self, count: int) -> None:
        """As one writes it first: every message becomes n elements, and these are added up."""
        if not self._one.size:
            self._one = np.zeros(self._n, np.float32)
        for message in self._decoded[count]:
            sum_ = unpack_sum(message, 1, WireFormat(), self._n, np.float32)
            clear_all(self._one)
            apply_sum(self._one, sum_.indices, sum_.values)
            np.add(self._gradient, self._one, out=self._gradient)

    def steps(self) -> list[Work]:
        """One work for each sparsifier whose rounds need no more than gathered or summed messages."""
        known = {AllGather.__name__, "AllReduce", "Broadcast"}
        names = [
            name
            for name, made in ALGORITHMS.items()
            if {kind.__name__ for kind in made().rounds(self._ranks)} <= known
        ]
        budget = BUDGETS["adam"] if self._budgets else None
        adam = Work(f"topk, feedback=adam, P={self._ranks}", self._step_of_adam, self._refill, budget)
        return [*(self._step(name) for name in names), adam]

    def decoding(self) -> list[Work]:
        """Decoding of few and of many messages of the same total length: all at once, and each densely."""
        sparse = [
            Work(
                f"decode {count} messages, {self._k * 8} elements", partial(self._decode, count), self._refill
            )
            for count in _COUNTS
        ]
        return sparse + [
            Work(
                f"decode {count} messages densely",
                partial(self._decode_densely, count),
                self._refill,
                every=count,
            )
            for count in _COUNTS
        ]
