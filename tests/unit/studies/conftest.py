"""The studies live beside the examples, and import their data from there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
