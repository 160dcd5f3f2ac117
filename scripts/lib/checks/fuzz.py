#!/usr/bin/env python3
"""Feeds damaged bytes to all that reads what others have written: a named error, or something sound.

scripts/check fuzz [--target wire|profile|text|checkpoint] [--seconds S] [--seed N]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

#: elements of a bucket; and bytes beyond which an input of a few kB has allocated without bound
ELEMENTS, MOST_BYTES = 400, 6 * 2**30


def wire() -> tuple[Callable[[bytes], None], list[bytes]]:
    """Messages of two ranks, in every format; the first byte says which."""
    from horovod_sparse.arrays.protocol import FoldReport
    from horovod_sparse.wire import message
    from horovod_sparse.wire.format import WireFormat

    formats = [WireFormat(), WireFormat(indices="gaps")]
    formats += [WireFormat(values=name) for name in ("float16", "bfloat16")]
    indices = np.array([0, 3, 17, 18, 200, 399], np.int32)
    seeds = []
    for number, how in enumerate(formats):
        values = np.linspace(-1, 1, indices.size, dtype=np.float32)
        words = message.pack(indices, values, FoldReport(), format=how, num_elements=ELEMENTS)
        seeds.append(bytes([number]) + np.concatenate([words, words]).tobytes())

    def read(data: bytes) -> None:
        how = formats[data[0] % len(formats)] if data else formats[0]
        words = np.frombuffer(data[1 : 1 + (len(data) - 1) // 4 * 4] if data else b"", np.int32)
        found = message.unpack_sum(words, 2, how, ELEMENTS, np.float32)
        assert found.indices.size == 0 or 0 <= found.indices.min() <= found.indices.max() < ELEMENTS
        assert found.values is not None and found.values.size == found.indices.size

    return read, seeds


def profile() -> tuple[Callable[[bytes], None], list[bytes]]:
    """Saved measurements."""
    from horovod_sparse.planning.model import Fit
    from horovod_sparse.planning.profile import Profile

    whole = {"collectives": {"allgather": Fit(1e-3, 1e-8, num_points=9), "allreduce": Fit(2e-3, 3e-8)}}
    whole |= {"selection": {"topk": Fit(1e-4, 1e-9, 1e-8)}, "decoding": {"topk": Fit(1e-5, 0.0, 2e-8)}}
    made = Profile(4, "torch", "gloo", 0.001, **whole, backward_seconds={"w": 0.25}, forward_seconds=0.125)
    seeds = [made.to_json().encode()]

    def read(data: bytes) -> None:
        found = Profile.from_json(data.decode(errors="replace"))
        assert Profile.from_json(found.to_json()).digest() == found.digest()

    return read, seeds


def text() -> tuple[Callable[[bytes], None], list[bytes]]:
    """What `Compression.parse` reads."""
    from horovod_sparse.training.compression import recipe_of

    seeds = [b"exdyna:density=0.001", b"topk:density=0.1,feedback=momentum(momentum=0.9,clip_norm=1.0)"]
    seeds += [b"randomk:density=0.3,schedule=exponential(steps=8,start=0.5)", b"none"]

    def read(data: bytes) -> None:
        recipe_of(data.decode(errors="replace"))

    return read, seeds


def checkpoint() -> tuple[Callable[[bytes], None], list[bytes]]:
    """A rank's file, and the entry in it."""
    from horovod_sparse.training.encoding import from_bytes, to_bytes
    from horovod_sparse.training.state import check_entry

    part = {"step": 3, "learning_rate": 0.1, "largest_rate": 0.1, "scale": 1.0, "since": 0, "summed": 1}
    part |= {"leans": [0.0, 0.0], "state": {"step": 3}}
    entry = {"format": 3, "algorithm": "topk", "recipe": "topk:density=0.1", "rank": 0, "size": 2, "step": 3}
    entry |= {"hosts": [], "resized": False}
    entry |= {"plan": {"buckets": [["w"]], "dense": ["b"]}, "companions": [], "feedback": "error"}
    entry |= {"residuals": {"w": np.ones((3, 4), np.float32)}, "buckets": [part]}
    check_entry(copy.deepcopy(entry), None, "{}")

    def read(data: bytes) -> None:
        check_entry(from_bytes(data), None, "{}")

    return read, [to_bytes(entry)]


TARGETS = {"wire": wire, "profile": profile, "text": text, "checkpoint": checkpoint}


def changed(seed: bytes, draw: random.Random) -> bytes:
    """A few bytes flipped, cut, doubled or replaced by telling numbers."""
    data = bytearray(seed)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        how = draw.randrange(5)
        if how == 0 and data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif how == 1:
            del data[at : at + draw.randrange(1, 40)]
        elif how == 2:
            data[at:at] = data[at : at + draw.randrange(1, 40)]
        elif how == 3:
            data[at : at + 4] = draw.choice([-1, 0, 1, 2**31 - 1, -(2**31), ELEMENTS]).to_bytes(
                4, "little", signed=True
            )
        else:
            data[at:at] = draw.choice(
                [b"(", b"[" * 3000, b"1e999", b"NaN", b"null", b'"', b"\xff\xff", b",", b"-"]
            )
    return bytes(data)


def at_random(name: str, seconds: float, seed: int) -> str:
    """Reads changed inputs for so many seconds; says how many of them were sound."""
    from horovod_sparse.errors import HorovodSparseError

    read, seeds = TARGETS[name]()
    for data in seeds:
        read(data)  # what is valid has to be read
    draw, tried, sound, ends = random.Random(seed), 0, 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        data = changed(draw.choice(seeds), draw)
        try:
            with contextlib.suppress(HorovodSparseError):
                read(data)
                sound += 1
        except BaseException:
            print(f"{name}: this input is met by no named error: {data!r}", file=sys.stderr)
            raise
        tried += 1
    return f"{name}: {tried} inputs changed at random, {sound} of them sound, the rest refused by name"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    for name in given.target or sorted(TARGETS):
        print(at_random(name, given.seconds, given.seed))


if __name__ == "__main__":
    main()
