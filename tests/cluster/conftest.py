"""A cluster for the tests of scripts/cluster, and the skip where this machine permits none."""

from collections.abc import Iterator

import pytest

from cluster.script import NAME, cluster


@pytest.fixture(scope="session", autouse=True)
def permitted() -> None:
    result = cluster("status", check=False)
    if result.returncode == 77:
        pytest.skip("no cluster here: " + " ".join(result.stderr.split()))
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="session")
def slow(permitted: None) -> Iterator[str]:
    """The name of a cluster of 3 hosts at 100 Mbit/s."""
    name = f"{NAME}-slow"
    cluster("up", "--hosts", "3", "--rate", "100mbit", "--name", name)
    yield name
    cluster("down", "--name", name)
