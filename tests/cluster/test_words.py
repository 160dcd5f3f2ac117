"""What scripts/cluster says to what it cannot do."""

import os
import subprocess
from pathlib import Path

import pytest

from cluster.script import NAME, SCRIPT, cluster


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--hosts", "0"], "--hosts 0 is out of range"),
        (["up", "--hosts", "65"], "1 to 64"),
        (["up", "--rate", "fast"], "'fast' is not a rate"),
        (["up", "--rate", "10kbit"], "1mbit to 100gbit"),
        (["up", "--name", "../x"], "cannot be a part of host names"),
        (["run", "--name", f"{NAME}-none", "--", "true"], "there is no cluster"),
    ],
)
def test_malformed_requests_are_refused(arguments: list[str], words: str) -> None:
    result = cluster(*arguments, check=False)
    assert result.returncode == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_without_root_it_says_so() -> None:
    if os.stat(SCRIPT).st_mode & 0o005 != 0o005 or not _others_may_read(SCRIPT):
        pytest.skip("another user cannot read this checkout")
    command = ["setpriv", "--reuid", "65534", "--clear-groups", str(SCRIPT), "status"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 77
    assert "sudo scripts/cluster" in result.stderr


def _others_may_read(path: Path) -> bool:
    return all(os.stat(folder).st_mode & 0o001 for folder in path.parents)
