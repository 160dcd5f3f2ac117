"""The driver over Horovod's collectives, and those of its failures that the user can do something about."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from horovod_sparse.collectives import Request, Synchronization
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.tensors.driver import Driver
from horovod_sparse.topology import Topology
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.collectives import start
from horovod_sparse.torch.transport import forget_transports
from horovod_sparse.training.deadline import Deadline
from horovod_sparse.training.engine import carry_out


class HorovodDriver(Driver):
    """See `Driver`; over Horovod.

    Example:
        >>> import horovod.torch as hvd, numpy as np; hvd.init()
        >>> from horovod_sparse.collectives import AllReduce
        >>> def double():
        ...     total = yield AllReduce(np.ones(1))
        ...     return 2.0 * float(total[0])
        >>> driver = HorovodDriver()
        >>> task = driver.start("double", double())
        >>> driver.wait([task])
        >>> task.value() == 2.0 * hvd.size()
        True
    """

    def __init__(
        self,
        process_set: Any = hvd.global_process_set,
        deadline_seconds: float | None = None,
        *,
        by_pairs: bool = True,
        topology: Topology | None = None,
    ) -> None:
        super().__init__(
            partial(start, process_set=process_set, by_pairs=by_pairs, topology=topology),
            hvd.HorovodInternalError,
            partial(forget_transports, process_set),
            Deadline(deadline_seconds, lambda: (int(process_set.rank()), list(process_set.ranks))),
        )
        self.process_set, self._by_pairs = process_set, by_pairs

    def move_to(self, topology: Topology | None) -> None:
        """From now on ranks share other hosts."""
        given = {"process_set": self.process_set, "by_pairs": self._by_pairs}
        self._start = partial(start, **given, topology=topology)


def carry_out_together(
    coroutine: Synchronization[Any],
    process_set: Any,
    name: str,
    note_start: Callable[[float], object] | None = None,
    deadline_seconds: float | None = None,
    meanwhile: Callable[[], None] | None = None,
    topology: Topology | None = None,
) -> Any:
    """Runs a coroutine to its end; all ranks of the process set do so together, and nothing else meanwhile.

    Every request of a type has the same name, as a bucket's has in every step: so Horovod's response cache
    knows it. `note_start` is told how long each start took; `meanwhile` is called while waiting.
    """
    driver = HorovodDriver(process_set, deadline_seconds, by_pairs=False, topology=topology)

    def execute(request: Request) -> Any:
        started = time.perf_counter()
        task = driver.start(f"{name}.{type(request).__name__}", _alone(request))
        if note_start is not None:
            note_start(time.perf_counter() - started)
        driver.wait([task], meanwhile)
        return task.value()

    return carry_out(coroutine, execute)


def _alone(request: Request) -> Synchronization[Any]:
    return (yield request)


def explain(error: BaseException) -> None:
    """Raises what the user can change instead of a failure of Horovod's, where that is known."""
    if isinstance(error, hvd.HorovodInternalError) and "join" in str(error).lower():
        raise UnsupportedError(
            "a rank has called hvd.join(): Horovod can fill in for a joined rank in an allreduce only, and "
            "sparse synchronization needs every rank's message. Give every rank the same number of batches "
            f"(drop_last=True, or a padding sampler) ({error})"
        ) from error
