"""`scripts/study NAME`: a study, and the pages of the appendix anew."""

from __future__ import annotations

import sys

from benchmarks.studies import appendix
from benchmarks.studies.time_to_accuracy import main as time_to_accuracy


def main(arguments: list[str]) -> int:
    """Runs one study."""
    mains = {study.name: study.main for study in appendix.STUDIES}
    mains["time_to_accuracy"] = time_to_accuracy.main
    name, *rest = arguments or ["--help"]
    if name not in mains:
        print(f"scripts/study NAME [--help]: one of {', '.join(sorted(mains))}", file=sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    mains[name](rest)
    if name.startswith("paper"):
        from benchmarks.studies.papers import pictures

        pictures.draw_all()
    appendix.write()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
