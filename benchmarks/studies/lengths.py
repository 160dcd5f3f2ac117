"""How few elements AdamW may send, by the length of the training: every density at its own best rate.

Ranks are simulated in one process, as in `adamw`, but where exchanges are late or rare. Sparse: values in
2 bits, indices as gaps. A rate is the best one where half of it and twice of it are worse: the rates to try
follow from what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import fmean

import torch.distributed as dist

from benchmarks.studies import passes
from benchmarks.studies.adamw import SETTING, Method, adamw, trained
from benchmarks.studies.study import Result, Study, around, at_best_rate, behind, load, markdown, parsed
from benchmarks.studies.tasks import Task, gpt_task, text_task

SIZE, SEEDS, GUESS = 2, (0, 1, 2), 4e-3
#: tell what of a difference is the missing first moment's (beta1 = 0), and what is selection's
NO_MOMENT, ALL = "dense, no first moment", "100 %"
#: late or rare exchanges, on real ranks, with arguments of `attach`
LATE = [f"{kept} %, {exchange}" for kept in ("1", "0.3") for exchange in ("every=1", "delay=1", "every=4")]
#: of a run: of the last tenth of the steps, and of text that is never trained on
SCORES = ("training_bits", "bits")
#: 4 pieces of 32 bytes a rank, so that 10,000 steps take minutes
TASKS: dict[str, Callable[[], Task]] = {
    "GPT 0.12 M": partial(gpt_task, 2, 64, batch_size=4, length=32, num_bytes=4_000_000),
    "GPT 0.12 M, batch 32": partial(gpt_task, 2, 64, batch_size=32, length=32, num_bytes=4_000_000),
    "GPT 0.47 M": partial(gpt_task, 4, 96, batch_size=4, length=32, num_bytes=4_000_000),
    "LSTM 0.11 M": partial(text_task, 100, batch_size=4, length=32),
}
#: tasks and steps
CELLS = [("GPT 0.12 M", steps) for steps in (300, 500, 1000, 3000, 10_000)]
CELLS += [("LSTM 0.11 M", 1000), ("LSTM 0.11 M", 3000), ("GPT 0.12 M, batch 32", 1000), ("GPT 0.47 M", 500)]
CELLS += [("GPT 0.47 M", 1000)]


def densities(steps: int) -> list[float]:
    """Returns the densities to try, which send an element 0.25 to 101 times; the last one sends the least."""
    tried = (0.03, 0.01, 0.003, 0.0025, 0.0009 if steps == 10_000 else 0.001)
    return [density for density in tried if 0.25 <= density * steps <= 101]


def methods(steps: int) -> list[str]:
    """Returns the methods: dense ones, top-k at each density, and late exchanges."""
    kept = [f"{100 * density:g} %" for density in densities(steps)]
    return ["dense", NO_MOMENT, ALL, *kept, *LATE]


def row(task: str, steps: int, method: str) -> str:
    """Returns the name of a row: a training without its rate and seed."""
    return f"{task}, {steps} steps/{method}"


def is_bracketed(runs: Result, name: str) -> bool:
    """True if a row's best rate, half and twice of it are measured."""
    return all(run in runs for run in around(runs, name, math.nan))


def names() -> list[str]:
    """Rates of the first seed, until each row's best is bracketed; then the best with the other seeds."""
    runs, found = load(STUDY.file).get("runs", {}), list[str]()
    for name in (row(task, steps, method) for task, steps in CELLS for method in methods(steps)):
        asked = around(runs, name, GUESS)
        others = SEEDS if is_bracketed(runs, name) else ()
        found += [*asked, *(f"{asked[0].removesuffix('0')}{seed}" for seed in others)]
        found += [run for run in runs if parsed(run)[0] == name]
    return list(dict.fromkeys(found))


def measure(name: str) -> Result:
    """Trains once: simulated ranks; or this rank of torchrun, which is launched if need be."""
    label, rate, seed = parsed(name)
    cell, method = label.split("/")
    task, _, steps = cell.removesuffix(" steps").rpartition(", ")
    setting = SETTING | {"num_steps": int(steps)} | ({"beta1": 0.0} if method == NO_MOMENT else {})
    percent, _, exchange = method.partition(" %")
    short = "" if method == ALL else ",values=2bit,indices=gaps"
    sent = "dense" if "dense" in method else f"topk:density={percent}e-2,feedback=adam{short}"
    if not exchange:
        return trained(TASKS[task](), Method(SIZE, sent), setting, rate, seed)
    if not dist.is_initialized():
        return passes.launch(SIZE, __name__, name)
    option, _, count = exchange.removeprefix(", ").partition("=")
    make, options = partial(adamw, rate=rate, setting=setting), {option: int(count)}
    return passes.in_bits(passes.trained(TASKS[task](), make, sent, options, setting, rate, seed))


def table(result: Result) -> str:
    """Returns a table with each method at its own best rate."""
    runs, lines = result.get("runs", {}), []
    for task, steps, method in ((*cell, method) for cell in CELLS for method in methods(cell[1])):
        if (found := at_best_rate(runs, name := row(task, steps, method))) is None:
            continue
        rate, seeds = found
        fewer = 4 * seeds[0]["num_elements"] / seeds[0]["bytes_per_step"]
        more = [behind(runs, name, row(task, steps, "dense"), score) for score in SCORES]
        lines.append(
            [
                *name.split("/"),
                f"{rate:g}{'' if is_bracketed(runs, name) else ' (edge)'}",
                *(f"{fmean(run[score] for run in seeds.values()):.3f}" for score in SCORES),
                *(f"{fmean(one):+.3f}" if one else "" for one in more),
                f"{max(more[0]) - min(more[0]):.3f}" if more[0] else "",
                f"{fewer:,.{int(fewer < 1)}f}x",
                str(len(seeds)),
            ]
        )
    head = ["training", "density", "rate", "bits, training", "held-out", "to dense, training"]
    return markdown([*head, "held-out", "spread", "fewer bytes", "seeds"], lines)


_FACTS = {name: value for name, value in SETTING.items() if name not in ("num_steps", "batch")}
STUDY = Study("lengths", names, measure, table, facts={"setting": _FACTS})

if __name__ == "__main__":
    passes.on_rank(measure)
