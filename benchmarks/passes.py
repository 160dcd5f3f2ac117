"""`scripts/bench passes`: a sparse `optimizer.step()` beside the same optimizer's own, fused by PyTorch.

All of a pass is timed: fold, selection, weight decay, own moves, the message and its sum, on one rank alone
and one thread, so that nothing waits for a network. The baseline is the fused step, in the same round.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import timing
from benchmarks.common.tables import timings_table
from benchmarks.common.timing import Timing, Work, seconds_by
from horovod_sparse import ddp

#: an optimizer of parameters, and the largest ratio of a pass to its fused step that is allowed
OPTIMIZERS: dict[str, tuple[Any, float]] = {
    "AdamW": (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True), 1.15),
    "SGD": (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True), 1.3),
}
_SCHEDULES = (1, 0), (4, 0), (1, 1)


class _Model:
    """A model of one parameter, whose gradient is a fixed one with noise."""

    def __init__(self, num_elements: int, made: Any) -> None:
        self.net = torch.nn.ParameterList([torch.nn.Parameter(0.02 * torch.randn(num_elements))])
        self.optimizer, self._mean = made(self.net.parameters()), 1e-3 * torch.randn(num_elements)
        self.net[0].grad = torch.empty(num_elements)

    def prepare(self) -> None:
        gradient: Any = self.net[0].grad
        gradient.normal_().mul_(3e-3).add_(self._mean, alpha=0.3)

    def work(self, name: str, budget: float | None = None) -> Work:
        return Work(name, self.optimizer.step, self.prepare, budget)


def passes(name: str, num_elements: int, kept: float, num_rounds: int) -> list[Timing]:
    """Times an optimizer's fused step and its passes at each schedule, in CPU time."""
    made, budget = OPTIMIZERS[name]
    works = []
    for every, delay in _SCHEDULES:
        model = _Model(num_elements, made)
        compression = f"best:density={kept:g}"
        ddp.attach(model.net, compression, model.optimizer, every=every, delay=delay, check_every=0)
        works.append(model.work(f"pass: {name}, every={every}, delay={delay}", budget))
    fused = _Model(num_elements, made).work(f"torch: fused {name}")
    # the first passes fill a residual from nothing: bounds of a selection are learned from those before; all
    # threads count, since ranks select in one of their own
    clock = partial(seconds_by, clock=time.process_time)
    return timing.measure(fused, works, num_rounds, num_warmup=12, seconds=clock)


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bytes_kept(name: str, num_elements: int, kept: float) -> dict[str, float]:
    """Returns bytes per parameter that are kept after 20 steps, beside parameters and gradients."""

    def of(schedule: tuple[int, int] | None) -> float:
        model = _Model(num_elements, OPTIMIZERS[name][0])
        model.prepare()
        before = _resident_bytes()
        if schedule is not None:
            every, delay = schedule
            ddp.attach(model.net, f"best:density={kept:g}", model.optimizer, every=every, delay=delay)
        for _ in range(20):
            model.prepare()
            model.optimizer.step()
        return round((_resident_bytes() - before) / num_elements, 2)

    of(_SCHEDULES[0])  # loads and compiles
    found = {f"{name}, every={every}, delay={delay}": of((every, delay)) for every, delay in _SCHEDULES}
    return {f"torch: fused {name}": of(None), **found}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything that the command line asks for; returns what is written to JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sizes = options.elements, options.density, options.repeat
        timings = [found for name in OPTIMIZERS for found in passes(name, *sizes)]
        memory = {key: n for name in OPTIMIZERS for key, n in bytes_kept(name, *sizes[:2]).items()}
    finally:
        dist.destroy_process_group()
    facts = {"clock": "cpu", "torch": torch.__version__, "bytes_per_parameter": memory}
    return timing.timed(timings, options, **facts)


tables = timings_table


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    return timing.rank_parser("passes", __doc__, 0.01)
