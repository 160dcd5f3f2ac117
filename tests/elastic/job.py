"""Elastic jobs by `horovodrun` on this machine, whose hosts a test takes away and adds while they train.

Horovod never starts a worker again on a host that lost one. So a job's hosts are spellings of one address,
with one worker each, or several: `HOSTS`. A worker's script writes down what it does with `Diary`.
"""

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from support.startup import HOROVODRUN

__all__ = ["HOSTS", "Diary", "Job", "elastic_job", "of"]

#: what the resolver takes for this machine
HOSTS = ("localhost", "127.0.0.1", "127.1", "127.0.1", "Localhost", "LOCALHOST")

#: of a job, where the test gives no other limit
_SECONDS = 150.0


#: survivors wait for a worker that joins, which has to import a framework first: more than the usual 30 s.
#: As long may one of several survivors wait for another before it notices that a third one is gone.
_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
    "HOROVOD_SPARSE_TENSOR_SELECTION": "all",
}


def of(entries: list[dict[str, Any]], what: str, **facts: Any) -> list[dict[str, Any]]:
    return [e for e in entries if e["what"] == what and all(e[name] == facts[name] for name in facts)]


class Diary:
    """What one worker writes down, one JSON object per line; of a worker's script."""

    def __init__(self, folder: Path) -> None:
        self.host = os.environ.get("HOROVOD_HOSTNAME", "nowhere")
        self._path = folder / f"{self.host}.{os.getpid()}.diary"
        faulthandler.register(signal.SIGUSR1)  # where all its threads are, for a job that does not end

    def note(self, what: str, **more: Any) -> None:
        line = {"what": what, "host": self.host, "pid": os.getpid(), "time": time.time(), **more}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Job:
    """A job under way, whose hosts have `each` workers; a worker gets the folder as its last argument."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        hosts: Sequence[str],
        least: int,
        most: int,
        environment: dict[str, str],
        each: int = 1,
    ) -> None:
        self.folder, self._each = folder, each
        folder.mkdir(parents=True, exist_ok=True)
        self.set_hosts(hosts)
        script = folder / "discover"
        script.write_text(f'#!/bin/sh\nexec cat "{folder}/hosts"\n')
        script.chmod(0o755)
        launcher = [*HOROVODRUN, "-np", str(each * len(hosts)), "--min-np", str(least)]
        launcher += ["--max-np", str(most), "--host-discovery-script", str(script)]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [*launcher, *command, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT, **environment},
            start_new_session=True,
        )

    def set_hosts(self, hosts: Sequence[str], **fewer: int) -> None:
        """The hosts that there are from now on, with fewer workers where said; Horovod looks every second."""
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{host}:{fewer.get(host, self._each)}\n" for host in hosts))
        new.replace(self.folder / "hosts")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @staticmethod
    def entries_in(folder: Path) -> list[dict[str, Any]]:
        lines = [line for path in folder.glob("*.diary") for line in path.read_text().splitlines(True)]
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        return sorted(entries, key=lambda entry: entry["time"])

    @property
    def entries(self) -> list[dict[str, Any]]:
        return self.entries_in(self.folder)

    def wait_for(self, condition: Callable[[list[dict[str, Any]]], bool], seconds: float = _SECONDS) -> None:
        until = time.monotonic() + seconds
        while not condition(self.entries):
            if self._process.poll() is not None and not condition(self.entries):
                raise AssertionError(f"the job has ended with {self._process.returncode}: {self._end()}")
            if time.monotonic() > until:
                raise AssertionError(f"not met within {seconds} s: {self._end()}")
            time.sleep(0.2)

    def wait(self, seconds: float = _SECONDS) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job goes on after {seconds} s: {self._end()}") from None

    def close(self) -> None:
        """Ends what has not ended by itself: the launcher first, which ends its workers."""
        if self._process.poll() is None:
            workers = {entry["pid"] for entry in self.entries}
            for number in (signal.SIGINT, signal.SIGKILL):
                if self._process.poll() is None:
                    os.killpg(self._process.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(10)
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._log.close()

    def _end(self) -> str:
        # Workers that live say where they are, as far as they can: see `Diary`.
        for pid in {entry["pid"] for entry in self.entries}:
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(2)
        last = "\n".join(str(entry) for entry in self.entries[-6:])
        return f"{last}\n{self.log[-12000:]}"


@contextlib.contextmanager
def elastic_job(
    folder: Path,
    script: Path,
    *arguments: str,
    hosts: Sequence[str] = HOSTS[:2],
    least: int = 1,
    most: int = 4,
    each: int = 1,
    **environment: str,
) -> Iterator[Job]:
    """A job whose workers run a script: ``python SCRIPT ARGUMENTS... FOLDER``."""
    command = [sys.executable, str(script), *arguments]
    job = Job(folder, command, hosts, least, most, environment, each)
    try:
        yield job
    finally:
        job.close()
