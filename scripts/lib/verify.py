"""Import what scripts/setup installed and print what it is, in a few lines.

Run as ``python verify.py WANTED...`` with the modules that must import. The last
line reads ``horovod_mpi=0`` or ``1``, for the scripts that launch ranks.
"""

import contextlib
import importlib
import io
import os
import platform
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version

# TensorFlow greets in the C++ half, which no redirection below would stop.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def installed(*names: str) -> str:
    """Returns ``name version`` of those distributions that are installed."""
    found = []
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def main() -> int:
    """Print the summary; 1 if something does not import."""
    for module in sys.argv[1:]:
        noise = io.StringIO()
        try:
            with contextlib.redirect_stderr(noise):
                importlib.import_module(module)
        except Exception:
            sys.stderr.write(noise.getvalue())
            traceback.print_exc()
            sys.stderr.write(f"error: import {module} failed\n")
            return 1

    import horovod.torch as hvd
    import torch

    # The same questions "horovodrun --check-build" asks, in one process.
    controllers = [name for name, built in (("MPI", hvd.mpi_built()), ("Gloo", hvd.gloo_built())) if built]
    operations = [*controllers, *(["NCCL"] if hvd.nccl_built() else [])]
    cuda = torch.version.cuda
    print(f"Python      {platform.python_version()}")
    print(f"PyTorch     {torch.__version__}{f', CUDA {cuda}' if cuda else ', CPU build'}")
    tensorflow = installed("tensorflow-cpu", "tensorflow")
    keras = installed("keras", "tf-keras")
    print(f"TensorFlow  {f'{tensorflow}, {keras}' if tensorflow else 'left out'}")
    abilities = f"launched by {' or '.join(controllers)}; collectives by {', '.join(operations)}"
    print(f"Horovod     {version('horovod')}; {abilities}")
    print(f"Numbers     {installed('numpy', 'numba', 'mpi4py')}")
    print(f"horovod_mpi={int(hvd.mpi_built())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
