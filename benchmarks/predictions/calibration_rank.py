"""One rank of `horovod-sparse calibrate` on the hosts, as a user starts it; its profile is the result."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.common.hosts import BenchmarkError
from horovod_sparse.cli.main import main


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """The profile that the command writes.

    Raises:
        BenchmarkError: if the command fails.
    """
    with tempfile.TemporaryDirectory(prefix="horovod_sparse_bench") as folder:
        profile = Path(folder) / "profile.json"
        if main(["calibrate", *settings["arguments"], "--out", str(profile)]):
            raise BenchmarkError("horovod-sparse calibrate failed, see above")
        return {"profile": json.loads(profile.read_text())} if hvd.rank() == 0 else {}


if __name__ == "__main__":
    sys.exit(ranks.main(measure))
