"""Elastic jobs by `horovodrun` on this machine, whose hosts a test takes away and adds while they train.

Horovod never starts a worker again on a host that lost one. So a job's hosts are spellings of one address,
with one worker each, or several: `HOSTS`.
"""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from support.jobs import HOROVODRUN, Job, of, started

__all__ = ["HOSTS", "elastic_job", "of"]

#: what the resolver takes for this machine
HOSTS = ("localhost", "127.0.0.1", "127.1", "127.0.1", "Localhost", "LOCALHOST")

#: survivors wait for a worker that joins, which has to import a framework first: more than the usual 30 s.
#: As long may one of several survivors wait for another before it notices that a third one is gone.
_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
    "HOROVOD_SPARSE_TENSOR_SELECTION": "all",
}


class ElasticJob(Job):
    """A job whose hosts have `each` workers."""

    def __init__(
        self, folder: Path, command: Sequence[str], hosts: Sequence[str], each: int, **environment: str
    ) -> None:
        self.folder, self._each = folder, each
        self.set_hosts(hosts)
        script = folder / "discover"
        script.write_text(f'#!/bin/sh\nexec cat "{folder}/hosts"\n')
        script.chmod(0o755)
        launcher = [*HOROVODRUN, "-np", str(each * len(hosts)), "--host-discovery-script", str(script)]
        super().__init__(folder, [*launcher, *command], **_ENVIRONMENT | environment)

    def set_hosts(self, hosts: Sequence[str], **fewer: int) -> None:
        """The hosts that there are from now on, with fewer workers where said; Horovod looks every second."""
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{host}:{fewer.get(host, self._each)}\n" for host in hosts))
        new.replace(self.folder / "hosts")


def elastic_job(
    folder: Path,
    script: Path,
    *arguments: str,
    hosts: Sequence[str] = HOSTS[:2],
    least: int = 1,
    most: int = 4,
    each: int = 1,
    **environment: str,
) -> contextlib.AbstractContextManager[ElasticJob]:
    """A job whose workers run a script: ``python SCRIPT ARGUMENTS... FOLDER``."""
    command = ["--min-np", str(least), "--max-np", str(most), sys.executable, str(script), *arguments]
    return started(ElasticJob(folder, command, hosts, each, **environment))
