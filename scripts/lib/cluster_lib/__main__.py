"""What scripts/cluster runs: `python scripts/lib/cluster_lib`."""

import sys
from pathlib import Path

# The folder above, in place of this one: modules here are cluster_lib.X and hide no others.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster_lib.main import main  # noqa: E402  (needs the line above)

sys.exit(main())
