"""Choices of a transport and rounds that wait for one, with answers that a test gives."""

import horovod.torch as hvd
import numpy as np
import pytest

from horovod_sparse.carriers.pairs import TransportChoice
from horovod_sparse.collectives import Exchange
from horovod_sparse.errors import CollectiveMismatchError
from horovod_sparse.torch import transport


class Choice:
    """What ranks have agreed on; or what the agreement ended with."""

    def __init__(self, process_set=None, number=0, by_horovod=None):
        self.known, self.failure, self.chosen = True, None, TransportChoice(self, "mpi", "")

    def is_known(self):
        return self.known

    def done(self):
        return True

    def result(self):
        if self.failure is not None:
            raise self.failure
        return self.chosen

    def start(self, request, name, rank):
        raise CollectiveMismatchError(f"{name}: rank {rank} did not await messages")


def test_every_choice_of_a_former_start_is_given_up(monkeypatch):
    """Of process sets that nobody uses any more, too."""
    hvd.init()
    former = {(number, (0,)): Choice() for number in range(3)}
    choices = dict(former)
    monkeypatch.setattr(transport, "_agreements", choices)
    monkeypatch.setattr(transport, "_PendingAgreement", Choice)
    for key in ((1, (0,)), (2, (0,))):
        former[key].known = False
    present = transport._agreement_of(hvd.global_process_set, None)
    assert present is former[0, (0,)], "what is known stays, and nothing else is looked at"
    present.known = False
    assert transport._agreement_of(hvd.global_process_set, None) is not present
    assert list(choices) == [(0, (0,))]


@pytest.mark.parametrize("where", ["agreement", "start"])
def test_a_hook_that_asks_is_not_interrupted_by_an_error(monkeypatch, where):
    """Backward passes ask `done`; the error waits for `result`."""
    hvd.init()
    choice = Choice()
    if where == "agreement":
        choice.failure = CollectiveMismatchError("x: rank 0 did not await messages")
    monkeypatch.setattr(transport, "_agreement_of", lambda process_set, by_horovod: choice)
    request = Exchange({0: np.ones(1, np.int32)}, (0,))
    handle = transport.start_round(request, "x", hvd.global_process_set, lambda *_: None)
    assert handle.done()
    with pytest.raises(CollectiveMismatchError, match="rank 0 did not await"):
        handle.result()
