"""One rank of a measurement across hosts: started on every host, with settings and result as files."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import horovod_sparse.torch as hvd
from benchmarks.common.samples import Sample, no_collection, summarize, timed

#: seconds between two looks at a barrier
_NAP = 0.0005


class Measurable:
    """Base class of what `measure_methods` times.

    Attributes:
        name: in results.
        num_warmup: repetitions before those that count.
        parts: seconds of the last repetition, by part.
    """

    name: str
    num_warmup: int
    parts: dict[str, float]

    def prepare(self) -> None:
        """Prepares a repetition; not timed."""

    def run(self) -> None:
        """Runs a repetition; timed."""
        raise NotImplementedError

    def facts(self) -> dict[str, float]:
        """Returns further numbers about the last repetition, by name."""
        return {}


def iterate(optimizer: Any, loss: Callable[[], Any], *, alone: bool = False) -> dict[str, float]:
    """Trains for one step; returns the seconds of its parts.

    Args:
        optimizer: of the front end for Horovod.
        loss: the forward pass.
        alone: the optimizer is one that synchronizes nothing itself.
    """
    clock = time.perf_counter
    started = clock()
    optimizer.zero_grad()
    value = loss()
    forward = clock()
    value.backward()
    backward = clock()
    if not alone:
        optimizer.synchronize()
    synchronized = clock()
    if alone:
        optimizer.step()
    else:
        with optimizer.skip_synchronize():
            optimizer.step()
    return {
        "forward": forward - started,
        "backward": backward - forward,
        "exchange": synchronized - backward,
        "step": clock() - synchronized,
    }


def measure_methods(methods: Sequence[Measurable], repeat: int) -> dict[str, dict[str, Any]]:
    """Times all methods in turn, repetition by repetition, so that drift hits all alike.

    Args:
        methods: the same on all ranks.
        repeat: repetitions that count.

    Returns:
        By method what `summarize` makes of its samples on all ranks.
    """
    samples: dict[str, list[Sample]] = {method.name: [] for method in methods}
    most_warmup = max(method.num_warmup for method in methods)
    with no_collection():
        for number in range(-most_warmup, repeat):
            # another one comes first every time: nobody always follows the same one
            for place in range(len(methods)):
                method = methods[(place + number) % len(methods)]
                if number < -method.num_warmup:
                    continue
                method.prepare()
                sample = timed(method.run, barrier)
                if number >= 0:
                    samples[method.name].append(
                        replace(sample, parts=dict(method.parts), facts=method.facts())
                    )
            say(f"repetition {number + 1} of {repeat}")
    return {
        name: summarize(hvd.allgather_object([asdict(sample) for sample in own]))
        for name, own in samples.items()
    }


def barrier() -> None:
    """Waits for all ranks asleep: Horovod's own barrier polls without a pause.

    Ranks that are done first would take the cores from those that share them and are not.
    """
    handle = hvd.allreduce_async(torch.zeros(1), name="barrier", op=hvd.Sum)
    while not hvd.poll(handle):
        time.sleep(_NAP)
    hvd.synchronize(handle)


def say(line: str) -> None:
    """Prints a line on rank 0, for the process that launched the ranks."""
    if hvd.rank() == 0:
        print(line, flush=True)


def main() -> int:
    """Runs one rank: reads settings, calls a module's `on_rank`, writes the result; started by `Hosts.run`.

    Rank 0 writes what the module's `on_rank` returns.

    Returns:
        The exit code.
    """
    module, asked, answered = sys.argv[1:]
    torch.set_num_threads(1)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    found = importlib.import_module(module).on_rank(json.loads(Path(asked).read_text()))
    if rank == 0:
        Path(answered).write_text(json.dumps({"ranks": size, **found}))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    from benchmarks.common import ranks

    sys.exit(ranks.main())
