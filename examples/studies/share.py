"""What `network_share` makes of it: the network's share on two emulated hosts, and where a link falls.

scripts/study share                  run what is missing, then write the table; needs root, and few others
scripts/study share --only gpt/1gbit cells whose name has this in it
scripts/study share --again          measure everything anew
scripts/study share --draw           only the table, from docs/measurements/share.json

Each rank trains with DistributedDataParallel. An iteration beside the same without messages is the share that
is measured here; what the training itself has found stands beside it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import ranks
from benchmarks.common.hosts import NETWORKS, Hosts, cluster_for, machine_facts, set_rate
from benchmarks.sync.ddp_methods import start_torch_distributed
from horovod_sparse import ddp
from horovod_sparse.planning.share import PERIOD
from horovod_sparse.tensors.adoption import AdamWOfSteps
from studies import results
from studies.time_to_accuracy.trainings import digits_training, text_training

FILE = results.MEASUREMENTS / "share.json"
SIZE, SHARE, TRAININGS = 2, 0.05, {"gpt": text_training, "cnn": digits_training}
RATES = {"100mbit": "10mbit", "1gbit": "100mbit", "10gbit": "1gbit"}
#: steps at a rate: the plan is decided after the 7th, and reviewed every `PERIOD` ones
STEPS, ALONE = 7 + 4 * PERIOD, 15
CELLS = [f"{model}/{rate}" for rate in RATES for model in TRAININGS]
CELLS += [f"{model}/1gbit, then 100mbit, then 1gbit" for model in TRAININGS]
MARK = "next rate "


class Rank:
    """A training on one rank; the same number of steps on all."""

    def __init__(self, model: str) -> None:
        start_torch_distributed()
        self.training = TRAININGS[model]()
        torch.manual_seed(0)
        self.net = self.training.make_model()
        self.model = DistributedDataParallel(self.net, broadcast_buffers=False)
        self.optimizer = self.training.make_optimizer(self.net)
        given = "best:density=auto", self.optimizer
        self.sync = ddp.attach(self.model, *given, network_share=SHARE)
        self.batches = self.training.batches(dist.get_rank(), SIZE, 0)
        self.linear = not isinstance(self.optimizer, AdamWOfSteps)  # what is sent is a gradient
        #: this rank's gradients, and what was applied, by parameter
        self.given, self.applied = ([torch.zeros_like(p) for p in self.net.parameters()] for _ in range(2))
        for total, parameter in zip(self.given, self.net.parameters(), strict=True):
            parameter.register_hook(lambda gradient, total=total: (total.add_(gradient), gradient)[1])
        self.plans: list[list[Any]] = []
        self.step = 0

    def compute(self) -> float:
        """Forward and backward; how long they took."""
        inputs, answers = next(self.batches)
        started = time.perf_counter()
        self.optimizer.zero_grad()
        self.training.loss(self.model, inputs, answers).backward()
        return time.perf_counter() - started

    def train(self, steps: int) -> tuple[list[float], list[float]]:
        """Seconds of the steps until their gradients are summed, and of the optimizer's."""
        summed, stepped = [], []
        for _ in range(steps):
            summed.append(self.compute())
            for total, parameter in zip(self.applied, self.net.parameters(), strict=True):
                total += parameter.grad
            started = time.perf_counter()
            if self.linear and self.training.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.training.max_norm)
            self.optimizer.step()
            stepped.append(time.perf_counter() - started)
            self.step += 1
            if not self.plans or self.plans[-1][1] != str(self.sync.plan):
                self.plans.append([self.step, str(self.sync.plan)])
        return summed, stepped

    def alone(self) -> list[float]:
        """Seconds of forward and backward without any message."""
        dist.barrier()
        with self.model.no_sync():
            return [self.compute() for _ in range(ALONE)]

    def lost(self) -> float:
        """Mean gradients of all ranks, less what was applied and what waits, by the norm of the gradients."""
        held, off, size = self.sync.state_dict()["residuals"], 0.0, 0.0
        for (name, _), given, applied in zip(
            self.net.named_parameters(), self.given, self.applied, strict=True
        ):
            both = torch.stack([given - held.get(name, 0.0), given]) / SIZE
            dist.all_reduce(both)
            off += float((both[0] - applied).norm()) ** 2
            size += float(both[1].norm()) ** 2
        return (off / size) ** 0.5


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """A cell: so many steps at each rate; the launch changes it when it is told."""
    rank, phases = Rank(settings["model"]), []
    for number, rate in enumerate(settings["rates"]):
        if number:
            ranks.say(f"{MARK}{rate}")
            time.sleep(2.0)
            dist.barrier()
        begun = rank.step
        summed, stepped = rank.train(STEPS)
        following = rank.sync._sharing.following
        phases.append(
            {
                "rate": rate,
                "summed": [round(each, 5) for each in summed],
                "stepped": round(statistics.median(stepped), 5),
                "changes": [[step - begun, plan] for step, plan in rank.plans if step > begun],
                "plan": str(rank.sync.plan),
                "words": following.decision.density,
                "remedy": following.decision.remedy,
                "told": round(following.decision.measured, 4),
            }
        )
    lost = rank.lost()
    alone = statistics.median(rank.alone()[3:])
    flat = torch.nn.utils.parameters_to_vector(rank.net.parameters()).detach()
    most, least = flat.clone(), flat.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    found = {"alone": round(alone, 5), "equal": bool(torch.equal(most, least)), "phases": phases}
    return {**found, "lost": lost if rank.linear else None, "num_parameters": flat.numel()}


def share(cell: dict[str, Any], phase: dict[str, Any]) -> float:
    """Of the last iterations under a plan that is not computing."""
    computing = cell["alone"] + phase["stepped"]
    return max(0.0, 1.0 - computing / (statistics.median(phase["summed"][-PERIOD:]) + phase["stepped"]))


def followed(phase: dict[str, Any]) -> str:
    """After how many steps at a rate the plan was what it is at last."""
    return str(phase["changes"][-1][0]) if phase["changes"] else "-"


def table(result: dict[str, Any]) -> str:
    """A row per cell and rate."""
    rows = []
    for name, cell in result["runs"].items():
        for phase in cell["phases"]:
            chosen, predicted, _ = phase["words"].split("\n")
            chosen = chosen.partition(": ")[2]
            first, found = predicted.partition("iteration, ")[2].partition(" of")[0], share(cell, phase)
            fits = 0.02 <= found <= 0.06 or (found < 0.02 and "dense" in chosen)
            lost = "" if cell["lost"] is None else f"{cell['lost']:.0e}"
            row = [f"{name.partition('/')[0]}, {phase['rate']}", chosen, first, f"{found:.1%}"]
            row += ["yes" if fits else "no", followed(phase), "yes" if cell["equal"] else "no", lost]
            rows.append(row)
    head = ["model, rate", "chosen at last", "predicted", "share measured", "0.02 to 0.06, or dense"]
    return results.markdown([*head, "steps until then", "replicas equal", "lost"], rows)


def measure(options: Any, result: dict[str, Any]) -> None:
    """The cells that are missing: those of one rate on the same hosts."""
    runs, machine = result.setdefault("runs", {}), machine_facts()
    for rate in RATES:
        todo = [cell for cell in CELLS if cell.split("/")[1].split(",")[0] == rate and options.only in cell]
        todo = [cell for cell in todo if options.again or cell not in runs]
        if not todo:
            continue
        with cluster_for(SIZE, rate, options.name) as hosts:
            for cell in todo:
                model, _, rates = cell.partition("/")
                settings = {"model": model, "rates": rates.split(", then ")}
                found = _run(hosts, settings, options.timeout)
                runs[cell] = {"load_before": machine_facts()["load_before"], **found}
                results.save(FILE, result)
                set_rate(hosts, rate)
    result["machine"] = f"{results.machine()}, {machine['cores']} cores"


def _run(hosts: Hosts, settings: dict[str, Any], timeout_s: float) -> Any:
    def changed(line: str) -> None:
        _, found, rate = line.partition(MARK)
        print(line, file=sys.stderr)
        if found:
            set_rate(hosts, rate)

    given = {"num_ranks": SIZE, "network": NETWORKS["gloo"], "variables": {}, "timeout_s": timeout_s}
    return hosts.run("studies.share", settings, **given, on_progress=changed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes the table."""
    parser = results.command_line("scripts/study share", __doc__, timeout_s=300.0)
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose name has this in it")
    parser.add_argument("--name", default="cluster", help="cluster to use if it is up (default %(default)s)")
    options = parser.parse_args(arguments)
    result = results.load(FILE)
    if not options.draw:
        result |= {"command": "scripts/study share", "network_share": SHARE, "steps": STEPS}
        measure(options, result)
        results.save(FILE, result)
    print(table(result))
    results.write_appendix()
    return 0


if __name__ == "__main__":
    as_rank = len(sys.argv) == 3 and sys.argv[1].endswith("settings.json")
    sys.exit(ranks.main(work) if as_rank else main())
