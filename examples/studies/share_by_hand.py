"""Trainings by hand beside those of `network_share`, on two ranks: what each choice reaches, and how soon.

Each is trained once per seed, as its loss depends on no link, and a few steps of it are timed over every
link.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse.torch as hvd
from benchmarks.sync.ddp_methods import start_torch_distributed
from horovod_sparse import ddp
from horovod_sparse.tensors.adoption import AdamWOfSteps
from studies import results
from studies.time_to_accuracy.links import MARK, NOISE, seconds_to, smooth
from studies.time_to_accuracy.trainings import digits_training, text_training

SHARE = 0.05
#: 0.84 and 1.0 million parameters; batches that let a step compute more than selecting from them takes
TRAININGS = {
    "gpt": partial(text_training, length=128, batch_size=8),
    "cnn": partial(digits_training, hidden=1920, batch_size=512),
}
RATES, THEN = ("100mbit", "1gbit", "10gbit"), " then "
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
#: seeds beside 0, where they were asked for
OTHERS = (1, 2)
#: bits, or points, by which seeds move a score; what is said of accuracy in other cases
NOISES, _SAID = {"gpt": NOISE, "cnn": 0.5}, re.compile(r"ended ([\d.]+) [a-z ]+ behind to ([\d.]+) before")


class Loop:
    """A training on one rank behind DistributedDataParallel."""

    def __init__(self, model: str, choice: str, seed: int = 0) -> None:
        start_torch_distributed()
        hvd.shutdown()  # its thread looks for work all the time
        torch.manual_seed(seed)
        self.training = TRAININGS[model]()
        self.net = self.training.make_model()
        self.parameters = list(self.net.parameters())
        # over Gloo PowerSGD's collectives of several buckets get out of order
        megabytes = 1024 if choice == "powersgd" else None
        self.model = DistributedDataParallel(self.net, broadcast_buffers=False, bucket_cap_mb=megabytes)
        self.optimizer = self.training.make_optimizer(self.net)
        self.batches = self.training.batches(dist.get_rank(), dist.get_world_size(), seed)
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


def tell(name: str, loop: Loop, num_timed: int = 0) -> None:
    """Lets who has started the ranks know."""
    run = loop.result(num_timed)
    if dist.get_rank() == 0:
        print(MARK + json.dumps([name, run]), flush=True)


def train_by_hand(settings: Mapping[str, Any]) -> None:
    """Trainings on this rank, each told when it is done.

    Where they are timed all take turns, so that what else runs on the machine meets all of them.
    """
    model, steps, loops = settings["model"], settings["steps"], {}
    for name, choice in settings["choices"].items():
        loops[name] = loop = Loop(model, choice, settings["seed"])
        loop.run(steps or max(4, loop.every), NUM_STEPS[model])
        if steps:
            tell(name, loop)
    for _ in range(0 if steps else TURNS_TIMED):
        for loop in loops.values():
            loop.run(NUM_TIMED // TURNS_TIMED, NUM_STEPS[model])
    for name, loop in {} if steps else loops.items():
        tell(name, loop, NUM_TIMED)


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


def seeds(runs: Mapping[str, Any], model: str, name: str) -> dict[str, Any]:
    """Trainings with one seed and others as one: means of bits and score, and how many."""
    one = f"{model}: {name}"
    some = [runs[key] for key in (one, *(f"{one}, seed {seed}" for seed in OTHERS)) if key in runs]
    bits = np.mean([run["bits"] for run in some], axis=0)
    return {"bits": bits, "score": statistics.fmean(run["score"] for run in some), "number": len(some)}


def timed(runs: Mapping[str, Any], model: str, rate: str, name: str) -> list[float]:
    """Steps until dense training's loss, seconds of a step over a link, and their product."""
    target = float(smooth(seeds(runs, model, DENSE))[-1]) + NOISE
    bits = seeds(runs, model, name)["bits"]
    known = (runs.get(f"{model}/{rate}: {name}{one}") for one in ("", FORMER))
    each = next((one["seconds"] for one in known if one is not None), math.nan)
    steps = seconds_to({"bits": bits, "seconds": [1.0] * len(bits)}, target)
    return [steps, each, steps * each]


def behind(runs: Mapping[str, Any], model: str, name: str) -> float:
    """Bits, or points, by which a training ended behind dense training."""
    off = seeds(runs, model, name)["score"] - seeds(runs, model, DENSE)["score"]
    return off if model == "gpt" else -100 * off


def trained(runs: Mapping[str, Any]) -> str:
    """A row per choice, with its seconds over every link."""
    rows = []
    for model in TRAININGS:
        for name in (key.removeprefix(f"{model}: ") for key in runs if key.startswith(f"{model}: ")):
            if ", seed " in name:
                continue
            found = [timed(runs, model, rate, name) for rate in RATES]
            steps = found[0][0]
            means = seeds(runs, model, name)
            row = [f"{model}: {name}", str(means["number"]), f"{smooth(means)[-1]:.3f}"]
            row += [f"{behind(runs, model, name):+.3g}", "never" if math.isinf(steps) else f"{steps:.0f}"]
            row += ["-" if math.isnan(each) else f"{1e3 * each:.0f}" for _, each, _ in found]
            rows.append([*row, *(f"{one[2]:.1f}" if math.isfinite(one[2]) else "-" for one in found)])
    head = ["training", "seeds", "loss, bits", "behind dense: bits or points", "steps to dense's loss"]
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
