"""PyTorch front end: `import horovod_sparse.torch as hvd` in place of `import horovod.torch as hvd`.

Every public name of `horovod.torch` is here; `Compression` has the sparsifiers beside Horovod's own. So are
its modules: `compression` and `optimizer` are ours and pass on Horovod's names, all others are Horovod's.
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# first: it says how to get Horovod where the next line would only say that there is none
from horovod_sparse.torch import driver as driver

# isort: split
from horovod.torch import *  # noqa: F403

# isort: split
from horovod_sparse.tensors.layout import redistribute as redistribute
from horovod_sparse.torch.compression import Compression as Compression
from horovod_sparse.torch.compression import SparseCompressor as SparseCompressor
from horovod_sparse.torch.optimizer import DistributedOptimizer as DistributedOptimizer

# import horovod_sparse.torch.elastic, and the like: the very modules, so that their classes are the same ones
for _name, _module in list(_sys.modules.items()):
    if _name.startswith("horovod.torch.") and _name not in (
        "horovod.torch.compression",
        "horovod.torch.optimizer",
    ):
        _sys.modules.setdefault(f"horovod_sparse.{_name.removeprefix('horovod.')}", _module)

if _TYPE_CHECKING:
    from horovod_sparse.tensors.checkpoint import load as load
    from horovod_sparse.tensors.checkpoint import save as save
    from horovod_sparse.torch.measuring import measured_profile as measured_profile
    from horovod_sparse.torch.steps import LocalSteps as LocalSteps
    from horovod_sparse.training.schedules import OuterStep as OuterStep

    # horovod.torch has no types: what the star brings is unknown to type checkers
    def __getattr__(name: str) -> _Any: ...

else:

    def __getattr__(name: str) -> _Any:
        """Imports `LocalSteps`, `save` and other names that few trainings use, at their first use."""
        modules = {
            "LocalSteps": "torch.steps",
            "OuterStep": "training.schedules",
            "load": "tensors.checkpoint",
            "measured_profile": "torch.measuring",
            "save": "tensors.checkpoint",
        }
        if name not in modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module(f"horovod_sparse.{modules[name]}"), name)
