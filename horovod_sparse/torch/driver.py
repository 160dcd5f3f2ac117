"""The driver over Horovod's collectives, and those of its failures that the user can do something about."""

from __future__ import annotations

from functools import partial
from typing import Any

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.frontend.deadline import Deadline
from horovod_sparse.pytorch.driver import Driver
from horovod_sparse.topology import Topology
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.collectives import start
from horovod_sparse.torch.transport import forget_transports


class HorovodDriver(Driver):
    """See `Driver`; over Horovod.

    Args:
        process_set: the ranks that take part.
        deadline_seconds: after which waiting is an error; see `horovod_sparse.frontend.deadline`.
        by_pairs: see `horovod_sparse.torch.collectives.start`.
        topology: which ranks of the process set share a host, where requests are of single levels.

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


def explain(error: BaseException) -> None:
    """Raises what the user can change instead of a failure of Horovod's, where that is known.

    Args:
        error: as the driver raised it.

    Raises:
        UnsupportedError: if a rank has joined.
    """
    if isinstance(error, hvd.HorovodInternalError) and "join" in str(error).lower():
        raise UnsupportedError(
            "a rank has called hvd.join(): Horovod can fill in for a joined rank in an allreduce only, and "
            "sparse synchronization needs every rank's message. Give every rank the same number of batches "
            f"(drop_last=True, or a padding sampler) ({error})"
        ) from error
