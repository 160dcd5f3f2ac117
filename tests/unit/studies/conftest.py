"""The demo is an example: it imports its model and data from beside it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
