"""What a job on real ranks does when something happens to one of them: within a stated time, in words."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.jobs import HOROVODRUN, Job, is_alive, of, ran, started
from support.sampling import rest_nightly

WORKER, TF_WORKER = (Path(__file__).with_name(name) for name in ("worker.py", "tf_worker.py"))
RANKS = 2
#: seconds in which a job has to begin, and in which it has to end after a fault: on a busy machine
BEGINS, ENDS = 300.0, 60.0


def job(mode: str, folder: Path, worker: Path = WORKER, launcher: Sequence[str] = HOROVODRUN) -> Any:
    """By ``horovodrun`` or ``mpirun``, with two workers."""
    return started(Job(folder, [*launcher, "-np", str(RANKS), sys.executable, str(worker), mode]))


def digests(run: Job, what: str) -> list[dict[int, str]]:
    """By rank, what it had after every step."""
    entries = [[e for e in of(run.entries, what, rank=rank) if "digest" in e] for rank in range(RANKS)]
    return [{entry["step"]: entry["digest"] for entry in own} for own in entries]


def with_errors(run: Job, rank: int) -> list[dict[str, Any]]:
    return [entry for entry in run.entries if entry["rank"] == rank and "error" in entry]


@pytest.mark.parametrize("mode", rest_nightly(["failed", "killed"], ["failed"]))
def test_a_rank_that_dies_ends_the_job(mode, tmp_path):
    with job(mode, tmp_path) as run:
        run.until(mode, rank=RANKS - 1, dies=True)
        assert run.wait(ENDS) != 0
        taken = digests(run, mode)
        assert [max(steps) for steps in taken] == [4, 4], "nobody took the step that one rank did not take"
        if mode == "failed":
            assert "cannot be differentiated" in run.log


def test_an_interrupt_ends_the_job(tmp_path):
    with job("interrupted", tmp_path) as run:
        for rank in range(RANKS):
            pid = run.until("interrupted", rank=rank, step=3)["pid"]
        os.killpg(run.process.pid, signal.SIGINT)
        # Any status: horovodrun's psutil at times reaps a rank before its subprocess does, which then reads 0
        run.wait(ENDS)
        deadline = time.monotonic() + ENDS
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not is_alive(pid)


def test_what_a_job_outlives(tmp_path):
    with job("survived", tmp_path) as run:
        pid = run.until("stopped", rank=RANKS - 1, step=2)["pid"]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(pid, signal.SIGCONT)
        for rank in range(RANKS):  # the others may write the last step after rank 0 has
            run.until("stopped", rank=rank, step=11)
        plain = digests(run, "plain")
        assert digests(run, "stopped") == plain, "a rank that was stopped goes on bit for bit"

        for rank in range(RANKS):
            full = run.until("full disk again", rank=rank, loaded=5)
            (told,) = (e["message"] for e in of(run.entries, "full disk", rank=rank) if "message" in e)
            assert "could not write rank-00001.npz" in told and full
        hung = run.until("hung", rank=0, missing=[RANKS - 1])
        assert hung["waited"] >= 5.0 and "bucket0" in hung["bucket"]
        resumed = [{step: item for step, item in one.items() if step >= 5} for one in plain]
        assert digests(run, "full disk again") == resumed, "the checkpoint before it goes on bit for bit"
        run.wait()


OF_TENSORFLOW = [f"{way}-{what}" for way in ("fit", "eager") for what in ("misspelt", "variable")]


@pytest.mark.parametrize(
    "mode",
    rest_nightly(["misspelt", "caught", "variable", *OF_TENSORFLOW], ["misspelt", "fit-variable"]),
)
def test_the_others_raise_what_one_rank_has_met(mode, tmp_path):
    if mode in OF_TENSORFLOW:
        pytest.importorskip("tensorflow")
    with job(mode, tmp_path, TF_WORKER if mode in OF_TENSORFLOW else WORKER) as run:
        status = run.wait(BEGINS)
        (other,), (own,) = (with_errors(run, rank) for rank in range(RANKS))
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
        run.until(f"{way}-asleep", rank=RANKS - 1, step=4)
        run.wait()
        (told,) = with_errors(run, 0)
        assert "DeadlineError: round 0 of " in f"{told['error']}: {told['message']}"
        assert f"rank {RANKS - 1} does not wait" in told["message"]
        assert told["waited"] >= 8.0
        assert (
            max(entry["step"] for entry in of(run.entries, f"{way}-asleep", rank=0) if "step" in entry) == 4
        )
        (late,) = with_errors(run, RANKS - 1)
        assert "shut down" in late["message"], "no rank goes on alone"


@pytest.mark.tensorflow
def test_a_graph_that_waits_for_a_stopped_rank_ends(tmp_path):
    """On MPI, which waits for a stopped process in Horovod's own thread: by the end of this one."""
    import horovod.tensorflow as built

    if not built.mpi_built():
        pytest.skip("Horovod is built without MPI")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    with job("graph-stopped", tmp_path, TF_WORKER, [*mpirun, "--mca", "mpi_yield_when_idle", "1"]) as run:
        pid = run.until("graph-stopped", rank=RANKS - 1, step=4)["pid"]
        try:
            assert run.wait() != 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert "has waited 8 s for other ranks" in run.log


@pytest.mark.nightly
def test_a_short_soak(tmp_path):
    soak = Path(__file__).resolve().parents[2] / "scripts" / "lib" / "checks" / "soak.py"
    ended = ran(sys.executable, soak, "--steps", "300", "--ranks", "2", "--kills", "1")
    assert "1 kills" in ended.stdout and "missing 0, different 0" in ended.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["ddp", "horovod"])
def test_each_disagreement_of_two_ranks_is_named_on_every_rank_that_can_know(kind):
    """No case hangs, is silent, or ends in an error that names nothing."""
    pairs = Path(__file__).parents[1] / "support" / "pairs.py"
    cases = [json.loads(line) for line in ran(sys.executable, pairs, kind, timeout=7200).stdout.splitlines()]
    assert cases
    wrong = [case for case in cases if case["verdict"] in ("hung", "silent", "bare")]
    assert not wrong, "\n".join(f"{one['name']}: {one['verdict']}, {one['ends']}" for one in wrong)
