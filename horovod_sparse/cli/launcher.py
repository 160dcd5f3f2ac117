"""Which launcher has started this process."""

from __future__ import annotations

import os

#: variables that hold a rank: of horovodrun, Open MPI's mpirun, MPICH's, and srun
_OF_HOROVOD = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def launcher() -> str:
    """Returns "horovod" (mpirun and srun, too) or "torchrun"; empty for a process of its own."""
    if any(name in os.environ for name in _OF_HOROVOD):
        return "horovod"
    return "torchrun" if all(name in os.environ for name in _OF_TORCHRUN) else ""


def rank_words() -> str:
    """Returns the beginning of an error line under a launch; empty for a process of its own."""
    names = (*_OF_HOROVOD, "RANK") if launcher() else ()
    return next((f"rank {os.environ[name]}: " for name in names if name in os.environ), "")
