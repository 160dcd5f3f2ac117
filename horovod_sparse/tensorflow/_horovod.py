"""The one place that imports Horovod's TensorFlow binding, and says how to get it where it is missing."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.training.collective_errors import horovod_binding, raise_if_second_binding

hvd: Any = horovod_binding("TensorFlow", has="allgather")

#: gives the token of Horovod's present start, which every `hvd.init()` replaces: compare it with ``is``
present_start = functools.partial(getattr, hvd, "_horovod_sparse_start")


def takes_part(process_set: Any) -> bool:
    """True if this rank is in the process set; raises before `hvd.init()`."""
    if not hvd.is_initialized():
        raise UnsupportedError(
            "Horovod has not been started for TensorFlow (horovod.torch starts another one): call hvd.init() "
            "of horovod_sparse.tensorflow"
        )
    if not process_set.included():
        raise_if_second_binding(hvd, process_set)
        return False
    return True


def is_elastic() -> bool:
    """True in elastic training, as Horovod's launcher says in the environment."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


#: modules of Horovod's that have nothing of ours, and so are reached by our names, too
_SHARED = ("gradient_aggregation", "gradient_aggregation_eager", "mpi_ops", "sync_batch_norm", "util")

for _name in _SHARED:
    sys.modules[f"{__package__}.{_name}"] = importlib.import_module(f"{hvd.__name__}.{_name}")

#: names for ``from ... import *``: all public names of Horovod, without modules that this package replaces
#: (Horovod has `keras` once somebody has imported it)
__all__ = [
    name
    for name, item in vars(hvd).items()
    if name[0] != "_" and (name in _SHARED or getattr(item, "__name__", "") != f"{hvd.__name__}.{name}")
]


def __getattr__(name: str) -> Any:
    return getattr(hvd, name)
