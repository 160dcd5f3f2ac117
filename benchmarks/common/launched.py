"""Starting a measurement once more, on several ranks of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TIMEOUT_S = 300


def launched(module: str, num_ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    """What the first rank of a command writes to `--json`.

    Args:
        module: of the command.
        num_ranks: of this machine.
        arguments: of the command line.

    Raises:
        subprocess.CalledProcessError: if a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="horovod_sparse_bench") as folder:
        answered = Path(folder) / "result.json"
        launcher = Path(sys.executable).with_name("horovodrun")
        command = [str(launcher), "--gloo", "--disable-cache", "-np", str(num_ranks), sys.executable]
        command += ["-m", module, *arguments, "--json", str(answered)]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        subprocess.run(command, timeout=_TIMEOUT_S, check=True, **quiet)
        result: dict[str, Any] = json.loads(answered.read_text())
        return result
