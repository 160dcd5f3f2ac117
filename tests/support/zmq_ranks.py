"""Ranks that send each other messages over ZeroMQ, all in this process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import zmq

from horovod_sparse.collectives import Exchange
from horovod_sparse.frontend.messages.zeromq import ZmqPairs

__all__ = ["everyone_says", "listening", "making", "offers", "words"]


@contextmanager
def making() -> Iterator[Callable[[int], list[ZmqPairs]]]:
    """Makes ranks that are connected, and closes them at the end."""
    made: list[ZmqPairs] = []

    def make(size: int) -> list[ZmqPairs]:
        ranks = listening(size)
        made.extend(ranks)
        for one in ranks:
            one.connect(offers(ranks))
        return ranks

    yield make
    for one in made:
        one.forget()


def listening(size: int) -> list[ZmqPairs]:
    return [ZmqPairs(zmq, secrets.token_bytes(16)) for _ in range(size)]


def offers(ranks: list[ZmqPairs]) -> list[dict[str, str]]:
    return [{"address": one.address, "token": one._token.hex()} for one in ranks]


def words(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def everyone_says(ranks: list[ZmqPairs], name: str, message: Callable[[int], np.ndarray]) -> list[Any]:
    """An exchange of all with all, under way."""
    others = [tuple(peer for peer in range(len(ranks)) if peer != rank) for rank in range(len(ranks))]
    return [
        one.start(Exchange(dict.fromkeys(others[rank], message(rank)), others[rank]), name, rank)
        for rank, one in enumerate(ranks)
    ]
