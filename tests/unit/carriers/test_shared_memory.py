"""Memory that the ranks of a host share: the same bits as by messages, and nothing of it is left behind."""

import errno
import gc
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from horovod_sparse.arrays import GradientParts, HostAccumulator, SummedParts
from horovod_sparse.carriers import shared_memory
from horovod_sparse.carriers.shared_memory import Arena, agreed_memory, lends, seen
from horovod_sparse.errors import MessageError
from horovod_sparse.feedback import TwoLevelBucket, recipe, shard_of
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.topology import Topology
from support.sampling import rows_by

#: as kernels and NumPy know them
DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": np.uint16}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(shared_memory, "_said", set())


def num_held(what="/memfd:horovod_sparse", pid="self"):
    """Mappings and descriptors that a process has: of arenas, or of files of /dev/shm."""
    gc.collect()
    mapped = Path(f"/proc/{pid}/maps").read_text().count(what)
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return mapped + sum(what in link for link in links)


def part_of(whole, topology, lent, made="topk"):
    """A part as front ends have it, and the memory that it lends."""
    chosen = recipe(made, density=0.2)
    accumulator = HostAccumulator(shard_of(whole, topology).num_elements, whole.dtype, density=0.2)
    bucket = TwoLevelBucket(whole, chosen, accumulator, (), topology)
    itemsize = np.dtype(DTYPES[whole.dtype]).itemsize
    arena = Arena([whole.num_elements * itemsize]) if lent else None
    return SimpleNamespace(bucket=bucket, lends=(arena, arena.take()) if arena else None, on_host=True)


def parts_for(n, topology, dtype="float32", lent=False):
    wholes = [BucketInfo("w", n, rank, topology.size, dtype) for rank in range(topology.size)]
    return [part_of(whole, topology, lent) for whole in wholes]


def agree(parts, topology):
    ranks = [agreed_memory([part], rank, topology) for rank, part in enumerate(parts)]
    return run_lockstep(ranks, topology=topology)


def gradient_of(rank, step, n, dtype, part):
    values = np.random.default_rng([rank, step]).standard_normal(n).astype(np.float32)
    kind = DTYPES[dtype]
    given = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(kind)
    if part.lends is None:
        return GradientParts([given])
    memory = part.lends[0].region(part.lends[1]).view(kind)
    memory[:] = given
    return GradientParts([memory])


def run(parts, topology, n, dtype, steps=3):
    """Sums of all steps, and residuals."""
    found = []
    for step in range(steps):
        gradients = [gradient_of(rank, step, n, dtype, part) for rank, part in enumerate(parts)]
        coroutines = [part.bucket.step(one, 0.5) for part, one in zip(parts, gradients, strict=True)]
        for sum_ in run_lockstep(coroutines, topology=topology):
            found += [sum_.indices, sum_.values]
    return [*found, *(part.bucket.accumulator.values() for part in parts)]


#: hosts, ranks of each, n
_SHAPES = [(2, 2, 1001), (1, 3, 301), (2, 3, 2), (2, 2, 300_007), (1, 3, 30_007)]


@rows_by("shape,dtype,lent", _SHAPES, DTYPES, [True, False], each=2)
def test_the_same_bits_as_by_messages(shape, dtype, lent):
    hosts, each, n = shape
    topology = Topology.regular(hosts, each)
    plain, sharing = parts_for(n, topology, dtype), parts_for(n, topology, dtype, lent)
    assert all("memory that its ranks share" in words for words in agree(sharing, topology))
    assert lends(sharing) and not lends(plain)
    for one, other in zip(run(plain, topology, n, dtype), run(sharing, topology, n, dtype), strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("lent", [True, False], ids=["lent", "copied"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_what_is_not_finite_is_dropped_by_the_whole_host(bad, lent):
    """Also where only the sum of a host is not, and from the parts that others have in their memory."""
    topology, n, found = Topology.regular(2, 2), 1001, []
    for sharing in (False, True):
        parts = parts_for(n, topology, lent=lent)
        if sharing:
            agree(parts, topology)
        run(parts, topology, n, "float32", steps=1)
        gradients = [gradient_of(rank, 1, n, "float32", part) for rank, part in enumerate(parts)]
        for rank in (2, 3):
            gradients[rank]._flat[0][700] = bad
        steps = [part.bucket.step(one, 0.5) for part, one in zip(parts, gradients, strict=True)]
        errors = run_lockstep(steps, topology=topology, keep_errors=True)
        assert all(set(error.where) == {2, 3} for error in errors)
        for rank, part in enumerate(parts):
            part.bucket.abandon(drop=rank in (2, 3))
        found.append([part.bucket.accumulator.values().copy() for part in parts])
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("num", [2, 3, 4])
def test_a_fold_of_several_arrays_is_that_of_their_sum(num):
    """In blocks, and what is left of them; with factors that are all different."""
    n, factors = 12_345, np.array([0.5, 0.1, 3.0, 0.7][:num], np.float32)
    arrays = [np.random.default_rng(one).standard_normal(n).astype(np.float32) for one in range(num)]
    total = factors[0] * arrays[0]
    for factor, array in zip(factors[1:], arrays[1:], strict=True):
        total = total + factor * array
    folded, wanted = (HostAccumulator(n, density=0.2) for _ in range(2))
    report = folded.fold(SummedParts(arrays, factors.tolist(), n, np.float32))
    assert report == wanted.fold(GradientParts([total]))
    assert np.array_equal(folded.values(), wanted.values())
    assert np.array_equal(folded.largest(2000), wanted.largest(2000))


def test_a_settled_sum_stays_when_others_write():
    arrays = [np.arange(5, dtype=np.float32), np.ones(5, np.float32)]
    parts = SummedParts(arrays, [1.0, 1.0], 6, np.float32)
    parts.settle()
    arrays[0][:] = 0
    assert np.concatenate([piece.copy() for _, piece in parts.pieces(4, 2)]).tolist() == [1, 2, 3, 4, 5, 0]


def test_one_rank_without_memory_and_all_send_messages(monkeypatch, caplog):
    """As in a container with too little of it: an error when memory is taken, no signal later."""
    topology, made = Topology.regular(2, 2), []

    def populate(memory, descriptor, size):
        made.append(size)
        if len(made) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_memory, "_populate", populate)
    before, parts = num_held(), parts_for(1001, topology)
    with caplog.at_level(logging.INFO, "horovod_sparse"):
        for _ in range(2):
            made.clear()
            words = agree(parts, topology)
    assert len(set(words)) == 1 and os.strerror(errno.ENOSPC) in words[0] and "ranks [2]" in words[0]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not lends(parts) and num_held() == before
    run(parts, topology, 1001, "float32")


@pytest.mark.parametrize("lent", [True, False], ids=["lent", "copied"])
def test_nothing_is_left(lent):
    """Of a training that is over, and of memory that another agreement has replaced."""
    topology = Topology.regular(1, 3)
    before, files = num_held(), num_held("/dev/shm/")
    parts = parts_for(1001, topology, lent=lent)
    agree(parts, topology)
    held = num_held()
    assert held > before
    for _ in range(3):
        agree(parts, topology)
        run(parts, topology, 1001, "float32", steps=1)
    assert num_held() == held and num_held("/dev/shm/") == files
    del parts
    assert num_held() == before


_OTHER = """
import sys, time
from horovod_sparse.carriers.shared_memory import Arena
arena = Arena([100, 8])
arena.region(1)[:] = 7
print(*arena.where, flush=True)
time.sleep(600)
"""


def test_a_process_that_is_killed_leaves_nothing_and_harms_nobody():
    other = subprocess.Popen([sys.executable, "-c", _OTHER], stdout=subprocess.PIPE, text=True)
    try:
        pid, descriptor, size, token = other.stdout.readline().split()
        where = int(pid), int(descriptor), int(size), token
        memory, layout = seen(*where), Arena([100, 8])
        assert num_held("/dev/shm/", pid) == 0, "what is no file cannot stay behind"
        assert layout.region(1, memory).tolist() == [7] * 8 and not memory.flags.writeable
        for wrong in ((where[0], 0, *where[2:]), (*where[:2], where[2] + 1, token), (*where[:3], "00" * 16)):
            with pytest.raises(OSError):
                seen(*wrong)
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert layout.region(1, memory).tolist() == [7] * 8, "what is mapped stays"
    with pytest.raises(OSError):
        seen(*where)


def test_nobody_can_take_memory_away():
    arena = Arena([1 << 16])
    for size in (0, 1 << 20):
        with pytest.raises(OSError):
            os.ftruncate(arena.descriptor, size)


def test_ranks_that_do_not_see_each_other_send_messages(monkeypatch, caplog):
    """As in containers of their own: the process has another number there."""
    topology = Topology.regular(1, 2)
    monkeypatch.setattr(shared_memory.os, "getpid", lambda: os.getppid())
    parts = parts_for(100, topology)
    words = agree(parts, topology)
    assert "the memory of rank 0 cannot be seen" in words[0] and not lends(parts)


def two_of_a_host(n=50, **more):
    topology = Topology.regular(1, 2)
    parts = parts_for(n, topology, **more)
    agree(parts, topology)
    return parts, [part.bucket.shared for part in parts]


def test_factors_are_of_gradients_and_sums_of_copies_stay():
    """When others write their next ones."""
    parts, (one, other) = two_of_a_host()
    one.factor, other.factor = 0.5, 0.1
    given = [gradient_of(rank, 0, 50, "float32", parts[0]) for rank in (0, 1)]
    first, second = (gradient.joined(np.dtype(np.float32)) for gradient in given)
    total = one.summed(np.concatenate([one.offer(given[0]), other.offer(given[1])]), (10, 35), 26)
    other.offer(gradient_of(1, 1, 50, "float32", parts[0]))
    wanted = (first * np.float32(0.5) + second * np.float32(0.1))[10:35]
    assert np.array_equal(total.joined(np.dtype(np.float32)), np.append(wanted, np.float32(0)))


def test_what_no_rank_should_have_offered_is_an_error_by_name():
    """A task that has failed answers a round with nothing; its mates got a ValueError of zip."""
    parts, (shared, _) = two_of_a_host()
    words = shared.offer(gradient_of(0, 0, 50, "float32", parts[0]))
    with pytest.raises(MessageError, match="failed alone"):
        shared.summed(words, (0, 25), 25)
    with pytest.raises(MessageError, match="no known type"):
        shared.summed(np.concatenate([words, [99, 0, 0]]), (0, 25), 25)
    _, (lent, _) = two_of_a_host(8, lent=True)
    with pytest.raises(RuntimeError, match="lent"):
        lent.offer(GradientParts([np.zeros(8, np.float32)]))  # which has moved
