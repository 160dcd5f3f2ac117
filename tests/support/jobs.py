"""Jobs that a test starts by a launcher, and the diaries of their workers."""

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
from types import ModuleType
from typing import Any

HOROVODRUN = (sys.executable, str(Path(__file__).parents[2] / "scripts" / "lib" / "horovodrun.py"), "--gloo")


def of(entries: list[dict[str, Any]], what: str, **facts: Any) -> list[dict[str, Any]]:
    return [e for e in entries if e["what"] == what and all(e.get(name) == facts[name] for name in facts)]


def entries_in(folder: Path) -> list[dict[str, Any]]:
    """What all workers have written down, by time."""
    lines = [line for path in folder.glob("*.diary") for line in path.read_text().splitlines(True)]
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return sorted(entries, key=lambda entry: entry["time"])


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended keeps its entry until its parent has asked how."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def until_told(folder: Path, fact: str) -> None:
    """Waits until rank 0 has written down a fact, or never will."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        if any(entry.get("rank") == 0 and fact in entry for entry in entries_in(folder)):
            return
        time.sleep(0.1)


def without_dynamo() -> None:
    """Keeps PyTorch's optimizers from importing what compiles, of which nothing is used: two seconds."""
    stub: Any = ModuleType("torch._dynamo")
    stub.disable = lambda function, *_, **__: function
    stub.graph_break = stub.add = lambda *_: None
    sys.modules |= {"torch._dynamo": stub, "torch._dynamo.trace_rules": stub}


def ran(*command: object, status: int | None = 0, timeout: float = 300.0, **environment: str) -> Any:
    """A command that has ended as expected, with what it said; None: in any way."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert status is None or done.returncode == status, (done.stdout + done.stderr)[-3000:]
    return done


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
    """A launcher in a session of its own; its workers keep diaries in the folder that they are given."""

    def __init__(self, folder: Path, command: Sequence[str], **environment: str) -> None:
        self.folder = folder
        with open(folder / "log", "w") as log:
            self.process = subprocess.Popen(
                [*command, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def entries(self) -> list[dict[str, Any]]:
        return entries_in(self.folder)

    def wait_for(self, condition: Callable[[list[dict[str, Any]]], bool], seconds: float = 300.0) -> None:
        """Until what the workers have written down meets a condition; else fails, with the log's end."""
        until = time.monotonic() + seconds
        while not condition(self.entries):
            if self.process.poll() is not None and not condition(self.entries):
                raise AssertionError(f"the job has ended with {self.process.returncode}: {self._end()}")
            if time.monotonic() > until:
                raise AssertionError(f"not met within {seconds} s: {self._end()}")
            time.sleep(0.1)

    def until(self, what: str, **facts: Any) -> dict[str, Any]:
        """Waits for an entry."""
        self.wait_for(lambda entries: bool(of(entries, what, **facts)))
        return of(self.entries, what, **facts)[0]

    def wait(self, seconds: float = 300.0) -> int:
        """The exit status; if it has not ended in time fails, with the log's end."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job goes on after {seconds} s: {self._end()}") from None

    def close(self) -> None:
        """Ends what has not ended by itself: the launcher first, which ends its workers."""
        for number in (signal.SIGINT, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for pid in {entry["pid"] for entry in self.entries}:
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, number)

    def _end(self) -> str:
        self._signal(signal.SIGUSR1)  # workers that live say where they are: see `Diary`
        time.sleep(2)
        last = "\n".join(str(entry) for entry in self.entries[-6:])
        return f"{last}\n{self.log[-12000:]}"


@contextlib.contextmanager
def started(job: Job) -> Iterator[Any]:
    try:
        yield job
    finally:
        job.close()
