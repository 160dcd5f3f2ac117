"""Seconds until a GPT with AdamW has dense training's loss on four emulated hosts, by bandwidth and latency.

A method's curve of losses does not depend on the network: it is measured once, at each method's best rate.
Seconds of a step are measured in every network, all methods in one launch.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from gpt import parameter_groups
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse.torch as hvd
from benchmarks.common.hosts import cluster_for
from benchmarks.studies.adamw import rate_at
from benchmarks.studies.passes import SETTING
from benchmarks.studies.study import Result, Study, markdown, rounded
from benchmarks.studies.tasks import Task, gpt_task
from horovod_sparse import ddp

SIZE, STEPS, MOST, DENSE, ALONE = 4, 600, 1000, "dense", "alone"
BEST = "best:density=0.003,values=2bit,indices=gaps"
#: of a host, and of a message, one way
RATES, LATENCIES = ("10mbit", "100mbit", "1gbit", "10gbit"), ("0ms", "20ms", "100ms")
#: steps whose mean is a point of a curve; points whose mean is a loss; bits that seeds and batches make
POINT, WINDOW, NOISE = 10, 6, 0.02


class Method(NamedTuple):
    """What is sent, arguments of `attach` or `LocalSteps`, rates that are tried, steps."""

    text: str
    options: Mapping[str, Any]
    rates: Sequence[float]
    steps: int = STEPS


_OUTER = ddp.OuterStep(lr=1.5)
#: of `best`: every and delay, rates, and how many times the steps
_LOW, _HIGH = (3.75e-4, 7.5e-4, 1.5e-3), (1.5e-3, 3e-3, 6e-3)
_MIDDLE = (7.5e-4, 1.5e-3, 3e-3)
_SCHEDULES = {(1, 0): (_HIGH, 1), (1, 1): (_HIGH, 1), (1, 2): ((*_MIDDLE, 6e-3), 2), (4, 1): (_MIDDLE, 2)}
_SCHEDULES |= {(15, 1): (_LOW, 3)}
METHODS = {
    DENSE: Method("", {}, (7.5e-4, 1.5e-3, 3e-3, 6e-3)),
    "fp16": Method("fp16", {}, ()),  # has dense's curve
    "PowerSGD of rank 4": Method("powersgd", {}, _HIGH, 2 * STEPS),
    "DiLoCo, every=30": Method("", {"every": 30, "outer": "nesterov"}, (*_LOW, 3e-3), 3 * STEPS),
    "SparseLoCo, every=30": Method("sparseloco", {"every": 30, "outer": _OUTER}, (*_LOW, 3e-3), 3 * STEPS),
    **{
        f"best, every={every}, delay={delay}": Method(
            BEST, {"every": every, "delay": delay}, rates, longer * STEPS
        )
        for (every, delay), (rates, longer) in _SCHEDULES.items()
    },
}


@functools.cache
def _task() -> Task:
    return gpt_task(layers=4, width=128, batch_size=2, length=64)


def _synchronized(name: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    """Has a model synchronized by a method; returns what `finish` ends, None for a hook."""
    text, options, *_ = METHODS[name]
    if text == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    elif text == "powersgd":  # from the earliest step that it can
        model.register_comm_hook(PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook)
    elif "outer" in options:
        return ddp.LocalSteps(optimizer, model, compression=text or None, **options)
    elif text:
        return ddp.attach(model, text, optimizer, **options)
    return None


def _training(name: str, num_steps: int, rates: Iterable[float]) -> Generator[float, None, None]:
    """Losses on this rank, a step each, from the common start."""
    torch.manual_seed(0)
    net = _task().make_model()
    # over Gloo PowerSGD's collectives of several buckets get out of order
    bucket = 1024 if "PowerSGD" in name else None
    model = DistributedDataParallel(net, bucket_cap_mb=bucket, init_sync=False)
    parts = parameter_groups(net.parameters(), SETTING["weight_decay"])
    optimizer = torch.optim.AdamW(parts, betas=(0.9, SETTING["beta2"]), fused=True)
    model.require_backward_grad_sync = name != ALONE
    sync = None if name == ALONE else _synchronized(name, model, optimizer)
    try:
        for batch, rate in zip(_task().batches(dist.get_rank(), SIZE, num_steps, 0), rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = _task().loss(model, *batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), SETTING["clip_norm"])
            optimizer.step()
            optimizer.zero_grad()
            yield float(loss.detach())
    finally:
        if sync is not None:
            sync.finish()


def _means(values: list[float]) -> np.ndarray:
    """Means over ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.numpy() / SIZE


def _curve(name: str, rate: float) -> Result:
    """Bits per byte of every `POINT` steps, with batches that are new to the model."""
    num_steps = METHODS[name].steps
    setting = {**SETTING, "num_steps": num_steps}
    rates = [rate_at(step, rate, setting) for step in range(num_steps)]
    bits = _means([*_training(name, num_steps, rates)]).reshape(-1, POINT).mean(1) / math.log(2)
    return {"bits": rounded(bits)}


def _speed(name: str) -> tuple[float, float, int]:
    """Median seconds of a step, over whole rounds, the bytes that leave a host in it, and the rounds."""
    options = METHODS.get(name, METHODS[DENSE]).options
    every, delay = int(options.get("every", 1)), int(options.get("delay", 0))
    training = _training(name, MOST, [1e-4] * MOST)
    sent = Path("/sys/class/net/eth0/statistics/tx_bytes")

    def seconds_of_round() -> float:
        started = time.perf_counter()
        for _ in range(every):
            next(training)
        return time.perf_counter() - started

    # PowerSGD's first steps are dense, too, and ranks of `best` agree in theirs
    for _ in range((2 if name in (DENSE, "fp16") else 3 if every < 15 else 1) + delay):
        first = seconds_of_round()
    num_rounds = torch.tensor(max(2, min(-(-20 // every), round(3 / first))))
    dist.broadcast(num_rounds, 0)
    count, before = int(num_rounds), int(sent.read_text())
    seconds = [seconds_of_round() for _ in range(count)]
    bytes_sent = (int(sent.read_text()) - before) / count / every
    training.close()
    return statistics.median(seconds) / every, bytes_sent, count


def on_rank(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures a curve, or the speed of all methods; called on every rank."""
    # ranks that Horovod has launched over Gloo, over the same interface
    os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ["HOROVOD_GLOO_IFACE"])
    address = f"tcp://{os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:29417"
    dist.init_process_group("gloo", init_method=address, rank=hvd.rank(), world_size=hvd.size())
    hvd.shutdown()  # its thread looks for work all the time
    if "curve" in settings:
        return _curve(settings["curve"], settings["rate"])
    found = {name: _speed(name) for name in (ALONE, *METHODS)}
    means = _means([one for speed in found.values() for one in speed]).reshape(-1, 3)
    return {
        name: {"seconds": float(f"{seconds:.4g}"), "bytes": round(num_bytes), "rounds": round(rounds)}
        for name, (seconds, num_bytes, rounds) in zip(found, means, strict=True)
    }


def measure(name: str) -> Result:
    """Launches ranks on hosts: a training, or all methods in a network."""
    rate, latency, settings = "unlimited", "0ms", dict[str, Any]()
    if name.startswith("curve/"):
        _, method, learning_rate = name.split("/")
        settings = {"curve": method, "rate": float(learning_rate.removeprefix("rate "))}
    else:
        rate, latency = name.split(", ")
    with cluster_for(SIZE, rate, latency) as hosts:
        found: Result = hosts.run(__name__, settings, num_ranks=SIZE, on_progress=print)
    return {key: value for key, value in found.items() if key != "ranks"}


def names() -> list[str]:
    """Returns the names of all curves, then of all networks."""
    curves = [f"curve/{name}/rate {rate:g}" for name, method in METHODS.items() for rate in method.rates]
    return [*curves, *(f"{rate}, {latency}" for latency in LATENCIES for rate in RATES)]


class Curve(NamedTuple):
    """A method at the best of its rates: means of `WINDOW` points in a row, steps to dense's last loss."""

    rate: float
    bits: np.ndarray
    steps: float


def curves(runs: Result) -> dict[str, Curve]:
    """Returns the measured curves by method, dense's first."""
    found: dict[str, Curve] = {}
    for name, method in METHODS.items():
        tried = []
        for rate in method.rates:
            if run := runs.get(f"curve/{name}/rate {rate:g}"):
                points = np.array([math.inf if one is None else one for one in run["bits"]])
                tried.append((rate, np.convolve(points, np.full(WINDOW, 1 / WINDOW), "valid")))
        if tried:
            rate, bits = min(tried, key=lambda one: float(one[1][-1]))
            target = float(found[DENSE].bits[-1] if found else bits[-1]) + NOISE
            there = np.flatnonzero(bits <= target)
            found[name] = Curve(rate, bits, POINT * (there[0] + WINDOW) if there.size else math.inf)
        elif not method.rates:
            found[name] = found[DENSE]
    return found


def seconds_to_dense(runs: Result) -> dict[str, dict[str, float]]:
    """Returns the seconds until dense training's last loss, by network and method."""
    steps = {name: curve.steps for name, curve in curves(runs).items()}
    networks = [name for name in names() if name in runs and not name.startswith("curve/")]
    return {
        network: {
            name: steps[name] * speed["seconds"] for name, speed in runs[network].items() if name in steps
        }
        for network in networks
    }


def best_of(seconds: Mapping[str, float]) -> tuple[str, str]:
    """Returns the fastest method with `best`, and the fastest without."""
    own = [name for name in seconds if name.startswith("best")]
    return min(own, key=seconds.__getitem__), min(seconds.keys() - own, key=seconds.__getitem__)


def by_network(result: Result) -> str:
    """Returns a table, a row per network: the fastest with `best` and without, dense, computing's share."""
    runs, rows = result["runs"], []
    found = seconds_to_dense(runs)
    # no network slows it; where ranks drift apart fewer share the cores
    alone = statistics.median(runs[network][ALONE]["seconds"] for network in found)
    for network, seconds in found.items():
        own, other = best_of(seconds)
        speed = {name: run["seconds"] for name, run in runs[network].items()}
        unhindered = min(runs[one][own]["seconds"] for one in found if own in runs[one])
        rows.append(
            [
                network,
                *(f"{name}: {seconds[name]:,.0f}" for name in (own, other)),
                f"{seconds[DENSE]:,.0f}",
                f"{seconds[DENSE] / seconds[own]:.1f}x",
                f"{alone / speed[own]:.0%}, {unhindered / speed[own]:.0%}",
            ]
        )
    head = [
        "seconds to dense's loss",
        "`best`",
        "the fastest other",
        "dense",
        "sooner than dense",
        "computing",
    ]
    return markdown(head, rows)


def table(result: Result) -> str:
    """Returns tables with a row per method: its curve, then its seconds in every network."""
    runs = result["runs"]
    found, seconds = curves(runs), seconds_to_dense(runs)
    dense, rows, times = float(found[DENSE].bits[-1]), [], []
    for name, (rate, bits, steps) in found.items():
        others = [f"{other:g}" for other in METHODS[name].rates if other != rate]
        tried = ", ".join(other for other in others if f"curve/{name}/rate {other}" in runs)
        last = [f"{bits[-1]:.3f}", f"{bits[-1] - dense:+.3f}"]
        there = [network for network in seconds if name in seconds[network]]
        sent = [statistics.fmean(runs[network][one]["bytes"] for network in there) for one in (DENSE, name)]
        row = [name, f"{rate:g}", tried, f"{METHODS[name].steps:,}", *last, f"{steps:,.0f}"]
        row += [f"{sent[1] / 1e3:,.1f}", f"{sent[0] / sent[1]:,.0f}"]
        rows.append([word.replace("inf", "never") for word in row])
        milliseconds = {network: f"{1e3 * runs[network][name]['seconds']:,.0f}" for network in there}
        cells = (
            f"{seconds[one][name]:,.0f} ({milliseconds[one]})" if one in there else "" for one in seconds
        )
        times.append([name, *(cell.replace("inf", "never") for cell in cells)])
    head = ["AdamW", "rate", "worse", "steps", "bits", "to dense", "steps to it", "kB per step", "fewer"]
    words = "Seconds to dense's loss (milliseconds of a step):"
    tables = [markdown(head, rows), words, markdown(["AdamW", *seconds], times), by_network(result)]
    return "\n\n".join(tables)


STUDY = Study("networks", names, measure, table, facts={"setting": SETTING})
