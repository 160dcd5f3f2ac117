"""`scripts/study NAME`: a study, and the pages of the appendix and its pictures anew."""

from __future__ import annotations

import sys

from benchmarks.report.main import STUDIES
from benchmarks.report.main import main as report


def main(arguments: list[str]) -> int:
    """Runs one study."""
    studies = {study.name: study for study in STUDIES}
    name, *rest = arguments or ["--help"]
    if name not in studies:
        print(f"scripts/study NAME [--help]: one of {', '.join(sorted(studies))}", file=sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    studies[name].main(rest)
    return report([])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
