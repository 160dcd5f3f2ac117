"""Which stream waits for which, told by streams that write down what is asked of them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from horovod_sparse.arrays import FoldRule, HostAccumulator
from horovod_sparse.feedback import recipe
from horovod_sparse.feedback.adam import RankSimilarity
from horovod_sparse.plans import ParameterFacts
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.tensors import gradients, streams
from horovod_sparse.tensors.accumulator import TorchAccumulator
from horovod_sparse.tensors.gradients import GradientBucket
from horovod_sparse.tensors.streams import CudaStreams
from horovod_sparse.training.engine import PartSpec


class Stream:
    def __init__(self, name):
        self.name, self.waited = name, []

    def wait_stream(self, other):
        self.waited.append(other.name)


class Cuda:
    """Stands for torch.cuda; `now` is the current stream."""

    def __init__(self, now):
        self.now = now

    def current_stream(self, device):
        assert device == torch.device("cuda", 1)
        return self.now

    @contextlib.contextmanager
    def stream(self, other):
        before, self.now = self.now, other
        try:
            yield
        finally:
            self.now = before


def asking(cuda, seen):
    for number in range(2):
        seen.append(cuda.now.name)
        assert (yield number) == 10 * number
    seen.append(cuda.now.name)
    return "done"


def test_a_coroutine_stays_on_its_stream_which_the_caller_waits_for():
    first, second, third, caller = (Stream(name) for name in ("first", "second", "third", "caller"))
    cuda, seen = Cuda(first), []
    streams = CudaStreams(torch.device("cuda", 1), cuda)
    for cuda.now in (first, second, first, second):
        streams.note_writer()
    work = streams.run(asking(cuda, seen))
    assert second.waited == ["first"]
    next(work)
    cuda.now = third  # the hook of another bucket
    work.send(0)
    cuda.now = caller
    with pytest.raises(StopIteration, match="done"):
        work.send(10)
    assert cuda.now is caller
    streams.wait_for_coroutine()
    assert seen == ["second"] * 3
    assert (first.waited, third.waited, caller.waited) == ([], [], ["second"])
    cuda.now = third  # the next step: nothing is left of this one
    streams.note_writer()
    streams.run(asking(cuda, seen))
    assert third.waited == []


@pytest.mark.parametrize("name", ["sparse", "dense"])
def test_a_part_waits_for_writers_before_it_touches_gradients(name, monkeypatch):
    parameter = torch.nn.Parameter(torch.ones(20))
    chosen = recipe("topk", density=0.5)
    sparse, dense = PartSpec("b", ("w",), chosen), PartSpec("b", ("w",), chosen.for_dense(), dense=True)
    facts = {"w": (ParameterFacts("w", 20), parameter)}
    part = GradientBucket(sparse if name == "sparse" else dense, facts, (0, 1))
    parameter.grad = torch.ones(20)
    done = []

    class Streams:
        def wait_for_writers(self):
            done.append("wait")

        def run(self, step):
            done.append("run")
            return step

    take = part.take_gradients
    monkeypatch.setattr(part, "take_gradients", lambda: (done.append("take"), take()))
    undone = gradients.layout.unscaled
    monkeypatch.setattr(
        gradients.layout, "unscaled", lambda *given: (done.append("unscale"), undone(*given))[1]
    )
    part.streams = Streams()
    part.start(SimpleNamespace(start=lambda name, step: step.close()), 2.0)
    assert done[0] == "wait"
    assert done[-1] == "run"
    assert "take" in done


def test_learning_how_alike_gradients_are_never_waits(monkeypatch):
    waits = []
    arrays = streams.PendingCopy.arrays
    monkeypatch.setattr(streams.PendingCopy, "arrays", lambda copy: (waits.append(1), arrays(copy))[1])
    rule, alike = FoldRule(moment=0.9, masking=False, rate=0.1), RankSimilarity(BucketInfo("b", 50, size=2))
    drawn = np.random.default_rng(0).standard_normal((2, 50)).astype(np.float32)
    host, device = HostAccumulator(50, companions=1), TorchAccumulator(50, device="cpu", companions=1)
    for step, gradient in enumerate(drawn):
        alike.fold(host, gradient.copy(), rule, step)
        alike.fold(device, torch.from_numpy(gradient.copy()), rule, step)
        assert not waits
        assert device.report.projection == pytest.approx(host.report.projection, rel=1e-5)
        assert host.report.projection != 0.0
        assert len(waits) == 2, "its two copies, once"
        device.report.first_nonfinite  # noqa: B018
        assert len(waits) == 2
        waits.clear()
