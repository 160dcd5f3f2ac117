"""Elastic jobs by `horovodrun` on this machine, whose hosts a test changes, and what their workers do.

Horovod never starts a worker again on a host that lost one. So a job's hosts are spellings of one address,
with one worker each, or several: `HOSTS`.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.jobs import HOROVODRUN, Diary, Job, of, started

__all__ = ["HOSTS", "Task", "carry_out", "elastic_job", "of"]

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


@dataclass
class Task:
    """What a worker does.

    Attributes:
        trained: ways to train, each with a compression of its own: see the worker's `Training`.
        batches: in all.
        killed: by rank, the batch before which its worker kills itself. Who comes in its place lives.
        until: the number of ranks there must be before the last batches, by batch: the job waits there.
        nan: by host, the batch in which its gradient is NaN; of TensorFlow.
        more: further arguments of our optimizers; of PyTorch.
    """

    trained: list[str]
    batches: int = 12
    killed: dict[str, int] = field(default_factory=dict)
    until: dict[str, int] = field(default_factory=dict)
    nan: dict[str, int] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


def carry_out(task: Task, folder: Path, hvd: Any, state: Any, step: Callable[[int], list[Any]]) -> None:
    """Trains to the end: `step` takes a batch's number, and returns facts for the diary."""
    diary = Diary(folder)

    @hvd.elastic.run
    def train(state: Any) -> str:
        diary.note("trains", rank=hvd.rank(), size=hvd.size(), batch=state.batch)
        while state.batch < task.batches:
            if task.until.get(str(state.batch), hvd.size()) != hvd.size():
                time.sleep(0.05)
                state.commit()
                continue
            if task.killed.get(str(hvd.rank())) == state.batch:
                with contextlib.suppress(FileExistsError):
                    (folder / f"died.{hvd.rank()}").touch(exist_ok=False)
                    diary.note("dies", batch=state.batch)
                    os.kill(os.getpid(), signal.SIGKILL)
            steps = step(state.batch)
            state.batch += 1
            diary.note("batch", batch=state.batch, rank=hvd.rank(), size=hvd.size(), steps=steps)
            state.commit()
        return "finished"

    diary.note("ended", value=train(state), size=hvd.size())
