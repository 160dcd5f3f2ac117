"""Failures of Horovod's that the user can do something about."""

from __future__ import annotations

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.torch._horovod import hvd


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
