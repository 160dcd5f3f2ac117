"""The one place that imports Horovod's TensorFlow binding, and says how to get it where it is missing."""

from __future__ import annotations

from horovod_sparse.errors import HorovodMissingError

__all__ = ["hvd"]

try:
    import horovod.tensorflow as hvd
except ImportError as error:
    raise HorovodMissingError.explained(
        f"horovod.tensorflow cannot be imported ({error})", "HOROVOD_WITH_TENSORFLOW=1"
    ) from error

# without its extension for TensorFlow the package may import, and has no operations
if not hasattr(hvd, "allgather"):
    raise HorovodMissingError.explained(
        "Horovod is installed, but it was built without TensorFlow (or for another one)",
        "HOROVOD_WITH_TENSORFLOW=1",
    )
