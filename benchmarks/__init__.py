"""Measurements of horovod_sparse.

`scripts/bench NAME` starts a file or folder here, `scripts/study NAME` a file of `studies`, and
`scripts/report` shows what they found; `common` is what they share. Models and data are those of `examples`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
