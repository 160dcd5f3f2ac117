"""Carries out one measurement: `python -m benchmarks NAME`, which is `scripts/bench NAME`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main(name: str, *arguments: str) -> int:
    """Measures, prints tables, and returns the exit code: by a module's `parser`, `measure` and `tables`."""
    inner = ".main" * Path(__file__).with_name(name).is_dir()
    module = importlib.import_module(f"benchmarks.{name}{inner}")
    # only now: a module may set what libraries read when they are imported
    from benchmarks.common.options import carry_out

    return carry_out(module.parser(), arguments, module.measure, module.tables)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
