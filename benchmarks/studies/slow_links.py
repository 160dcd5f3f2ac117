"""Seconds until a small GPT with AdamW has dense training's loss over slow links, on emulated hosts.

All methods see the same batches and rates; loss and seconds are of
every step, as means over ranks.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse.torch as hvd
from benchmarks.common.hosts import cluster_for
from benchmarks.studies.adamw import groups, rate_at
from benchmarks.studies.study import Result, Study, markdown
from benchmarks.studies.tasks import gpt_task
from horovod_sparse import ddp

DENSE, POWER = "dense", "PowerSGD of rank 4"
LOCAL, LATE = "30 local steps, sparseloco", "the same, 5 steps late"
#: of every rank 2 pieces of so many bytes in a step
LENGTH, PIECES, EVERY, NUM_WARMUP = 64, 2, 30, 33
SETTING = {"warmup": 0.1, "weight_decay": 0.1, "clip_norm": 1.0, "beta2": 0.99, "rate": 3e-3}
#: the last part of the steps, whose mean is the loss to reach; bits by which seeds and batches move it
LAST, NOISE = 0.1, 0.02


class Local(NamedTuple):
    """Local steps: the exchange's delay in steps, the inner rate, and how many times a cell's steps."""

    delay: int
    rate: float = 1.5e-3
    longer: int = 3


class Cell(NamedTuple):
    """Hosts, the rate of links, steps; a GPT's layers and width; by method what ranks make of it."""

    size: int
    rate: str
    steps: int
    layers: int
    width: int
    methods: Mapping[str, str | Local]


_BOTH: dict[str, str | Local] = {DENSE: "", POWER: "powersgd"}
_SHORT = "best:density=0.003,values=2bit,indices=gaps"
CELLS = {
    "2 hosts, 1 Gbit/s": Cell(2, "1gbit", 1500, 2, 192, {**_BOTH, "best, 1 %": "best:density=0.01"}),
    "2 hosts, 100 Mbit/s": Cell(2, "100mbit", 1500, 2, 192, {**_BOTH, "best, 0.3 %, 2 bits": _SHORT}),
    "4 hosts, 100 Mbit/s": Cell(
        4, "100mbit", 3000, 4, 128, {DENSE: "", LOCAL: Local(0), LATE: Local(5, longer=1)}
    ),
}


def train(cell: Cell, method: str | Local, num_steps: int) -> dict[str, Any]:
    """One training by a method on this rank."""
    torch.manual_seed(0)
    task = gpt_task(cell.layers, cell.width, PIECES, LENGTH)
    net = task.make_model()
    # over Gloo PowerSGD's collectives of several buckets get out of order
    model = DistributedDataParallel(net, bucket_cap_mb=1024 if method == "powersgd" else None)
    parts = groups(list(net.parameters()), SETTING)
    optimizer = torch.optim.AdamW(parts, betas=(0.9, SETTING["beta2"]), fused=True)
    local, top_rate = None, SETTING["rate"]
    if method == "powersgd":  # from the earliest step that it can
        model.register_comm_hook(PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook)
    elif isinstance(method, Local):
        outer, top_rate = ddp.OuterStep(lr=1.5), method.rate
        local = ddp.LocalSteps(
            optimizer, model, every=EVERY, compression="sparseloco", outer=outer, delay=method.delay
        )
    elif method:
        ddp.attach(model, method, optimizer)
    rank, size, clock = dist.get_rank(), dist.get_world_size(), time.perf_counter
    setting, batches = {**SETTING, "num_steps": num_steps}, task.batches(rank, size, num_steps, 0)
    sent, found = Path("/sys/class/net/eth0/statistics/tx_bytes"), []
    dist.barrier()
    before, started = int(sent.read_text()), clock()
    ended = started
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, top_rate, setting)
        loss = task.loss(model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), SETTING["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        began, ended = ended, clock()
        found.append([float(loss.detach()) / math.log(2), ended - began])
    computing = 0.0 if local is None else 1.0 - local.seconds_held_up / (ended - started)
    told = torch.tensor([computing, int(sent.read_text()) - before])
    both = torch.tensor(found)
    for one in (told, both):
        dist.all_reduce(one)
        one /= size
    bits, seconds = ([float(f"{value:.4g}") for value in column] for column in both.T.tolist())
    run = {"bits": bits, "seconds": seconds, "bytes_per_step": round(float(told[1]) / num_steps)}
    return run if local is None else {**run, "share_computing": round(float(told[0]), 4)}


def on_rank(settings: dict[str, Any]) -> dict[str, Any]:
    """One training, after a short one in which everything is compiled and allocated."""
    # ranks that Horovod has launched over Gloo, over the same interface
    os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ["HOROVOD_GLOO_IFACE"])
    address = f"tcp://{os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:29417"
    dist.init_process_group("gloo", init_method=address, rank=hvd.rank(), world_size=hvd.size())
    hvd.shutdown()  # its thread looks for work all the time
    cell = CELLS[settings["cell"]]
    method = cell.methods[settings["method"]]
    longer = method.longer if isinstance(method, Local) else 1
    return [train(cell, method, num_steps) for num_steps in (NUM_WARMUP, longer * cell.steps)][1]


def measure(name: str) -> Result:
    """Launches a training on hosts."""
    cell, _, method = name.rpartition("/")
    size, rate, *_ = CELLS[cell]
    with cluster_for(size, rate, "links") as hosts:
        settings = {"cell": cell, "method": method}
        found: Result = hosts.run("benchmarks.studies.slow_links", settings, num_ranks=size)
    return {key: value for key, value in found.items() if key != "ranks"}


def seconds_of(run: Mapping[str, Any]) -> np.ndarray:
    """Of every `EVERY` steps."""
    seconds = np.array(run.get("sample", run)["seconds"])
    return seconds[: len(seconds) // EVERY * EVERY].reshape(-1, EVERY).sum(1)


def clock_of(run: Mapping[str, Any]) -> np.ndarray:
    """Seconds at the end of every step: its number times the median of `EVERY` steps in a row."""
    return np.arange(1, 1 + len(run["bits"])) * float(np.median(seconds_of(run))) / EVERY


def smooth(run: Mapping[str, Any]) -> np.ndarray:
    """Mean bits of the `LAST` part of all steps, up to each step that has so many before it."""
    window = round(LAST * len(run["bits"]))
    return np.convolve(run["bits"], np.full(window, 1 / window), "valid")


def seconds_to(run: Mapping[str, Any], target: float) -> float:
    """Until the smooth loss is at or below the target; infinite if it never is."""
    bits = smooth(run)
    there = np.flatnonzero(bits <= target)
    return float(clock_of(run)[len(run["bits"]) - len(bits) + there[0]]) if there.size else math.inf


def share_computing(run: Mapping[str, Any]) -> float:
    """From outside: what a step with an exchange takes longer than the median of others is not computing."""
    seconds = np.array(run.get("sample", run)["seconds"])
    exchanges = np.arange(1, 1 + len(seconds)) % EVERY == 0
    held_up = seconds[exchanges] - np.median(seconds[~exchanges])
    return float(1 - held_up.sum() / seconds.sum())


def measured(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Runs by cell and method, of cells whose dense training is there."""
    runs = result["runs"]
    found = {cell: {name: runs.get(f"{cell}/{name}") for name in CELLS[cell].methods} for cell in CELLS}
    return {cell: {n: run for n, run in some.items() if run} for cell, some in found.items() if some[DENSE]}


def table(result: Mapping[str, Any]) -> str:
    """A row per cell and method."""
    rows = []
    for cell, runs in measured(result).items():
        target = float(smooth(runs[DENSE])[-1]) + NOISE
        dense = seconds_to(runs[DENSE], target)
        for name, run in runs.items():
            until, computing = seconds_to(run, target), "-"
            if "share_computing" in run:
                computing = f"{run.get('sample', run)['share_computing']:.1%}, {share_computing(run):.1%}"
            row = [f"{cell}: {name}", f"{run['bytes_per_step'] / 1e3:,.1f}"]
            row += [f"{runs[DENSE]['bytes_per_step'] / run['bytes_per_step']:,.0f}x"]
            row += [f"{1e3 * clock_of(run)[-1] / len(run['bits']):.0f}", f"{smooth(run)[-1]:.3f}"]
            row += [f"{smooth(run)[-1] - smooth(runs[DENSE])[-1]:+.3f}"]
            reached = ["never", "-"] if math.isinf(until) else [f"{until:,.0f}", f"{dense / until:.1f}x"]
            rows.append([*row, *reached, computing])
    head = ["AdamW", "kB per step", "fewer", "ms per step", "bits", "to dense", "seconds to dense's"]
    return markdown([*head, "sooner", "computing: told, measured"], rows)


STUDY = Study(
    "slow_links",
    lambda: [f"{name}/{method}" for name, cell in CELLS.items() for method in cell.methods],
    measure,
    table,
)
