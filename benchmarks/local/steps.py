"""Every sparsifier's whole local step, through its own coroutine, for `scripts/bench local`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.timing import Work
from benchmarks.local.works import Works
from horovod_sparse.arrays import Accumulator, FoldReport, FoldRule
from horovod_sparse.collectives import AllGather, Request, rank_part
from horovod_sparse.feedback import Bucket, recipe
from horovod_sparse.kernels.quantization import encode
from horovod_sparse.sparsifiers import ALGORITHMS, BucketInfo
from horovod_sparse.sparsifiers.dragonn import DRAGONN
from horovod_sparse.sparsifiers.exclusive import ExclusiveThreshold
from horovod_sparse.sparsifiers.exdyna import ExDynaState
from horovod_sparse.sparsifiers.rounds.quantized import HEADER, Quantizer, blank_message
from horovod_sparse.training.parts import Parameters
from horovod_sparse.training.schedules import mean_over_senders
from horovod_sparse.wire import WireFormat, pack
from horovod_sparse.wire.message import unpack_sum

#: largest time of a step by that of one copy of the gradient
BUDGETS = {"topk": 3.5, "micro": 2.5, "exdyna": 2.5, "randomk": 2.0, "adam": 2.2, "sparseloco": 8.0}
_BUDGET = 4.0
#: share of DRAGONN's slots that something falls into: 1 - 1 / e
_FILLED = 0.63
#: messages that are decoded, of one total length
_COUNTS = (2, 4, 8, 16)
#: what local steps send
_LOCAL = recipe("sparseloco").sparsifier


class StepWorks:
    """Times steps of one rank of P on the gradient of `works`, without a network.

    What other ranks would have sent is made beforehand. There is no feedback, which costs the same as
    error feedback, and lets every round meet the same accumulator.
    """

    def __init__(self, works: Works) -> None:
        self._works, self._budgets = works, works.density == 0.001  # what they are meant for
        self._n, self._k, self._ranks = works.num_elements, works.k, works.num_ranks
        self._memory = works.accumulator()
        generator = np.random.default_rng(0)
        self._whole = [self._message(generator, self._k, True) for _ in range(self._ranks - 1)]
        self._slots = [
            self._message(generator, round(_FILLED * self._k), True, wire=WireFormat(capacity=self._k))
            for _ in range(self._ranks - 1)
        ]
        self._windowed = [
            self._message(generator, self._k // self._ranks, False, rank_part(self._n, rank, self._ranks))
            for rank in range(1, self._ranks)
        ]
        self._quantized: dict[str, NDArray[np.int32]] = {}
        total = self._k * 8
        self._decoded = {
            count: [self._message(generator, total // count, True) for _ in range(count)] for count in _COUNTS
        }
        sent = max(1, round(_LOCAL.density * self._n))
        moves = [self._message(generator, sent, True, wire=_LOCAL.wire) for _ in range(self._ranks)]
        self._local = np.concatenate(moves)
        #: its memory is made when it is measured
        self._adam: Bucket | None = None

    def _message(
        self,
        generator: np.random.Generator,
        count: int,
        values: bool,
        window: tuple[int, int] | None = None,
        wire: WireFormat | None = None,
    ) -> NDArray[np.int32]:
        start, stop = window or (0, self._n)
        if window is not None:  # parts of real ranks begin at a block
            start, stop = start + (stop - start) // 4, stop - (stop - start) // 4
        drawn = np.unique(generator.integers(start, stop, min(count, stop - start), np.int32))
        numbers = generator.standard_normal(drawn.size, np.float32) if values else None
        return pack(drawn, numbers, FoldReport(), wire or WireFormat(), self._n)

    def _threshold(self) -> float:
        """Returns what a user of a hard threshold would have found by trying."""
        self._works.refill()
        self._memory.fold(self._works.gradient, FoldRule(decay=0.0))
        return self._memory.kth_magnitude(self._k)

    def bucket(self, name: str, memory: Accumulator | None = None, feedback: str = "none") -> Bucket:
        arguments: dict[str, Any] = {"threshold": self._threshold()} if name == "hard_threshold" else {}
        if not issubclass(ALGORITHMS[name], Quantizer):
            arguments |= {"density": self._works.density}
        made = recipe(name, feedback=feedback, **arguments)
        memory = self._memory if memory is None else memory
        return Bucket(BucketInfo(name, self._n, 0, self._ranks), made, memory)

    def _codes(self, quantizer: Quantizer) -> NDArray[np.int32]:
        """Returns the message of every other rank: the quantized gradient itself."""
        if quantizer.name not in self._quantized:
            code = quantizer.quantization
            message = blank_message(code, self._n, np.dtype(np.float32), FoldReport())
            encode(self._works.drawn, code, 0, message[HEADER:])
            self._quantized[quantizer.name] = message
        return self._quantized[quantizer.name]

    def _answer(self, request: Request, others: list[NDArray[np.int32]]) -> Any:
        if isinstance(request, AllGather):
            return np.concatenate([request.buffer, *others])
        return request.buffer.copy()  # type: ignore[union-attr]

    def run(self, bucket: Bucket) -> None:
        """Carries out a step: fold, selection, packing, unpacking of P messages, the mean in the gradient."""
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
        coroutine = bucket.step(self._works.fold_input())
        request = next(coroutine)
        try:
            while True:
                request = coroutine.send(self._answer(request, others))
        except StopIteration as stop:
            self._works.apply(None if stop.value.whole else stop.value.indices, stop.value.values)

    def _step(self, name: str) -> Work:
        bucket = self.bucket(name)
        role = {"cltk": ", leader", "micro": " (n/P searched)", "exdyna": " (n/P searched)"}.get(name, "")
        budget = BUDGETS.get(name, _BUDGET) if self._budgets else None
        if issubclass(ALGORITHMS[name], Quantizer):
            budget = None  # every rank's n elements are decoded: budgets are those of sparsifiers
        return Work(f"{name}{role}, P={self._ranks}", partial(self.run, bucket), self._works.refill, budget)

    def _step_of_adam(self) -> None:
        """Carries out a step of top-k that keeps a residual and a second moment."""
        if self._adam is None:
            self._adam = self.bucket("topk", self._works.accumulator(companions=1), "adam")
        self.run(self._adam)

    def _decode(self, count: int) -> None:
        sum_ = unpack_sum(np.concatenate(self._decoded[count]), count, *self._kind)
        self._works.apply(sum_.indices, sum_.values)

    def _exchange_local_steps(self) -> None:
        """Decodes a message of `sparseloco` from each rank, and moves parameters by the mean over senders."""
        sum_ = unpack_sum(self._local, self._ranks, _LOCAL.wire, self._n, np.float32)
        Parameters([(0, self._n)], [self._works.gradient]).replace(total=mean_over_senders(sum_))

    @property
    def _kind(self) -> tuple[WireFormat, int, Any]:
        return WireFormat(), self._n, np.float32

    def steps(self) -> list[Work]:
        """Returns a work for each sparsifier that needs only gathered or summed messages."""
        known = {AllGather.__name__, "AllReduce", "Broadcast"}
        names = [
            name
            for name, made in ALGORITHMS.items()
            if {kind.__name__ for kind in made().rounds(self._ranks)} <= known
        ]
        budget = BUDGETS["adam"] if self._budgets else None
        adam = Work(f"topk, feedback=adam, P={self._ranks}", self._step_of_adam, self._works.refill, budget)
        return [*(self._step(name) for name in names), adam]

    def decoding(self) -> list[Work]:
        """Returns works that decode few and many messages of one total length, and one of local steps."""
        elements, refill = f"{self._k * 8} elements", self._works.refill
        exchange = f"decode {self._ranks} messages of local steps, move by their mean"
        return [
            *(
                Work(f"decode {count} messages, {elements}", partial(self._decode, count), refill)
                for count in _COUNTS
            ),
            Work(exchange, self._exchange_local_steps, refill, BUDGETS["sparseloco"]),
        ]
