"""The one place that imports Horovod's PyTorch binding, and says how to get it where it is missing."""

from __future__ import annotations

from horovod_sparse.errors import HorovodMissingError
from horovod_sparse.frontend.deadline import let_horovod_give_up

__all__ = ["hvd"]

try:
    import horovod.torch as hvd
except ImportError as error:
    raise HorovodMissingError.explained(
        f"horovod.torch cannot be imported ({error})", "HOROVOD_WITH_PYTORCH=1"
    ) from error

# without its extension for PyTorch the package imports, prints a warning, and has no functions
if not hasattr(hvd, "allreduce_async"):
    raise HorovodMissingError.explained(
        "Horovod is installed, but it was built without PyTorch (or for another one)",
        "HOROVOD_WITH_PYTORCH=1",
    )

let_horovod_give_up()
