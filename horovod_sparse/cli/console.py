"""How subcommands print, and which launcher has started this process."""

from __future__ import annotations

import os
import sys

from rich.console import Console

#: columns where no terminal says how many it has
_WIDTH = 120
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


def console(*, to_stderr: bool = False) -> Console:
    stream = sys.stderr if to_stderr else sys.stdout
    # a launcher's ranks may seem to have a terminal
    window = stream.isatty() and not launcher()
    return Console(
        file=stream, width=None if window else _WIDTH, force_terminal=window, highlight=False, markup=False
    )


def show(to: Console, text: str, style: str | None = None) -> None:
    """Prints a line without markup, and without breaking it at the terminal's edge."""
    to.print(text, style=style, soft_wrap=True)
