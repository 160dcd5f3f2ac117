"""Where subcommands print: as wide as the terminal, and wide enough for tables in a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

#: holds a rank; set by horovodrun, Open MPI's mpirun, MPICH's, and srun
LAUNCHERS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")

#: columns where nobody looks through a window
WIDTH = 120
_WORDS = frozenset(
    {"parameters", "parameter", "why", "strategy", "what", "what to do", "sparsifier", "of", "times"}
)


def is_launched() -> bool:
    """Whether this process is a rank of a launch, by its environment."""
    return any(name in os.environ for name in LAUNCHERS)


def console(*, to_stderr: bool = False) -> Console:
    stream = sys.stderr if to_stderr else sys.stdout
    # what a launcher shows its ranks is no window, even where it looks like one
    window = stream.isatty() and not is_launched()
    return Console(
        file=stream, width=None if window else WIDTH, force_terminal=window, highlight=False, markup=False
    )


def show(to: Console, text: str, style: str | None = None) -> None:
    """A line as it is: brackets are no markup, and it is not broken at the window's edge."""
    to.print(text, style=style, soft_wrap=True)


def plain_table(title: str, columns: Sequence[str], caption: str = "") -> Table:
    """A table without frames; columns of words to the left, of numbers to the right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in columns:
        words = column in _WORDS
        table.add_column(column, justify="left" if words else "right", no_wrap=not words)
    return table
