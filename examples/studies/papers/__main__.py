"""Figures of the papers that one process can make: pictures, and tables of docs/appendix/papers.md.

scripts/study papers             measures what is missing, and draws
scripts/study papers --draw      draws only
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from studies import results
from studies.papers import counts, pictures, sixteen, trainings

#: by name: where its numbers are
PARTS = {
    "sixteen": sixteen.FILE,
    "ranks": trainings.RANKS_FILE,
    "teams": trainings.TEAMS_FILE,
    "counts": counts.FILE,
}


def measure(part: str, *, again: bool) -> None:
    """One part, saved after every run."""
    file = PARTS[part]
    result = {} if again else results.load(file)
    if part == "sixteen":
        command, runs = "scripts/study papers", sixteen.measure_all(result)
    else:
        command = f"scripts/study papers --part {part}"
        makers = {
            "ranks": trainings.measure_ranks,
            "teams": trainings.measure_teams,
            "counts": counts.measure,
        }
        runs = makers[part](result)
    result |= {"command": command, "machine": results.machine()}
    for _ in runs:
        results.save(file, result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and draws."""
    parser = results.command_line("scripts/study papers", __doc__)
    parser.add_argument("--part", choices=list(PARTS), help="measure this only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if not options.draw:
        for part in [options.part] if options.part else PARTS:
            measure(part, again=options.again)
    pictures.draw_all()
    results.write_appendix()
    return 0


if __name__ == "__main__":
    sys.exit(main())
