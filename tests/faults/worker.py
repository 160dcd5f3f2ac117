"""A rank of a job that something happens to: ``worker.py MODE FOLDER``. Writes down every step."""

import contextlib
import hashlib
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import CheckpointError, DeadlineError
from support.jobs import Diary, until_told, without_dynamo
from support.linear import LinearModel, dyadic

SHAPES = {"first": (400, 30), "bias": (7,), "second": (30, 50, 11)}
STEPS, FAULT_STEP = 12, 5


class Training:
    def __init__(self, folder: Path, what: str, text: str = "exdyna:density=0.05", **more: Any) -> None:
        self.rank, self.what, self.folder = hvd.rank(), what, folder
        self.model = LinearModel(SHAPES)
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(sgd, named, compression=text, bucket_bytes=60_000, **more)

    def note(self, **facts: object) -> None:
        note(self.folder, self.what, **facts)

    def digest(self) -> str:
        held = self.optimizer.state_dict()["horovod_sparse"]["residuals"]
        arrays = [*self.model.state_dict().values(), *(held[name] for name in SHAPES)]
        return hashlib.sha256(b"".join(array.numpy().tobytes() for array in arrays)).hexdigest()[:12]

    def steps(self, first: int, last: int, pause: float = 0.0) -> None:
        for step in range(first, last):
            time.sleep(pause)
            self.model.backward(
                {name: dyadic(shape, self.rank, step, name) for name, shape in SHAPES.items()}
            )
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.note(step=step, digest=self.digest())


def note(folder: Path, what: str, **facts: object) -> None:
    Diary(folder).note(what, rank=hvd.rank(), **facts)


def in_backward(training: Training, act) -> None:
    if training.rank == hvd.size() - 1:
        dict(training.model.named_parameters())["first"].register_hook(lambda _gradient: act())


def fail() -> None:
    raise RuntimeError("the loss of this rank cannot be differentiated")


def begun(folder: Path, what: str, **more: Any) -> Training:
    training = Training(folder, what, **more)
    training.steps(0, FAULT_STEP)
    hvd.barrier()
    return training


def killed(folder: Path) -> None:
    training = begun(folder, "killed")
    in_backward(training, lambda: (training.note(dies=True), os.kill(os.getpid(), signal.SIGKILL)))
    training.steps(FAULT_STEP, STEPS)


def networked(folder: Path) -> None:
    for what in ("plain", "down", "lossy"):
        Training(folder, what).steps(0, STEPS, pause=0.0 if what == "plain" else 0.2)


def failed(folder: Path) -> None:
    training = begun(folder, "failed")
    training.note(dies=True)
    in_backward(training, fail)
    training.steps(FAULT_STEP, STEPS)


def interrupted(folder: Path) -> None:
    Training(folder, "interrupted").steps(0, 100_000, pause=0.05)


def in_the_sum(training: Training, act) -> None:
    if training.rank == hvd.size() - 1:
        training.optimizer._synchronizer.parts[0].bucket._pad = lambda *_arguments: act()


def survived(folder: Path) -> None:
    """What a job outlives: a stopped rank, a full disk; and what it ends by: a rank that hangs in a sum."""
    plain = Training(folder, "plain")
    plain.steps(0, STEPS)
    training = Training(folder, "stopped")
    training.steps(0, STEPS, pause=0.2)

    training = Training(folder, "full disk")
    training.steps(0, FAULT_STEP)
    hvd.save(folder / "saved", training.optimizer, model=training.model)
    training.steps(FAULT_STEP, FAULT_STEP + 2)
    with contextlib.ExitStack() as stack:
        if training.rank == hvd.size() - 1:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            hvd.save(folder / "saved", training.optimizer, model=training.model)
        except CheckpointError as error:
            message = str(error)
    training.note(message=message)
    again = Training(folder, "full disk again")
    again.note(loaded=hvd.load(folder / "saved", again.optimizer, model=again.model))
    again.steps(FAULT_STEP, STEPS)

    training = begun(folder, "hung", deadline_seconds=5.0, levels="host")
    in_the_sum(training, lambda: until_told(folder, "waited") or os._exit(0))
    since = time.perf_counter()
    try:
        training.steps(FAULT_STEP, STEPS)
    except DeadlineError as error:
        seconds = time.perf_counter() - since
        training.note(bucket=error.bucket, missing=list(error.missing or ()), waited=seconds)


def misspelt(folder: Path, what: str) -> None:
    """The last rank cannot make its optimizer, for its text or a variable; it may catch the error."""
    is_last, begun = hvd.rank() == hvd.size() - 1, time.monotonic()
    if is_last and what == "variable":
        os.environ["HOROVOD_SPARSE_TRANSPORT"] = "mpi"
    text = "topk:densty=0.1" if is_last and what != "variable" else "topk:density=0.1"
    try:
        Training(folder, what, text).steps(0, 1)
    except Exception as error:
        told = {"error": type(error).__name__, "message": str(error)}
        note(folder, what, waited=time.monotonic() - begun, **told)
        if what == "misspelt":
            raise
    until_told(folder, "error")


if __name__ == "__main__":
    without_dynamo()
    torch.set_num_threads(1)
    hvd.init()
    modes = {mode.__name__: mode for mode in (killed, failed, interrupted, survived, networked)}
    mode, given = sys.argv[1], Path(sys.argv[2])
    modes[mode](given) if mode in modes else misspelt(given, mode)
