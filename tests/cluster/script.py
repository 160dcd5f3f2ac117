"""Calling scripts/cluster from its tests, and looking at the machine without its help."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "cluster"
# No other cluster on this machine, of the user or of another test, has this name.
NAME = f"test-{os.getpid()}"


def cluster(*arguments: str, check: bool = True, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run scripts/cluster to its end; with `check` a failure is shown in its own words."""
    result = subprocess.run(
        [str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    if check and result.returncode:
        pytest.fail(f"scripts/cluster {' '.join(arguments)}: {result.returncode}\n{result.stderr[-3000:]}")
    return result


def status(name: str) -> dict[str, Any]:
    return json.loads(cluster("status", "--name", name).stdout)[0]


def own_network() -> list[str]:
    links = json.loads(subprocess.run(["ip", "-j", "address"], capture_output=True, text=True).stdout)
    return [f"{link['ifname']} {[a['local'] for a in link['addr_info']]}" for link in links]


def namespaces() -> list[str]:
    lines = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    return sorted(line.split()[0] for line in lines)


def pids(namespace: str) -> list[int]:
    output = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
    return [int(word) for word in output.split()]
