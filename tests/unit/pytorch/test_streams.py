"""Which stream waits for which, told by streams that write down what is asked of them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from horovod_sparse.feedback import recipe
from horovod_sparse.pytorch import parts
from horovod_sparse.pytorch.memory import unscaled
from horovod_sparse.pytorch.parts import DenseParameters, SparseBucket
from horovod_sparse.pytorch.streams import CudaStreams


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
    """Two rounds; writes down the stream of each piece of work."""
    for number in range(2):
        seen.append(cuda.now.name)
        assert (yield number) == 10 * number
    seen.append(cuda.now.name)
    return "done"


def test_one_stream_waits_for_nothing():
    only = Stream("only")
    cuda, seen = Cuda(only), []
    streams = CudaStreams(torch.device("cuda", 1), cuda)
    streams.note()
    work = streams.run(asking(cuda, seen))
    assert next(work) == 0 and work.send(0) == 1
    with pytest.raises(StopIteration, match="done"):
        work.send(10)
    streams.join()
    assert seen == ["only"] * 3 and only.waited == []


def test_work_goes_on_where_it_began_and_is_waited_for():
    first, second, third, caller = (Stream(name) for name in ("first", "second", "third", "caller"))
    cuda, seen = Cuda(first), []
    streams = CudaStreams(torch.device("cuda", 1), cuda)
    for cuda.now in (first, second, first, second):
        streams.note()
    work = streams.run(asking(cuda, seen))
    assert second.waited == ["first"]
    next(work)
    cuda.now = third  # the hook of another bucket
    work.send(0)
    cuda.now = caller
    with pytest.raises(StopIteration, match="done"):
        work.send(10)
    assert cuda.now is caller
    streams.join()
    assert seen == ["second"] * 3
    assert (first.waited, third.waited, caller.waited) == ([], [], ["second"])
    cuda.now = third  # the next step: nothing is left of this one
    streams.note()
    streams.run(asking(cuda, seen))
    assert third.waited == []


def test_what_is_done_before_it_begins_comes_after_all_writers():
    first, second = Stream("first"), Stream("second")
    cuda = Cuda(first)
    streams = CudaStreams(torch.device("cuda", 1), cuda)
    streams.note()
    cuda.now = second
    streams.note()
    streams.meet()
    assert second.waited == ["first"]
    streams.run(asking(cuda, []))
    assert (first.waited, second.waited) == ([], ["first"])


@pytest.mark.parametrize("name", ["sparse", "dense"])
def test_a_part_waits_for_writers_before_it_touches_gradients(name, monkeypatch):
    """Gradients are copied together, or divided by the loss's scale, before the coroutine begins."""
    parameter = torch.nn.Parameter(torch.ones(20))
    if name == "sparse":
        part = SparseBucket("b", ["w"], [parameter], recipe("topk", density=0.5), lambda: None, (0, 1))
    else:
        part = DenseParameters(["w"], [parameter], (0, 1))
    parameter.grad = torch.ones(20)
    done = []

    class Told:
        def meet(self):
            done.append("meet")

        def run(self, step):
            done.append("run")
            return step

    settle = part.gradient.settle
    monkeypatch.setattr(part.gradient, "settle", lambda: (done.append("settle"), settle()))
    monkeypatch.setattr(parts, "unscaled", lambda *given: (done.append("unscale"), unscaled(*given))[1])
    part.streams = Told()
    part.start(SimpleNamespace(start=lambda name, step: step.close()), 2.0)
    assert done[0] == "meet"
    assert done[-1] == "run"
    assert "settle" in done


def test_a_coroutine_that_is_given_up_is_closed():
    cuda, closed = Cuda(Stream("only")), []

    def asking():
        try:
            yield 1
        finally:
            closed.append(True)

    streams = CudaStreams(torch.device("cuda", 1), cuda)
    work = streams.run(asking())
    next(work)
    work.close()
    assert closed == [True]
