"""What a job on real ranks does when something happens to one of them: within a stated time, in words."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.sampling import rest_nightly
from support.startup import HOROVODRUN

WORKER, TF_WORKER = (Path(__file__).with_name(name) for name in ("worker.py", "tf_worker.py"))
RANKS = 2
#: seconds in which a job has to begin, and in which it has to end after a fault: on a busy machine
BEGINS, ENDS = 120.0, 20.0


class Job:
    """``horovodrun`` or ``mpirun`` with two workers, in a session of its own."""

    def __init__(self, mode: str, folder: Path, worker: Path, launcher: Sequence[str]) -> None:
        self.folder, self.log = folder, folder / "log"
        command = [*launcher, "-np", str(RANKS), sys.executable, str(worker), mode, str(folder)]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def entries(self, rank: int) -> list[dict[str, Any]]:
        path = self.folder / f"rank-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, rank: int, **facts: Any) -> dict[str, Any]:
        deadline = time.monotonic() + BEGINS
        while time.monotonic() < deadline:
            for entry in self.entries(rank):
                if all(entry.get(name) == value for name, value in facts.items()):
                    return entry
            assert self.process.poll() is None or self.entries(rank), self.log.read_text()[-3000:]
            time.sleep(0.05)
        raise AssertionError(f"{facts} did not come: {self.log.read_text()[-3000:]}")

    def ended(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on after {seconds} s: {self.log.read_text()[-3000:]}") from None

    def digests(self, what: str) -> list[dict[int, str]]:
        return [
            {e["step"]: e["digest"] for e in self.entries(rank) if e["what"] == what and "step" in e}
            for rank in range(RANKS)
        ]


@contextlib.contextmanager
def job(
    mode: str, folder: Path, worker: Path = WORKER, launcher: Sequence[str] = HOROVODRUN
) -> Iterator[Job]:
    made = Job(mode, folder, worker, launcher)
    try:
        yield made
    finally:
        workers = {entry["pid"] for rank in range(RANKS) for entry in made.entries(rank)}
        if made.process.poll() is None:
            os.killpg(made.process.pid, signal.SIGKILL)
            made.process.wait()
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("mode", rest_nightly(["failed", "killed", "starved"], ["failed"]))
def test_a_rank_that_dies_ends_the_job(mode, tmp_path):
    with job(mode, tmp_path) as run:
        run.until(RANKS - 1, what=mode, dies=True)
        assert run.ended(ENDS) != 0
        taken = run.digests(mode)
        assert [max(steps) for steps in taken] == [4, 4], "nobody took the step that one rank did not take"
        if mode == "failed":
            assert "cannot be differentiated" in run.log.read_text()
        if mode == "starved":
            assert "can't allocate memory" in run.log.read_text()


def test_an_interrupt_ends_the_job(tmp_path):
    with job("interrupted", tmp_path) as run:
        for rank in range(RANKS):
            pid = run.until(rank, step=3)["pid"]
        os.killpg(run.process.pid, signal.SIGINT)
        # Any status: horovodrun's psutil at times reaps a rank before its subprocess does, which then reads 0
        run.ended(ENDS)
        deadline = time.monotonic() + ENDS
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_what_a_job_outlives(tmp_path):
    with job("survived", tmp_path) as run:
        pid = run.until(RANKS - 1, what="stopped", step=2)["pid"]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(pid, signal.SIGCONT)
        for rank in range(RANKS):  # the others may write the last step after rank 0 has
            run.until(rank, what="stopped", step=11)
        plain = run.digests("plain")
        assert run.digests("stopped") == plain, "a rank that was stopped goes on bit for bit"

        for rank in range(RANKS):
            full = run.until(rank, what="full disk again", loaded=5)
            told = [e["message"] for e in run.entries(rank) if e["what"] == "full disk" and "message" in e]
            assert "could not write rank-00001.npz" in told[0] and full
        hung = run.until(0, what="hung", missing=[RANKS - 1])
        assert 2.0 <= hung["waited"] < 15.0 and "bucket0" in hung["bucket"]
        resumed = [{step: item for step, item in one.items() if step >= 5} for one in plain]
        assert run.digests("full disk again") == resumed, "the checkpoint before it goes on bit for bit"
        run.ended(30.0)


MISSPELT = [
    pytest.param(
        mode,
        marks=[
            *([pytest.mark.tensorflow] if "-" in mode else []),
            *([] if mode in ("misspelt", "fit-variable") else [pytest.mark.nightly]),
        ],
    )
    for mode in (
        *("misspelt", "caught", "variable"),
        *("fit-misspelt", "fit-variable", "eager-misspelt", "eager-variable"),
    )
]


@pytest.mark.parametrize("mode", MISSPELT)
def test_the_others_raise_what_one_rank_has_met(mode, tmp_path):
    with job(mode, tmp_path, TF_WORKER if "-" in mode else WORKER) as run:
        status = run.ended(BEGINS)
        (other,), (own,) = ([e for e in run.entries(rank) if "error" in e] for rank in range(RANKS))
    assert own["error"] == "UnknownNameError"
    assert other["error"] in ("HorovodSparseError", "ArgumentError")
    what = "HOROVOD_SPARSE_TRANSPORT 'mpi'" if "variable" in mode else "argument of topk 'densty'"
    assert other["message"].startswith(f"on rank 1: UnknownNameError: unknown {what}")
    assert other["waited"] < ENDS
    assert (status == 0) == (mode != "misspelt")


@pytest.mark.tensorflow
@pytest.mark.parametrize("way", rest_nightly(["fit", "stock", "mixed", "eager"], ["fit"]))
def test_a_graph_that_waits_for_a_rank_ends(way, tmp_path):
    """By the user's deadline: on Gloo Horovod alone waits for ever."""
    with job(f"{way}-asleep", tmp_path, TF_WORKER) as run:
        run.until(RANKS - 1, step=4)
        run.ended(60.0)
        (told,) = [entry for entry in run.entries(0) if "error" in entry]
        assert "DeadlineError: round 0 of " in f"{told['error']}: {told['message']}"
        assert f"rank {RANKS - 1} does not wait" in told["message"]
        assert 2.0 <= told["waited"] < 15.0
        assert max(entry["step"] for entry in run.entries(0) if "step" in entry) == 4
        (late,) = [entry for entry in run.entries(RANKS - 1) if "error" in entry]
        assert "shut down" in late["message"], "no rank goes on alone"


@pytest.mark.tensorflow
def test_a_graph_that_waits_for_a_stopped_rank_ends(tmp_path):
    """On MPI, which waits for a stopped process in Horovod's own thread: by the end of this one."""
    import horovod.tensorflow as built

    if not built.mpi_built():
        pytest.skip("Horovod is built without MPI")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    with job("graph-stopped", tmp_path, TF_WORKER, [*mpirun, "--mca", "mpi_yield_when_idle", "1"]) as run:
        pid = run.until(RANKS - 1, step=4)["pid"]
        try:
            assert run.ended(40.0) != 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert "has waited 4 s for other ranks" in run.log.read_text()


@pytest.mark.nightly
def test_a_short_soak(tmp_path):
    soak = Path(__file__).resolve().parents[2] / "scripts" / "lib" / "checks" / "soak.py"
    command = [sys.executable, str(soak), "--steps", "300", "--ranks", "2", "--kills", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 kills" in ended.stdout and "missing 0, different 0" in ended.stdout


def test_a_short_fuzzing():
    fuzz = Path(__file__).resolve().parents[2] / "scripts" / "lib" / "checks" / "fuzz.py"
    command = [sys.executable, str(fuzz), "--seconds", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("refused by name") == 4
