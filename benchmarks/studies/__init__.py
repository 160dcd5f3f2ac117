"""Trainings behind the docs: `scripts/study NAME`. Models and data are those of `examples/`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
