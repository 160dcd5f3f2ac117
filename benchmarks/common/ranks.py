"""One rank of a measurement across hosts: started on every host, with settings and result as files."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import horovod_sparse.torch as hvd
from benchmarks.common.samples import Sample, summarize, timed
from benchmarks.common.wire import Round, wire_bytes

#: seconds of the pause in which Horovod's own traffic is counted
_PAUSE = 0.2
#: seconds between two looks at a barrier
_NAP = 0.0005


class Measurable:
    """What `measure_methods` times.

    Attributes:
        name: in results.
        num_warmup: repetitions before those that count.
        parts: seconds of the last repetition, by part.
    """

    name: str
    num_warmup: int
    parts: dict[str, float]

    def prepare(self) -> None:
        """Before every repetition, not timed."""

    def run(self) -> None:
        """What is timed."""
        raise NotImplementedError

    def rounds(self) -> list[Round]:
        """The collectives of the last repetition, with this rank's payload."""
        return []

    def facts(self) -> dict[str, float]:
        """More numbers of the last repetition."""
        return {}


def iterate(
    optimizer: Any, loss: Callable[[], Any], clip: Callable[[], None] = lambda: None, *, alone: bool = False
) -> dict[str, float]:
    """Trains for one step; returns the seconds of its parts.

    Args:
        optimizer: of the front end for Horovod.
        loss: the forward pass.
        clip: called between synchronization and step.
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
    clip()
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
                    facts = {**method.facts(), **_payload(method)}
                    samples[method.name].append(replace(sample, parts=dict(method.parts), facts=facts))
            say(f"repetition {number + 1} of {repeat}")
    return {name: over_ranks(own) for name, own in samples.items()}


def over_ranks(samples: Sequence[Sample]) -> dict[str, Any]:
    """Summary of the samples of all ranks."""
    return summarize(hvd.allgather_object([asdict(sample) for sample in samples]))


def barrier() -> None:
    """Waits for all ranks asleep: Horovod's own barrier polls without a pause.

    Ranks that are done first would take the cores from those that share them and are not.
    """
    handle = hvd.allreduce_async(torch.zeros(1), name="barrier", op=hvd.Sum)
    while not hvd.poll(handle):
        time.sleep(_NAP)
    hvd.synchronize(handle)


def _payload(method: Measurable) -> dict[str, float]:
    """Payload by round: numbers that can be averaged over ranks."""
    return {f"payload.{number}.{item.kind}": item.payload for number, item in enumerate(method.rounds())}


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
        found[name] = over_ranks([timed(work, barrier) for _ in range(repeat)])
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


def results_of(methods: Sequence[Measurable], repeat: int) -> dict[str, Any]:
    """Measures all methods beside Horovod's own traffic.

    Args:
        methods: the same on all ranks.
        repeat: repetitions that count.
    """
    own, results = own_traffic(10), []
    for name, result in measure_methods(methods, repeat).items():
        result["bytes"] = expected_bytes(result, own, hvd.size())
        result["facts"] = {k: v for k, v in result["facts"].items() if not k.startswith("payload.")}
        results.append({"method": name, **result})
    return {"horovod_own": own, "results": results}


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


def start_torch_distributed() -> None:
    """Makes ranks that Horovod has launched over Gloo ranks of torch.distributed, over the same interface."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ["HOROVOD_GLOO_IFACE"])
    address = f"tcp://{os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:29417"
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=address, rank=hvd.rank(), world_size=hvd.size())


def main() -> int:
    """A rank's whole life: `Hosts.run` says the module, and files of its settings and its result.

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
