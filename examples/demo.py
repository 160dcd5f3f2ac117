"""A small GPT on four ranks over a slow network: bits per byte against seconds, for six ways to synchronize.

torchrun --standalone --nproc-per-node 4 examples/demo.py     (scripts/demo: each on a host, with root)

Each trains for the same seconds from the same start; the learning rate follows the clock, which stands still
in tests. Passes at rate 0 come before. All bytes of a rank's interface count, but not those that average
seconds and scores. Without --hosts ranks share a machine: after every pass each sleeps as long as its part of
loopback's bytes takes at --rate, so that nothing hides behind backward.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import source_text
import torch
import torch.distributed as dist
from gpt import GPT, parameter_groups
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse.ddp
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.merging import bytes_by_round
from horovod_sparse.simulation import num_rounds, share_of_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["METHODS", "Network", "draw", "predicted", "table"]

SIZE, LENGTH, BATCH, LEARNING_RATE = 4, 64, 2, 3e-3
DENSE, POWER, LOCAL = "dense", "PowerSGD of rank 4", "DiLoCo, every=30"
SPARSE, LATE, RARE, ALONE = "best", "best, delay=1", "best, every=15", "alone"
#: passes from one synchronization to the next
METHODS = {DENSE: 1, POWER: 1, LOCAL: 30, SPARSE: 1, LATE: 1, RARE: 15}
BEST = "best:density=0.003,values=2bit,indices=gaps"


def attach(name: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    """Makes a model synchronize in one of these ways; returns what `best` is attached by."""
    if name in (SPARSE, LATE, RARE):
        schedule = {"every": METHODS[name], "delay": int(name == LATE)}
        return horovod_sparse.ddp.attach(model, BEST, optimizer, **schedule)
    if name == POWER:  # from the earliest step that it can
        model.register_comm_hook(PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook)
    elif name == LOCAL:
        horovod_sparse.ddp.LocalSteps(optimizer, model, every=METHODS[LOCAL], outer="nesterov")
    elif name == ALONE:
        model.require_backward_grad_sync = False
    return None


def predicted(name: str, shapes: list[torch.Size], compute: float, rate: float) -> float:
    """Returns a pass's seconds by the cost model: computing, and its part of a synchronization.

    With a delay that hides behind the next pass; else nowhere.

    Args:
        name: of the method.
        shapes: of the parameters.
        compute: seconds of a pass without synchronization.
        rate: of a host, in bit/s; TCP's frames leave 95.6 % of it.
    """
    n = sum(shape.numel() for shape in shapes)
    added, selection = 0.0, 0.0
    if name in (SPARSE, LATE, RARE):  # an exchange carries what each of its passes has selected
        by_pass = bytes_by_round(parse_recipe(BEST).sparsifier, SIZE, n)
        sent = [(kind, METHODS[name] * put) for kind, put in by_pass]
        selection = 1e-4 + 1e-9 * n
    else:
        if name == POWER:  # two thin factors of each matrix that they halve
            thin = [(shape.numel(), 4 * sum(shape)) for shape in shapes if len(shape) > 1]
            n -= sum(whole - few for whole, few in thin if 2 * few < whole)
        sent = [("allreduce", 4 * n)]
    for kind, put in sent:
        added += 5e-5 * num_rounds(kind, SIZE) + 8 / (0.956 * rate) * share_of_bytes(kind, SIZE) * put
    added = max(0.0, added - compute) if name == LATE else added
    return compute + selection + added / METHODS[name]


class Network:
    """Counts what leaves this rank, and waits in place of a limit where there is none.

    Args:
        hosts: whether the rank has a host of its own, with a limit.
        rate: in bit/s.
    """

    def __init__(self, hosts: bool, rate: float) -> None:
        self._counter = Path(f"/sys/class/net/{'eth0' if hosts else 'lo'}/statistics/tx_bytes")
        self._sharing, self._rate = (1, math.inf) if hosts else (SIZE, rate)
        sent = [(mean(0.0), self.sent())[1] for _ in range(21)]  # the first mean connects
        self.bytes_of_mean = mean(median(after - before for before, after in pairwise(sent)))
        self._before = self.sent()

    def sent(self) -> float:
        """Returns the bytes sent so far; on loopback this rank's part."""
        return int(self._counter.read_text()) / self._sharing

    def wait(self) -> None:
        """Sleeps as long as sending the bytes since the last call would take."""
        before, self._before = self._before, self.sent()
        time.sleep(8 * (self._before - before) / self._rate)


def mean(value: float) -> float:
    """Returns the mean over ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / SIZE


def bits(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Returns the model's bits per byte of a batch."""
    inputs, targets = map(torch.from_numpy, batch)
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / math.log(2)


class Training:
    """Trains by one method, from the common start."""

    def __init__(self, name: str, network: Network) -> None:
        torch.manual_seed(0)
        self.name, self.network, self.every = name, network, METHODS.get(name, 8)
        self.net = GPT(4, 128, 4, LENGTH)
        # over Gloo PowerSGD's collectives of several buckets get out of order
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=25 if name == POWER else None)
        groups = parameter_groups(self.net.parameters(), 0.1)
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)
        self.sync = attach(name, self.model, self.optimizer)
        train, test = source_text.load()
        self.batches = source_text.batches(train, dist.get_rank(), SIZE, BATCH, LENGTH, 10**6)
        (self.test,) = source_text.batches(test, dist.get_rank(), SIZE, 32, LENGTH, 1)

    def passes(self, progress: float | None) -> float:
        """Runs passes up to the next synchronization, with that; returns their seconds."""
        rising = 0.0 if progress is None else LEARNING_RATE * min(1.0, progress / 0.1)
        for group in self.optimizer.param_groups:
            group["lr"] = rising * 0.5 * (1 + math.cos(math.pi * (progress or 0.0)))
        started = time.perf_counter()
        for _ in range(self.every):
            (bits(self.model, next(self.batches)) * math.log(2)).backward()
            if self.sync is None:  # a rank's own steps have their length whatever its gradients' norm
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.network.wait()
        return mean(time.perf_counter() - started)

    def score(self) -> float:
        """Bits per byte of test text, of which each rank reads a part, by the parameters that all have."""
        with torch.no_grad(), self.sync.common() if self.sync else contextlib.nullcontext():
            return round(mean(float(bits(self.model.module, self.test))), 4)

    def run(self, seconds: float) -> dict[str, Any]:
        """Trains for so long."""
        used = [self.passes(None) for _ in range(-(-6 // self.every))][-1]
        clock, count, curve, before = 0.0, 0, [(0.0, self.score())], self.network.sent()
        while clock < seconds:
            used = self.passes(min(1.0, (clock + used / 2) / seconds))
            clock, count = clock + used, count + self.every
            if clock >= min(seconds, len(curve) * seconds / 10):
                curve.append((round(clock, 2), self.score()))
        # one reading after all passes: with a delay messages leave after their pass
        means = count // self.every + len(curve) - 1
        bytes_sent = mean(self.network.sent() - before - means * self.network.bytes_of_mean)
        found = {"bits": curve[-1][1], "passes": count, "seconds_per_pass": round(clock / count, 5)}
        return {**found, "bytes_per_pass": round(bytes_sent / count), "curve": curve}


def seconds_to(run: dict[str, Any], score: float) -> float:
    """Returns the seconds until a score is reached, interpolated between tests; infinite if it never is."""
    for (before, worse), (after, better) in zip(run["curve"], run["curve"][1:], strict=False):
        if better <= score:
            return before + (after - before) * (worse - score) / (worse - better)
    return math.inf


def table(result: dict[str, Any]) -> str:
    """Returns a table with a row per method."""
    rows, dense = [], result["runs"][DENSE]
    for name, run in result["runs"].items():
        fewer = f"{dense['bytes_per_pass'] / run['bytes_per_pass']:.0f}"
        times = [f"{1e3 * run[key]:.0f}" for key in ("predicted_seconds", "seconds_per_pass")]
        until = seconds_to(run, dense["bits"])
        rows.append([name, fewer, *times, f"{run['bits']:.2f}", f"{until:.1f}".replace("inf", "never")])
    head = ["AdamW", "times fewer bytes", "ms per pass: predicted", "measured", "bits per byte"]
    lines = ["| " + " | ".join(line) + " |" for line in ([*head, "seconds to dense's score"], *rows)]
    lines.insert(1, "|---|" + "---:|" * len(head))
    return "\n".join(lines)


def draw(result: dict[str, Any]) -> Figure:
    """Bits per byte over seconds, and the time of a pass, predicted and measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, (name, run) in enumerate(result["runs"].items()):
        color = ("0.3", "0.6", "#CC79A7", "#E69F00", "#0072B2", "#009E73")[number]
        curves.plot(*zip(*run["curve"], strict=True), "o-", color=color, markersize=3, label=name)
        bars.barh(number - 0.2, 1e3 * run["predicted_seconds"], 0.35, color=color, alpha=0.4)
        measured = bars.barh(number + 0.2, 1e3 * run["seconds_per_pass"], 0.4, color=color)
        kilobytes = f" {1e3 * run['seconds_per_pass']:.0f} ms, {run['bytes_per_pass'] / 1e3:,.0f} kB"
        bars.bar_label(measured, [kilobytes], fontsize=8)
    last = {"color": "0.3", "linewidth": 0.8, "linestyle": ":", "label": "what dense ends at"}
    curves.axhline(result["runs"][DENSE]["bits"], **last)
    curves.set(
        xlabel="seconds of training", ylabel="bits per byte of test text: less is better", ylim=(None, 6)
    )
    curves.grid(alpha=0.3)
    curves.legend(fontsize=8)
    bars.set_yticks(range(len(result["runs"])), list(result["runs"]), fontsize=8)
    bars.set(xlabel="a step, ms: predicted (pale), measured", xlim=(0, bars.get_xlim()[1] * 1.5))
    bars.invert_yaxis()
    figure.suptitle(f"A GPT of {result['num_elements'] / 1e6:.2f} million parameters, {result['network']}")
    return figure


def main() -> None:
    """Trains by every method; rank 0 prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each method (default %(default)s)")
    parser.add_argument("--rate", type=float, default=100.0, help="in Mbit/s (default %(default)s)")
    parser.add_argument("--hosts", action="store_true", help="ranks are on hosts that have this rate")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    words = "four emulated hosts" if options.hosts else "four ranks on one machine, slowed down by waits"
    result = {"command": "scripts/demo", "network": f"{words}, {options.rate:g} Mbit/s"}
    network, runs = Network(options.hosts, 1e6 * options.rate), {}
    alone = Training(ALONE, network)
    compute = [alone.passes(None) / alone.every for _ in range(4)][-1]
    shapes = [parameter.shape for parameter in alone.net.parameters()]
    for name in METHODS:
        runs[name] = Training(name, network).run(options.seconds)
        runs[name]["predicted_seconds"] = round(predicted(name, shapes, compute, 1e6 * options.rate), 5)
        if dist.get_rank() == 0:
            print(f"{name}: {runs[name]['bits']:.2f} bits per byte after {options.seconds:g} s", flush=True)
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    result |= {"machine": machine, "seconds": options.seconds, "compute_seconds": round(compute, 5)}
    result |= {"num_elements": sum(shape.numel() for shape in shapes), "runs": runs}
    if dist.get_rank() == 0:
        sparse, dense = runs[SPARSE], runs[DENSE]
        until, fewer = seconds_to(sparse, dense["bits"]), dense["bytes_per_pass"] / sparse["bytes_per_pass"]
        print(f"\n{table(result)}\n\n'{SPARSE}' sent {fewer:.0f} times fewer bytes than dense.", end=" ")
        print(
            f"It had dense's last score after {until:.1f} s." if until < math.inf else "It is behind dense."
        )
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
        if options.picture:
            draw(result).savefig(options.picture, dpi=110)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
