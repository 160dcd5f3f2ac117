"""What is known about a cluster: its names and addresses, and the record that outlives a killed command.

Everything is derived from the name and the number of hosts. The record is written before the
first thing is made, so whatever was made is recorded, whenever the command was killed.
"""

import fcntl
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster_lib.rate import Latency, Rate
from cluster_lib.system import ClusterError

STATE = Path("/run/horovod_sparse_cluster")
NAMESPACES = Path("/run/netns")
PREFIX = "hvds-"
MOST_HOSTS = 64
INTERFACE = "eth0"
# Reserved for measurements of networks (RFC 2544). Every cluster has it to itself: no
# interface or route of one cluster is visible in another, nor in the machine's own namespace.
SUBNET = "198.18.0.0/24"


@dataclass(frozen=True)
class Cluster:
    """Hosts that share a switch, all with the same rate and latency."""

    name: str
    num_hosts: int
    rate: Rate
    latency: Latency

    @classmethod
    def check(cls, name: str, num_hosts: int, rate: str, latency: str) -> "Cluster":
        """A cluster as the user asks for it, or a ClusterError that says what is allowed."""
        check_name(name)
        if not 1 <= num_hosts <= MOST_HOSTS:
            raise ClusterError(f"--hosts {num_hosts} is out of range", f"Allowed: 1 to {MOST_HOSTS}.")
        return cls(name, num_hosts, Rate.parse(rate), Latency.parse(latency))

    def host(self, index: int) -> str:
        return f"{self.name}-{index}"

    def address(self, index: int) -> str:
        return f"198.18.0.{index + 1}"

    def namespace(self, index: int) -> str:
        return PREFIX + self.host(index)

    @property
    def hosts(self) -> list[str]:
        return [self.host(index) for index in range(self.num_hosts)]

    @property
    def switch(self) -> str:
        """The namespace of the switch; no host can have its name, for those end in a number."""
        return f"{PREFIX}{self.name}-switch"

    @property
    def namespaces(self) -> list[str]:
        return [self.namespace(index) for index in range(self.num_hosts)] + [self.switch]

    @property
    def folder(self) -> Path:
        return STATE / self.name

    @property
    def logs(self) -> Path:
        """The folder with the last run's output of ranks."""
        return self.folder / "logs"

    @property
    def scratch(self) -> Path:
        """The folder for a launcher's files while it runs."""
        return self.folder / "tmp"

    @property
    def hosts_file(self) -> Path:
        """What its hosts have as /etc/hosts; written last, so that an incomplete cluster has none."""
        return self.folder / "hosts"

    def save(self) -> None:
        """Write the record, all of it or nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        facts = {"name": self.name, "num_hosts": self.num_hosts}
        draft = self.folder / "record.json.new"
        draft.write_text(json.dumps({**facts, "rate": self.rate.text, "latency": self.latency.text}) + "\n")
        draft.replace(self.folder / "record.json")

    def save_hosts(self) -> None:
        lines = [f"{self.address(index)} {self.host(index)}" for index in range(self.num_hosts)]
        self.hosts_file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def check_name(name: str) -> None:
    """Raise ClusterError unless the name can be a part of host names."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,29}", name) or name.endswith("-"):
        raise ClusterError(
            f"--name {name!r} cannot be a part of host names",
            "Allowed: up to 30 small letters, digits and hyphens, a letter first and no hyphen last.",
        )


def load(name: str) -> Cluster | None:
    """Returns the recorded cluster of that name, complete or not."""
    check_name(name)
    try:
        facts = json.loads((STATE / name / "record.json").read_text())
    except FileNotFoundError:
        return None
    return Cluster.check(**facts)


def load_complete(name: str) -> Cluster:
    """Returns the complete cluster of that name, or raises a ClusterError."""
    cluster = load(name)
    if cluster is None:
        others = ", ".join(cluster.name for cluster in load_all()) or "none"
        raise ClusterError(
            f"there is no cluster {name!r}", f"There are: {others}.", "Make one: scripts/cluster up"
        )
    parts = [cluster.hosts_file, *(NAMESPACES / namespace for namespace in cluster.namespaces)]
    if not all(part.exists() for part in parts):
        raise ClusterError(
            f"cluster {name!r} is incomplete: its `up` was killed, or somebody removed parts of it",
            f"Clean up and make it again: scripts/cluster down --name {name}",
        )
    return cluster


def load_all() -> list[Cluster]:
    """Returns all recorded clusters, sorted by name."""
    folders = sorted(STATE.glob("*/record.json"))
    return [found for found in (load(path.parent.name) for path in folders) if found is not None]


@contextmanager
def locked(path: Path, busy: str | None = None) -> Iterator[None]:
    """Hold a lock that ends with this process, however it ends; `busy` is the error of not waiting."""
    STATE.mkdir(exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise ClusterError(busy or "", "Wait for it, or use a cluster of another --name.") from None
        yield
