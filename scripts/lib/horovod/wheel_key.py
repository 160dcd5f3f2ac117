"""Print a folder name for a Horovod wheel: everything the binary depends on.

Run as ``python wheel_key.py HOROVOD_VERSION MPI GPU`` with the Python the wheel
is for; MPI is a short name of the MPI and its version or "gloo", GPU is 0 or 1.
"""

import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version


def installed(*names: str) -> str:
    """Returns the version of the first of these distributions that is installed, or "none"."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


horovod, mpi, gpu = sys.argv[1:]
parts = [
    f"horovod-{horovod}",
    f"py{sys.version_info[0]}.{sys.version_info[1]}",
    f"torch{installed('torch')}",
    f"tensorflow{installed('tensorflow-cpu', 'tensorflow')}",
    mpi,
    "gpu" if gpu == "1" else "cpu",
    # A wheel built with a newer C library does not load on an older one, and
    # home folders, with the cache in them, are shared between machines.
    f"{platform.system()}-{platform.machine()}-{''.join(platform.libc_ver())}",
]
print(re.sub(r"[^A-Za-z0-9._+-]", "", "-".join(parts)).lower())
