"""The one place that imports Horovod's PyTorch binding, and says how to get it where it is missing."""

from __future__ import annotations

from horovod_sparse.errors import HorovodMissingError

__all__ = ["hvd"]

_HOW_TO_GET_IT = (
    "{reason}. Horovod 0.28.1 does not build against today's PyTorch and TensorFlow as it is published. "
    "In a clone of horovod_sparse, scripts/setup builds it (about three minutes, once) and installs it "
    "into .venv. To build it for another environment: unpack Horovod's source distribution from PyPI, "
    "write 17 for 14 in set(CMAKE_CXX_STANDARD 14) of CMakeLists.txt and horovod/torch/CMakeLists.txt, "
    "for TensorFlow 2.18 and later delete the line with xla_mpi_ops.cc from "
    "horovod/tensorflow/CMakeLists.txt, and install it with HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 "
    "pip install --no-build-isolation. The README says more."
)

try:
    import horovod.torch as hvd
except ImportError as error:
    raise HorovodMissingError(
        _HOW_TO_GET_IT.format(reason=f"horovod.torch cannot be imported ({error})")
    ) from error

# without its extension for PyTorch the package imports, prints a warning, and has no functions
if not hasattr(hvd, "allreduce_async"):
    raise HorovodMissingError(
        _HOW_TO_GET_IT.format(
            reason="Horovod is installed, but it was built without PyTorch (or for another one)"
        )
    )
