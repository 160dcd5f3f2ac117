"""What `network_share` makes of it: the network's share on two emulated hosts, and where a link falls.

Beside it twelve choices made by hand: each is trained once, as its loss depends on no link, and a few
steps of it are timed over every link.

scripts/study share                  run what is missing, then write the tables; needs root
scripts/study share --only gpt/1gbit cells whose name has this in it; "gpt: dense" is a training by hand,
                                     "gpt/1gbit: " times of all choices over that link
scripts/study share --seed 1         trainings by hand with another seed
scripts/study share --again          measure everything anew
scripts/study share --draw           only the table, from docs/measurements/share.json
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import ranks
from benchmarks.common.hosts import NETWORKS, cluster_for, machine_facts, set_rate
from horovod_sparse.planning.share import PERIOD
from studies import results
from studies.share_by_hand import (
    CELLS,
    NUM_STEPS,
    OTHERS,
    RATES,
    SHARE,
    THEN,
    Loop,
    by_hand,
    compared,
    train_by_hand,
    trained,
)
from studies.time_to_accuracy.links import MARK

FILE = results.MEASUREMENTS / "share.json"
#: steps at a rate: the plan is decided after the 7th, and looked at again after every `PERIOD` ones
STEPS, TURNS, EACH, FREE = 7 + 5 * PERIOD, 2, 8, "100gbit"


class Rank(Loop):
    """With a share for the network, and sums of gradients and of what was applied, by parameter."""

    def __init__(self, model: str) -> None:
        super().__init__(model, "best:density=auto")
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

    def stamps(self) -> tuple[float, float, float]:
        """Of computing: when it began, when the last gradients came, when it was over."""
        self.arrived, began = math.nan, time.perf_counter()
        self.compute()
        return began, self.arrived, time.perf_counter()

    def update(self) -> None:
        """The optimizer's part of a step."""
        for total, parameter in zip(self.applied, self.parameters, strict=True):
            total += parameter.grad
        super().update()

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
                    began, _, over = self.stamps()
                self.counts = True
                dist.barrier()
                stamps = self.stamps()
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
    if dist.get_rank() == 0:
        print(f"{THEN}{rate}", flush=True)
    time.sleep(1.5)
    dist.barrier()


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """A cell: so many steps at each rate; who has started the ranks changes it when it is told.

    Or trainings by hand.
    """
    if "choices" in settings:
        train_by_hand(settings)
        return {}
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
        for phase in cell.get("phases", ()):
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
    shares = results.markdown([*head, "plans change after", "replicas equal", "lost"], rows)
    runs = result.get("runs", {})
    return "\n\n".join([shares, trained(runs), compared(runs)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing, cell by cell, and writes the table."""
    parser = results.command_line("scripts/study share", __doc__, timeout_s=300.0)
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose name has this in it")
    parser.add_argument("--seed", type=int, choices=(0, *OTHERS), default=0, help="trainings by hand")
    options = parser.parse_args(arguments)
    result = results.load(FILE)
    runs = result.setdefault("runs", {})
    if not options.draw:
        result |= {"command": "scripts/study share", "machine": results.machine(), "network_share": SHARE}
    for cell in () if options.draw or options.seed else CELLS:
        if options.only not in f"{cell}$" or (cell in runs and not options.again):
            continue
        model, _, rates = cell.partition("/")
        settings = {"model": model, "rates": rates.split(THEN)}
        runs[cell] = {**machine_facts(), **launch(settings, settings["rates"][0], options.timeout)}
        results.save(FILE, result)
    for model, choices in () if options.draw else by_hand(runs).items():
        places = [f"/{rate}" for rate in RATES if not options.seed]
        for place in ("", *places):  # where it is trained whole nothing is timed
            other = f", seed {options.seed}" if options.seed else ""
            keys = {name: f"{model}{place}: {name}{other}" for name in choices}
            todo = {name: text for name, text in choices.items() if options.only in f"{keys[name]}$"}
            todo = {name: text for name, text in todo.items() if options.again or keys[name] not in runs}

            def keep(line: str, keys: Mapping[str, str] = keys) -> None:
                _, found, text = line.partition(MARK)
                if found:
                    name, run = json.loads(text)
                    runs[keys[name]] = run
                    results.save(FILE, result)
                    print(f"{keys[name]}: {run.get('score')}, {run.get('seconds')} s", file=sys.stderr)

            if todo:
                asked = {"model": model, "choices": todo, "seed": options.seed}
                asked["steps"] = 0 if place else NUM_STEPS[model]
                launch(asked, place[1:] or FREE, options.timeout, keep)
    print(table(result))
    results.write_appendix()
    return 0


def launch(settings: Mapping[str, Any], rate: str, timeout_s: float, told: Any = lambda line: None) -> Any:
    """Two ranks over a link, whose rate they may have changed."""
    with cluster_for(2, rate, "share") as hosts:

        def on_progress(line: str) -> None:
            if line.startswith(THEN):
                set_rate(hosts, line.removeprefix(THEN))
            told(line)

        return hosts.run(
            "studies.share", settings, num_ranks=2, network=NETWORKS["gloo"], variables={},
            timeout_s=timeout_s, on_progress=on_progress,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(ranks.main(work) if sys.argv[1:] and sys.argv[1].endswith("settings.json") else main())
