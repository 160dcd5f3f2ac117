"""What `network_share` makes of it: the network's share on two emulated hosts, and where a link falls.

Beside it twelve choices made by hand: each is trained once, as its loss depends on no link, and a few
steps of it are timed over every link.

scripts/study share                  run what is missing, then write the tables; needs root
scripts/study share --only gpt/1gbit cells whose name has this in it; "gpt: dense" is a training by hand,
                                     "gpt/1gbit: " times of all choices over that link
scripts/study share --again          measure everything anew
scripts/study share --draw           only the table, from docs/measurements/share.json
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.common.hosts import NETWORKS, cluster_for, machine_facts, set_rate
from benchmarks.sync.ddp_methods import start_torch_distributed
from horovod_sparse import ddp
from horovod_sparse.planning.share import PERIOD
from horovod_sparse.tensors.adoption import AdamWOfSteps
from studies import results
from studies.time_to_accuracy.links import MARK, NOISE, seconds_to, smooth
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
RATES = "100mbit", "1gbit", "10gbit"
CELLS = [f"{model}/{rate}" for rate in RATES for model in TRAININGS]
CELLS += [f"{model}/1gbit{THEN}100mbit{THEN}1gbit" for model in TRAININGS]
#: made by hand: a recipe, or local steps as "how many, recipe or none", or a name of PyTorch's
DENSE = "dense"
CHOICES = {
    "dense": DENSE,
    "float16": "float16",
    "10 %": "best:density=0.1",
    "5 %": "best:density=0.05",
    "1 %": "best:density=0.01",
    "0.3 %": "best:density=0.003",
    "1 %, 2 bits": "best:density=0.01,values=2bit",
    "0.3 %, 2 bits, gaps": "best:density=0.003,values=2bit,indices=gaps",
    "qsgd of 4 bits": "qsgd:feedback=best",
    "PowerSGD of rank 4": "powersgd",
    "8 local steps": "8,",
    "30 local steps, sparseloco": "30,sparseloco",
}
#: trainings with steps as long as those of a rank's part of the batch: a step takes as long
FORMER = ", s = 1"
#: steps of a training by hand; those that are timed, after as many as lie between two exchanges, by turns
NUM_STEPS, NUM_TIMED, TURNS_TIMED = {"gpt": 300, "cnn": 150}, 30, 6
#: bits, or points, by which seeds move a score; what is said of accuracy in other cases
NOISES, _SAID = {"gpt": NOISE, "cnn": 0.5}, re.compile(r"ended ([\d.]+) [a-z ]+ behind to ([\d.]+) before")


class Loop:
    """A training on one rank behind DistributedDataParallel."""

    def __init__(self, model: str, choice: str) -> None:
        start_torch_distributed()
        hvd.shutdown()  # its thread looks for work all the time
        torch.manual_seed(0)
        self.training = TRAININGS[model]()
        self.net = self.training.make_model()
        self.parameters = list(self.net.parameters())
        # over Gloo PowerSGD's collectives of several buckets get out of order
        megabytes = 1024 if choice == "powersgd" else None
        self.model = DistributedDataParallel(self.net, broadcast_buffers=False, bucket_cap_mb=megabytes)
        self.optimizer = self.training.make_optimizer(self.net)
        self.batches = self.training.batches(dist.get_rank(), dist.get_world_size(), 0)
        every, _, recipe = choice.partition(",")
        self.every = 1
        if choice == "float16":
            self.model.register_comm_hook(None, fp16_compress_hook)
        elif choice == "powersgd":  # from the earliest step that it can
            self.model.register_comm_hook(PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook)
        elif every.isdigit():
            self.every, combine = int(every), "senders" if recipe else "ranks"
            self.sync: Any = ddp.LocalSteps(
                self.optimizer, self.model, every=self.every, compression=recipe or None, combine=combine
            )
        elif choice != DENSE:
            share: Any = {"network_share": SHARE} if "auto" in choice else {}
            self.sync = ddp.attach(self.model, choice, self.optimizer, **share)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.found: list[list[float]] = []
        self.linear = not isinstance(self.optimizer, AdamWOfSteps)  # what is sent is a gradient

    def compute(self) -> torch.Tensor:
        """Forward and backward: the loss."""
        inputs, answers = next(self.batches)
        self.optimizer.zero_grad()
        loss = self.training.loss(self.model, inputs, answers)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """The optimizer's part of a step."""
        if self.linear and self.training.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_norm)
        self.optimizer.step()

    def run(self, num_steps: int, of: int) -> None:
        """So many steps of a training, with what each took."""
        ended = time.perf_counter()
        for _ in range(num_steps):
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * self.training.rate_at(len(self.found), of)
            loss = self.compute()
            self.update()
            began, ended = ended, time.perf_counter()
            exchange = (len(self.found) + 1) % self.every == 0
            self.found.append([float(loss) / math.log(2), ended - began, float(exchange)])

    def result(self, num_timed: int = 0) -> dict[str, Any]:
        """Bits of every step and the score of the test; or seconds of a step, of so many."""
        both = torch.tensor(self.found)
        dist.all_reduce(both)
        bits, seconds, exchanges = (both / dist.get_world_size()).T.tolist()
        if num_timed:
            timed = list(zip(seconds, exchanges, strict=True))[-num_timed:]
            kinds = ([each for each, one in timed if one == kind] or [0.0] for kind in (1.0, 0.0))
            with_it, without = (float(np.quantile(kind, 0.25)) for kind in kinds)
            return {"seconds": round(with_it / self.every + without * (1 - 1 / self.every), 6)}
        score = torch.tensor(self.training.test(self.net, dist.get_rank(), dist.get_world_size()))
        dist.all_reduce(score)
        told = {"bits": [float(f"{value:.4g}") for value in bits]}
        return {**told, "score": round(float(score[0] / score[1]), 4)}


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


def tell(name: str, loop: Loop, num_timed: int = 0) -> None:
    """Lets who has started the ranks know."""
    run = loop.result(num_timed)
    if dist.get_rank() == 0:
        print(MARK + json.dumps([name, run]), flush=True)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """A cell: so many steps at each rate; who has started the ranks changes it when it is told.

    Or trainings by hand, each told when it is done; where they are timed all take turns, so that what else
    runs on the machine meets all of them.
    """
    if (choices := settings.get("choices")) is not None:
        steps, loops = settings["steps"], {}
        for name, choice in choices.items():
            loops[name] = loop = Loop(settings["model"], choice)
            loop.run(steps or max(4, loop.every), NUM_STEPS[settings["model"]])
            if steps:
                tell(name, loop)
        for _ in range(0 if steps else TURNS_TIMED):
            for loop in loops.values():
                loop.run(NUM_TIMED // TURNS_TIMED, NUM_STEPS[settings["model"]])
        for name, loop in {} if steps else loops.items():
            tell(name, loop, NUM_TIMED)
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


def named(cell: Mapping[str, Any]) -> str:
    """What was chosen over a link, by the name of its training: dense gradients train as they do by hand."""
    words = cell["phases"][0]["words"].split("\n")[0]
    if (density := re.search(r"at density ([\d.]+)", words)) is None:
        return "float16" if "float16" in words else DENSE
    text = f"best:density={density[1]}" + (",values=2bit" if "values of 2 bits" in words else "")
    return next((name for name, choice in CHOICES.items() if choice == text), text)


def by_hand(runs: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Choices by model, with those that `network_share` has made over a constant link."""
    found = {}
    for model in TRAININGS:
        cells = [runs[cell] for cell in CELLS if cell in runs and cell.startswith(model) and THEN not in cell]
        found[model] = {**{name: name for name in map(named, cells)}, **CHOICES}
    return found


def timed(runs: Mapping[str, Any], model: str, rate: str, name: str) -> list[float]:
    """Steps until dense training's loss, seconds of a step over a link, and their product."""
    target = float(smooth(runs[f"{model}: {DENSE}"])[-1]) + NOISE
    bits = runs[f"{model}: {name}"]["bits"]
    known = (runs.get(f"{model}/{rate}: {name}{one}") for one in ("", FORMER))
    each = next((one["seconds"] for one in known if one is not None), math.nan)
    steps = seconds_to({"bits": bits, "seconds": [1.0] * len(bits)}, target)
    return [steps, each, steps * each]


def behind(runs: Mapping[str, Any], model: str, name: str) -> float:
    """Bits, or points, by which a training ended behind dense training."""
    off = runs[f"{model}: {name}"]["score"] - runs[f"{model}: {DENSE}"]["score"]
    return off if model == "gpt" else -100 * off


def trained(runs: Mapping[str, Any]) -> str:
    """A row per choice, with its seconds over every link."""
    rows = []
    for model in TRAININGS:
        for name in (key.removeprefix(f"{model}: ") for key in runs if key.startswith(f"{model}: ")):
            found = [timed(runs, model, rate, name) for rate in RATES]
            steps = found[0][0]
            row = [f"{model}: {name}", f"{smooth(runs[f'{model}: {name}'])[-1]:.3f}"]
            row += [f"{behind(runs, model, name):+.3g}", "never" if math.isinf(steps) else f"{steps:.0f}"]
            row += ["-" if math.isnan(each) else f"{1e3 * each:.0f}" for _, each, _ in found]
            rows.append([*row, *(f"{one[2]:.1f}" if math.isfinite(one[2]) else "-" for one in found)])
    head = ["training", "loss, bits", "behind dense: bits or points", "steps to dense's loss"]
    head += [f"ms per step: {rate}" for rate in RATES] + [f"seconds to it: {rate}" for rate in RATES]
    return results.markdown(head, rows)


def compared(runs: Mapping[str, Any]) -> str:
    """A row per constant link: what was chosen beside the best choice by hand; what was said of accuracy."""
    rows = []
    for cell in CELLS:
        model, _, rate = cell.partition("/")
        name = named(runs[cell]) if cell in runs and THEN not in cell else ""
        if f"{model}: {name}" not in runs:
            continue
        said, off = runs[cell]["phases"][0]["words"].partition("accuracy: ")[2], behind(runs, model, name)
        most, least = NOISES[model], NOISES[model]
        if not said.startswith("that of dense"):
            most, least = map(float, _SAID.findall(said)[0])
        trained = [one + form for one in CHOICES for form in ("", FORMER) if f"{model}: {one}{form}" in runs]
        seconds = {one: timed(runs, model, rate, one)[2] for one in (name, *trained)}
        best = min((one for one in seconds if seconds[one] > 0.0), key=seconds.__getitem__, default=name)
        row = [f"{model}, {rate}", name, *["-"] * 4]
        if not math.isnan(mine := seconds[name]):
            row[2:] = [f"{mine:.1f}", best, f"{seconds[best]:.1f}", f"{mine / seconds[best]:.2f}"]
        row += [f"{most:g} behind to {least:g} before", f"{off:+.3g}"]
        rows.append([*row, "yes" if -least <= off <= most else "no"])
    head = ["model, rate", "chosen", "seconds to dense's loss", "best by hand", "its seconds", "chosen by it"]
    return results.markdown([*head, "accuracy said", "measured, behind", "right"], rows)


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
        runs[cell] = {**machine_facts(), **launch(settings, settings["rates"][0], options.timeout)}
        results.save(FILE, result)
    for model, choices in () if options.draw else by_hand(runs).items():
        for place in ("", *(f"/{rate}" for rate in RATES)):  # where it is trained whole nothing is timed
            keys = {name: f"{model}{place}: {name}" for name in choices}
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
                asked = {"model": model, "choices": todo, "steps": 0 if place else NUM_STEPS[model]}
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
