"""One rank of a measurement across hosts: started on every host, with settings and result as files."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

import horovod_sparse.torch as hvd
from benchmarks.common.samples import Sample, plain, summarize, timed
from benchmarks.common.wire import Round, wire_bytes


class Measurable(Protocol):
    """What `measure_methods` times; see `Method`, where its attributes are described."""

    name: str
    num_warmup: int
    parts: dict[str, float]

    def prepare(self) -> None:
        """Before every repetition, not timed."""

    def run(self) -> None:
        """What is timed."""

    def rounds(self) -> list[Round]:
        """The collectives of the last repetition."""

    def facts(self) -> dict[str, float]:
        """More numbers of the last repetition."""


#: seconds of the pause in which Horovod's own traffic is counted
_PAUSE = 0.2
#: seconds between two looks at a barrier
_NAP = 0.0005


def measure_methods(
    methods: Sequence[Measurable], repeat: int, on_progress: Callable[[str], None]
) -> dict[str, list[Sample]]:
    """Times all methods in turn, repetition by repetition, so that drift hits all alike.

    Args:
        methods: the same on all ranks.
        repeat: repetitions that count.
        on_progress: gets a line per synchronization.

    Returns:
        By method, a sample per repetition.
    """
    samples: dict[str, list[Sample]] = {method.name: [] for method in methods}
    most_warmup = max(method.num_warmup for method in methods)
    for number in range(-most_warmup, repeat):
        # another one comes first every time: nobody always follows the same one
        for place in range(len(methods)):
            method = methods[(place + number) % len(methods)]
            if number < -method.num_warmup:
                continue
            method.prepare()
            sample = timed(method.run, barrier)
            on_progress(f"{method.name} {number}")
            if number >= 0:
                samples[method.name].append(replace(sample, parts=dict(method.parts), facts=_facts(method)))
    return samples


def barrier() -> None:
    """Waits for all ranks asleep: Horovod's own barrier polls without a pause.

    Ranks that are done first would take the cores from those that share them and are not.
    """
    handle = hvd.allreduce_async(torch.zeros(1), name="barrier", op=hvd.Sum)
    while not hvd.poll(handle):
        time.sleep(_NAP)
    hvd.synchronize(handle)


def _facts(method: Measurable) -> dict[str, float]:
    """Densities, and payload by round: numbers that can be averaged over ranks."""
    rounds = {f"payload.{number}.{item.kind}": item.payload for number, item in enumerate(method.rounds())}
    return {**method.facts(), **rounds}


def own_traffic(repeat: int) -> dict[str, float]:
    """What Horovod sends by itself: for a barrier, and per second of waiting.

    Args:
        repeat: how often each is measured.
    """
    works: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "pause": lambda: time.sleep(_PAUSE),
    }
    found = {}
    for name, work in works.items():
        work()
        everyone = hvd.allgather_object([plain(timed(work, barrier)) for _ in range(repeat)])
        found[name] = summarize(everyone)
    nothing, pause = found["nothing"], found["pause"]
    longer = pause["interval_seconds"] - nothing["interval_seconds"]
    return {
        "barrier_bytes": nothing["bytes_sent"],
        "barrier_seconds": nothing["interval_seconds"],
        "idle_bytes_per_second": (pause["bytes_sent"] - nothing["bytes_sent"]) / longer,
        "idle_cpu_share": (pause["cpu_seconds"]["median"] - nothing["cpu_seconds"]["median"]) / longer,
    }


def expected_bytes(result: dict[str, Any], own: dict[str, float], size: int) -> dict[str, float]:
    """What the interface should have counted for a step: payload by formulas, and Horovod's own traffic.

    Horovod negotiates in every cycle, also while a rank computes, so its traffic grows with time.
    """
    payload = {name: value for name, value in result["facts"].items() if name.startswith("payload.")}
    rounds = [Round(name.split(".")[2], round(value)) for name, value in payload.items()]
    waited = max(0.0, result["interval_seconds"] - own["barrier_seconds"])
    negotiation = own["barrier_bytes"] + own["idle_bytes_per_second"] * waited
    return {"wire_bytes": wire_bytes(rounds, size), "negotiation_bytes": negotiation}


def results_of(methods: Sequence[Measurable], repeat: int, own: dict[str, float]) -> list[dict[str, Any]]:
    """Measures all methods, and sums up over ranks.

    Args:
        methods: the same on all ranks.
        repeat: repetitions that count.
        own: as `own_traffic` found it.
    """
    with no_collection():
        samples = measure_methods(methods, repeat, lambda line: say(f"done {line}"))
    results = []
    for method in methods:
        result = summarize(hvd.allgather_object([plain(sample) for sample in samples[method.name]]))
        result["bytes"] = expected_bytes(result, own, hvd.size())
        result["facts"] = {k: v for k, v in result["facts"].items() if not k.startswith("payload.")}
        results.append({"method": method.name, **result})
    return results


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the garbage collector out of what is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def say(line: str) -> None:
    """A line for whoever has started the ranks, from rank 0."""
    if hvd.rank() == 0:
        print(line, flush=True)


def main(measure: Callable[[dict[str, Any]], Mapping[str, Any]]) -> int:
    """A rank's whole life; rank 0 writes the result.

    Args:
        measure: gets the settings and gives plain values.

    Returns:
        The exit code.
    """
    asked, answered = map(Path, sys.argv[1:])
    settings = json.loads(asked.read_text())
    torch.set_num_threads(1)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    found = measure(settings)
    if rank == 0:
        answered.write_text(json.dumps({"ranks": size, **found}))
    hvd.shutdown()
    return 0
