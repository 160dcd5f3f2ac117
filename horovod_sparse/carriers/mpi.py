"""Messages between two ranks over mpi4py, on a communicator that nobody else uses."""

from __future__ import annotations

import atexit
import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_sparse.carriers.pairs import HEADER, Key, Pairs, Words

_HEADER_TAG, _BODY_TAG = 1, 2

#: all that were made: MPI may still use their memory when nobody else does
_made: list[MpiPairs] = []


class MpiPairs(Pairs):
    """Messages over MPI. Making one waits until all ranks of the set do; the tag is the same on all.

    The length in a header says how much memory its message needs, and the names of exchanges need no place in
    MPI's small space of tags. (Probing for messages instead needs no header, but is not sound in every
    MPI where several threads communicate, and Horovod's thread does.)
    """

    def __init__(self, mpi: Any, ranks: Sequence[int], tag: int = 0) -> None:
        super().__init__()
        self._mpi = mpi
        world = mpi.COMM_WORLD.Get_group()
        self._comm = mpi.COMM_WORLD.Create_group(world.Incl(list(ranks)), tag=tag)
        world.Free()
        self._arriving: list[tuple[Any, int, Key, Words]] = []
        self._leaving: list[tuple[Any, Words]] = []
        self._header = np.empty(HEADER, np.int32)
        self._next = self._await_header()
        _made.append(self)

    def _send(self, peer: int, header: Words, message: Words) -> Sequence[Any]:
        header[3] = message.size
        sends = [self._start_send(header, peer, _HEADER_TAG)]
        if message.size:
            sends.append(self._start_send(message, peer, _BODY_TAG))
        return sends

    def _start_send(self, words: Words, peer: int, tag: int) -> Any:
        request = self._comm.Isend([words, self._mpi.INT], dest=peer, tag=tag)
        self._leaving.append((request, words))  # their memory may go only when they are complete
        return request

    def _await_header(self) -> Any:
        return self._comm.Irecv([self._header, self._mpi.INT], self._mpi.ANY_SOURCE, _HEADER_TAG)

    def is_known(self) -> bool:
        return not self._mpi.Is_finalized()

    def progress(self) -> None:
        status = self._mpi.Status()
        while self._next.Test(status):
            # bodies of one source come in the order of their headers
            source, words = status.Get_source(), np.empty(int(self._header[3]), np.int32)
            key = self._key_in(self._header)
            self._next = self._await_header()
            if words.size:
                body = self._comm.Irecv([words, self._mpi.INT], source, _BODY_TAG)
                self._arriving.append((body, source, key, words))
            else:
                self._inbox[key][source] = words
        still = []
        for body, source, key, words in self._arriving:
            if body.Test():
                self._inbox[key][source] = words
            else:
                still.append((body, source, key, words))
        self._arriving = still
        if self._leaving:
            self._leaving = [(request, words) for request, words in self._leaving if not request.Test()]

    def close(self) -> None:
        """Awaits nothing any more: MPI must not end with a message awaited."""
        if self.is_known():
            self._next.Cancel()
            self._next.Wait()


@atexit.register
def _close_all() -> None:
    for pairs in _made:
        with contextlib.suppress(Exception):
            pairs.close()


def mpi_or_reason(hvd: Any) -> tuple[Any, str]:
    """mpi4py's MPI where this rank can use it beside Horovod, which runs on MPI; else None and why not."""
    if not hvd.mpi_threads_supported():
        return None, "MPI does not support several threads"
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        return None, f"mpi4py cannot be imported: {error}"
    world, rank, size = mpi.COMM_WORLD, hvd.rank(), hvd.size()
    if (world.Get_rank(), world.Get_size()) != (rank, size):
        return (
            None,
            f"MPI counts rank {world.Get_rank()} of {world.Get_size()}, Horovod rank {rank} of {size}",
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return None, "MPI was not started for several threads"
    return mpi, ""
