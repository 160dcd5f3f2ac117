"""Running the system's commands, and whether this machine permits what a cluster needs."""

import os
import shutil
import subprocess

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "setpriv": "util-linux"}


class ClusterError(Exception):
    """An error: one line says what went wrong, further lines what to do."""

    def __init__(self, message: str, *advice: str, status: int = 1) -> None:
        super().__init__(message)
        self.advice = advice
        self.status = status


def run(*command: str, may_fail: bool = False) -> str:
    """Run a command and return its stdout; a failure is a ClusterError with the command's own words."""
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode and not may_fail:
        raise ClusterError(f"`{' '.join(command)}` failed", *result.stderr.strip().splitlines()[-5:])
    return result.stdout


def check_machine() -> None:
    """Raise ClusterError unless namespaces can be made here."""
    if os.geteuid() != 0:
        raise ClusterError(
            "network namespaces need root", "Run it as root, or: sudo scripts/cluster ...", status=77
        )
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise ClusterError(
                f"the command {tool} is missing; it belongs to {package}",
                f"Debian and Ubuntu: apt-get install {package}",
                status=77,
            )
    # A throw-away namespace of every kind that is needed; it ends with the command.
    trial = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", "ip link add hvds0 type veth peer name hvds1"],
        capture_output=True,
        text=True,
    )
    if trial.returncode:
        raise ClusterError(
            "this machine does not permit network namespaces, even to root",
            *trial.stderr.strip().splitlines()[-2:],
            "A container needs CAP_SYS_ADMIN and CAP_NET_ADMIN (docker run --privileged).",
            status=77,
        )
