"""Which way rounds of sparsifiers take, where a launch measures several."""

from __future__ import annotations

import os

import numpy as np

import horovod_sparse.torch as hvd
from horovod_sparse.carriers.pairs import TRANSPORT_VARIABLE, transport_asked
from horovod_sparse.collectives import Exchange, Synchronization
from horovod_sparse.torch.driver import HorovodDriver
from horovod_sparse.torch.transport import forget_transports

#: how rounds travel, as the user has said
ASKED = transport_asked()


def travel_by(transport: str) -> None:
    """From now on, and agreed upon before anything is timed.

    Args:
        transport: see `horovod_sparse.carriers.pairs`.
    """
    if transport_asked() != transport:
        os.environ[TRANSPORT_VARIABLE] = transport
        forget_transports(hvd.global_process_set)
        driver = HorovodDriver()
        driver.start("benchmark's first message", _hello((hvd.rank() + 1) % hvd.size()))
        driver.wait()


def _hello(peer: int) -> Synchronization[None]:
    yield Exchange({peer: np.zeros(1, np.int32)}, ((hvd.rank() - 1) % hvd.size(),))
