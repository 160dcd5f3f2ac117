"""The driver with one rank, and with collectives that a test holds in its hand."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_sparse.collectives import AllReduce
from horovod_sparse.errors import DeadlineError, UnsupportedError
from horovod_sparse.torch import driver as module
from horovod_sparse.torch._horovod import holder_of
from horovod_sparse.torch.driver import HorovodDriver
from horovod_sparse.training.deadline import Deadline


class Held:
    def __init__(self, request, name):
        self.request, self.name, self.known, self.finished, self.failure = request, name, True, False, None

    def done(self):
        return self.finished if self.known else None

    def result(self):
        assert self.finished, "the driver took a result that was not there"
        if self.failure is not None:
            raise self.failure
        return self.request.buffer


@pytest.fixture
def held(monkeypatch):
    collectives: dict[str, Held] = {}

    def fake(request, name, process_set, topology):
        assert name not in collectives or collectives[name].finished or not collectives[name].known
        collectives[name] = Held(request, name)
        return collectives[name]

    monkeypatch.setattr(module, "start", fake)
    monkeypatch.setattr(hvd.global_process_set, "size", lambda: 2)
    monkeypatch.setattr("horovod_sparse.tensors.driver._DRAIN_SECONDS", 0.01)
    return collectives


def two_rounds(value=1.0):
    first = yield AllReduce(np.array([value]))
    second = yield AllReduce(first + 1)
    return float(second[0])


def test_waiting_for_one_advances_all(held):
    driver = HorovodDriver()
    one, two = driver.start("one", two_rounds()), driver.start("two", two_rounds(10.0))
    held["two.0"].finished = True
    driver.advance()
    assert "two.1" in held and "one.1" not in held, "what is done goes on, what is not stays parked"
    held["one.0"].finished = held["two.1"].finished = True

    class Turn(Held):
        """Done once the other task has ended: only a driver that advances both gets there."""

        def done(self):
            self.finished = two.done
            return self.finished

    driver._start = Turn
    driver.wait([one])
    assert one.value() == 2.0 and two.value() == 11.0


def test_a_name_under_way_is_refused_and_free_afterwards(held):
    driver = HorovodDriver()
    driver.start("w", two_rounds())
    with pytest.raises(UnsupportedError, match="w is synchronized while"):
        driver.start("w", two_rounds())
    driver.clear()
    assert not driver.parked
    held["w.0"].known = False
    assert not driver.start("w", two_rounds()).done


def test_a_failure_ends_everything_and_is_raised_by_wait_alone(held):
    driver = HorovodDriver()
    tasks = [driver.start(name, two_rounds()) for name in ("one", "two", "three")]
    held["two.0"].finished, held["two.0"].failure = True, hvd.HorovodInternalError("a rank is gone")
    driver.advance()  # a hook: raises nothing
    assert all(task.done for task in tasks) and not driver.parked
    with pytest.raises(hvd.HorovodInternalError, match="a rank is gone"):
        driver.wait()
    with pytest.raises(hvd.HorovodInternalError, match="a rank is gone"):
        tasks[2].value()
    driver.wait()  # once is enough


def test_handles_of_a_horovod_that_was_shut_down_are_dropped(held):
    driver = HorovodDriver()
    old = driver.start("w", two_rounds())
    held["w.0"].known = False
    new = driver.start("w", two_rounds())
    with pytest.raises(hvd.HorovodInternalError, match="shut down"):
        old.value()
    held["w.0"].finished = True
    driver.advance()
    held["w.1"].finished = True
    driver.wait()
    assert new.value() == 2.0


def test_a_tensor_is_held_though_horovod_changes_its_shape_meanwhile(monkeypatch):
    """Outputs are made without elements, and get theirs from Horovod's thread."""
    output = torch.zeros(0, dtype=torch.int32)
    expand = torch.Tensor.expand

    def slowly(tensor, shape):
        expanded = expand(tensor, shape)
        output.resize_(5)
        return expanded

    monkeypatch.setattr(torch.Tensor, "expand", slowly)
    assert holder_of(output).grad is output


def test_an_interrupt_is_not_kept(held):
    def interrupted():
        yield AllReduce(np.ones(1))
        raise KeyboardInterrupt

    driver = HorovodDriver()
    driver.start("w", interrupted())
    held["w.0"].finished = True
    with pytest.raises(KeyboardInterrupt):
        driver.wait()
    assert not driver.parked


def test_time_in_which_this_process_was_stopped_is_no_waiting():
    deadline = Deadline(60, lambda: (0, [0, 1]))
    looks = [*range(10), *range(3_000, 3_040)]  # stopped for most of an hour, like the other ranks
    for waited in looks:
        deadline.check(waited, "late", 1)
    with pytest.raises(DeadlineError, match="has waited 60 s"):
        for waited in range(3_040, 3_060):
            deadline.check(waited, "late", 1)
    for waited in (0.001, 59.0, 61.0):  # another wait
        deadline.check(waited, "later", 1)
