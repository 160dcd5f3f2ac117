"""What `network_share` makes of it: the network's share on two emulated hosts, and where a link falls.

scripts/study share                  run what is missing, then write the table; needs root
scripts/study share --only gpt/1gbit cells whose name has this in it
scripts/study share --again          measure everything anew
scripts/study share --draw           only the table, from docs/measurements/share.json
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import ranks
from benchmarks.common.hosts import NETWORKS, cluster_for, machine_facts, set_rate
from benchmarks.sync.ddp_methods import start_torch_distributed
from horovod_sparse import ddp
from horovod_sparse.planning.share import PERIOD
from horovod_sparse.tensors.adoption import AdamWOfSteps
from studies import results
from studies.time_to_accuracy.trainings import digits_training, text_training

FILE = results.MEASUREMENTS / "share.json"
SHARE = 0.05
#: 0.84 and 1.0 million parameters; batches that let a step compute more than selecting from them takes
TRAININGS = {
    "gpt": partial(text_training, length=128, batch_size=8),
    "cnn": partial(digits_training, hidden=1920, batch_size=512),
}
#: steps at a rate: the plan is decided after the 7th, and looked at again after every `PERIOD` ones
STEPS, TURNS, EACH, THEN, FREE = 7 + 5 * PERIOD, 2, 8, " then ", "100gbit"
CELLS = [f"{model}/{rate}" for rate in ("100mbit", "1gbit", "10gbit") for model in TRAININGS]
CELLS += [f"{model}/1gbit{THEN}100mbit{THEN}1gbit" for model in TRAININGS]


class Rank:
    """A training on one rank, with sums of its gradients and of what was applied, by parameter."""

    def __init__(self, model: str) -> None:
        start_torch_distributed()
        torch.manual_seed(0)
        self.training = TRAININGS[model]()
        self.net = self.training.make_model()
        self.parameters = list(self.net.parameters())
        self.model = DistributedDataParallel(self.net, broadcast_buffers=False)
        self.optimizer = self.training.make_optimizer(self.net)
        self.sync: Any = ddp.attach(self.model, "best:density=auto", self.optimizer, network_share=SHARE)
        self.batches = self.training.batches(dist.get_rank(), dist.get_world_size(), 0)
        self.linear = not isinstance(self.optimizer, AdamWOfSteps)  # what is sent is a gradient
        self.given, self.applied = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self.counts, self.arrived = True, math.nan
        on_bucket = self.sync.on_bucket

        def stamped(bucket: Any) -> Any:
            self.arrived = time.perf_counter()
            return on_bucket(bucket)

        self.sync.on_bucket = stamped
        for total, parameter in zip(self.given, self.parameters, strict=True):

            def count(gradient: torch.Tensor, total: torch.Tensor = total) -> None:
                if self.counts:
                    total += gradient

            parameter.register_hook(count)

    def compute(self) -> tuple[float, float, float]:
        """Forward and backward: when they began, when the last gradients came, when they were over."""
        inputs, answers = next(self.batches)
        self.arrived = math.nan
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.training.loss(self.model, inputs, answers).backward()
        return began, self.arrived, time.perf_counter()

    def update(self) -> None:
        """The optimizer's part of a step."""
        for total, parameter in zip(self.applied, self.parameters, strict=True):
            total += parameter.grad
        if self.linear and self.training.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_norm)
        self.optimizer.step()

    def train(self, rate: str) -> dict[str, Any]:
        """So many steps; what was decided, and what the network then takes of a step."""
        plans = [str(self.sync.plan)]
        for _ in range(STEPS):
            self.compute()
            self.update()
            plans.append(str(self.sync.plan))
        following = self.sync._sharing.following
        changes = [step for step in range(2, len(plans)) if plans[step] != plans[step - 1]]
        decision = following.decision
        found = {"rate": rate, "plan": plans[-1], "words": decision.density, "remedy": decision.remedy}
        found |= {"told": round(decision.measured, 4), "changes": changes}
        following._stopped = True  # the plan stays, whatever the link is now
        found["seconds"] = self.compared(rate)
        following._stopped = False
        return found

    def compared(self, rate: str) -> list[dict[str, float]]:
        """Steps over this link, then over one without limits, by turns, each after the same without a sum."""
        found: dict[str, list[Any]] = {rate: [], FREE: []}
        for turn in range(2 * TURNS):
            link = FREE if turn % 2 else rate
            if turn:
                change_to(link)
            for step in range(EACH + 1):
                self.counts = False
                dist.barrier()
                with self.model.no_sync():
                    began, _, over = self.compute()
                self.counts = True
                dist.barrier()
                stamps = self.compute()
                self.update()
                if step:
                    found[link].append([over - began, *stamps])
        change_to(rate)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, list(found.values()))
        return [parts(list(zip(*ranks, strict=True))) for ranks in zip(*everyone, strict=True)]

    def lost(self) -> float:
        """Mean gradients of all ranks, less what was applied and what waits, by the norm of the gradients."""
        held, off, size = self.sync.state_dict()["residuals"], 0.0, 0.0
        for (name, _), given, applied in zip(
            self.net.named_parameters(), self.given, self.applied, strict=True
        ):
            both = torch.stack([given - held.get(name, 0.0), given]) / dist.get_world_size()
            dist.all_reduce(both)
            off += float((both[0] - applied).norm()) ** 2
            size += float(both[1].norm()) ** 2
        return (off / size) ** 0.5


def change_to(rate: str) -> None:
    """Who has started the ranks gives the link another rate."""
    ranks.say(f"{THEN}{rate}")
    time.sleep(1.5)
    dist.barrier()


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """A cell: so many steps at each rate; who has started the ranks changes it when it is told."""
    rank, phases = Rank(settings["model"]), []
    for number, rate in enumerate(settings["rates"]):
        if number:
            change_to(rate)
        phases.append(rank.train(rate))
    lost = rank.lost() if rank.linear else None
    flat = torch.nn.utils.parameters_to_vector(rank.parameters).detach()
    ends = torch.stack([flat, -flat])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    equal = bool(torch.equal(ends[0], -ends[1]))
    return {"equal": equal, "lost": lost, "num_parameters": flat.numel(), "phases": phases}


def parts(steps: Sequence[Sequence[Sequence[float]]]) -> dict[str, float]:
    """Where the time of a step goes, medians over steps of means over ranks; their clocks are the same one.

    "alone": computing without a sum. "gradients": until the last ones come. "waiting": from there on until
    they have come on the slowest rank, too. "after": from there to the end. "whole": all of it.
    """
    rows: dict[str, list[float]] = {}
    for both in steps:
        alone, began, came, over = (statistics.fmean(column) for column in zip(*both, strict=True))
        last = max(stamps[2] for stamps in both)
        row = {"alone": alone, "gradients": came - began, "waiting": last - came, "after": over - last}
        for name, seconds in {**row, "whole": over - began}.items():
            rows.setdefault(name, []).append(seconds)
    return {name: round(statistics.median(column), 6) for name, column in rows.items()}


def table(result: dict[str, Any]) -> str:
    """A row per cell and rate."""
    rows = []
    for name, cell in result.get("runs", {}).items():
        for phase in cell["phases"]:
            chosen, predicted, _ = phase["words"].split("\n")
            chosen, predicted = chosen.partition(": ")[2], predicted.partition("iteration, ")[2]
            here, free = phase["seconds"]
            share = max(0.0, (here["after"] - free["after"]) / here["whole"])
            work = (free["after"] + here["gradients"] - here["alone"]) / here["whole"]
            met = 0.02 <= share <= 0.06 or (share < 0.02 and "dense gradients" in chosen)
            row = [f"{name.partition('/')[0]}, {phase['rate']}", chosen, predicted.partition(" of")[0]]
            row += [f"{phase['told']:.1%}", f"{share:.1%}", "yes" if met else "no", f"{work:.1%}"]
            row += [f"{here['waiting'] / here['whole']:.1%}", f"{here['whole'] / here['alone']:.2f}"]
            row += [", ".join(map(str, phase["changes"])) or "-", "yes" if cell["equal"] else "no"]
            rows.append([*row, "" if cell["lost"] is None else f"{cell['lost']:.0e}"])
    head = ["model, rate", "chosen at last", "network predicted", "told", "measured", "goal met"]
    head += ["work for it", "waiting for the slower rank", "a step by computing alone"]
    return results.markdown([*head, "plans change after", "replicas equal", "lost"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing, cell by cell, and writes the table."""
    parser = results.command_line("scripts/study share", __doc__, timeout_s=300.0)
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose name has this in it")
    options = parser.parse_args(arguments)
    result = results.load(FILE)
    runs = result.setdefault("runs", {})
    if not options.draw:
        result |= {"command": "scripts/study share", "machine": results.machine(), "network_share": SHARE}
    for cell in () if options.draw else CELLS:
        if options.only not in f"{cell}$" or (cell in runs and not options.again):
            continue
        model, _, rates = cell.partition("/")
        settings = {"model": model, "rates": rates.split(THEN)}
        with cluster_for(2, settings["rates"][0], "share") as hosts:

            def changed(line: str, hosts: Any = hosts) -> None:
                if line.startswith(THEN):
                    set_rate(hosts, line.removeprefix(THEN))

            given = {"num_ranks": 2, "network": NETWORKS["gloo"], "variables": {}}
            run = hosts.run(
                "studies.share", settings, **given, timeout_s=options.timeout, on_progress=changed
            )
        runs[cell] = {**machine_facts(), **run}
        results.save(FILE, result)
    print(table(result))
    results.write_appendix()
    return 0


if __name__ == "__main__":
    sys.exit(ranks.main(work) if sys.argv[1:] and sys.argv[1].endswith("settings.json") else main())
