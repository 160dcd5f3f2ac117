"""How few elements AdamW may send, by the length of the training: every density at its own best rate.

Ranks are simulated in one process, as in `adamw`. Sparse: `best`, values in 2 bits, indices as gaps. A rate
is the best one where half of it and twice of it are worse: the rates to try follow from what is measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.studies.adamw import SETTING, Method, trained
from benchmarks.studies.study import Result, Study, at_best_rate, behind, load, markdown
from benchmarks.studies.tasks import Task, gpt_task, text_task

SIZE, SEEDS, GUESS = 2, (0, 1, 2), 4e-3
DENSITIES = (0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
#: of a run: of the last tenth of the steps, and of text that is never trained on
SCORES = ("training_bits", "bits")
#: 4 pieces of 32 bytes a rank, so that 10,000 steps take minutes
TASKS: dict[str, Callable[[], Task]] = {
    "GPT 0.12 M": partial(gpt_task, 2, 64, batch_size=4, length=32, num_bytes=4_000_000),
    "GPT 0.12 M, batch 32": partial(gpt_task, 2, 64, batch_size=32, length=32, num_bytes=4_000_000),
    "LSTM 0.11 M": partial(text_task, 100, batch_size=4, length=32),
}
#: tasks and steps, in the order of measuring
CELLS = [("GPT 0.12 M", 300), ("GPT 0.12 M", 1000), ("GPT 0.12 M", 3000), ("LSTM 0.11 M", 1000)]
CELLS += [("GPT 0.12 M", 10_000), ("LSTM 0.11 M", 3000), ("GPT 0.12 M, batch 32", 1000)]


def densities(steps: int) -> list[float]:
    """Those at which an element is sent 0.3 to 100 times in all; those near 0.003 first."""
    kept = [density for density in DENSITIES if 0.25 <= density * steps <= 101]
    return sorted(kept, key=lambda density: abs(math.log(density / 0.003)))


def row(task: str, steps: int, density: float) -> str:
    """A training but for rate and seed; dense at density 1."""
    return f"{task}, {steps} steps/{'dense' if density == 1.0 else f'{100 * density:g} %'}"


def names() -> list[str]:
    """Rates of the first seed, until each row's best is bracketed; then the best with the other seeds.

    Dense and the two first densities of all cells come before the others.
    """
    runs, guess = load(STUDY.file).get("runs", {}), GUESS
    found: dict[str, None] = {}
    ready = []
    for part in slice(0, 3), slice(3, None):
        for task, steps in CELLS:
            for density in [1.0, *densities(steps)][part]:
                name = row(task, steps, density)
                best = at_best_rate(runs, name)
                guess = guess if best is None else best[0]
                near = (guess,) if best is None else (guess / 2, guess, guess * 2)
                asked = [f"{name}/rate {rate:g}/seed 0" for rate in near]
                found |= dict.fromkeys([*(run for run in runs if run.startswith(f"{name}/")), *asked])
                if all(run in runs for run in asked):
                    ready.append(asked[len(asked) // 2].removesuffix("0"))
    return [*found, *(f"{run}{seed}" for seed in SEEDS[1:] for run in ready if f"{run}{seed}" not in found)]


def is_bracketed(runs: Result, name: str) -> bool:
    """Whether half and twice the best rate are measured."""
    best = at_best_rate(runs, name)
    return best is not None and all(f"{name}/rate {best[0] * by:g}/seed 0" in runs for by in (0.5, 2))


def measure(name: str) -> Result:
    """Trains once."""
    cell, method, rate, seed = name.split("/")
    task, _, steps = cell.removesuffix(" steps").rpartition(", ")
    percent = method.removesuffix(" %")
    sparse = f"topk:density={percent}e-2,values=2bit,indices=gaps,feedback=adam"
    setting = SETTING | {"num_steps": int(steps)}
    numbers = float(rate.removeprefix("rate ")), int(seed.removeprefix("seed "))
    return trained(TASKS[task](), Method(SIZE, "dense" if method == "dense" else sparse), setting, *numbers)


def table(result: Result) -> str:
    """Each density at its own best rate."""
    runs = result.get("runs", {})

    def rows() -> Iterator[list[str]]:
        for task, steps in CELLS:
            for density in [1.0, *sorted(densities(steps), reverse=True)]:
                if (found := at_best_rate(runs, name := row(task, steps, density))) is None:
                    continue
                rate, seeds = found
                more = [
                    behind(runs, row(task, steps, density), row(task, steps, 1.0), score) for score in SCORES
                ]
                yield [
                    *name.split("/"),
                    f"{density * steps:g}",
                    f"{rate:g}{'' if is_bracketed(runs, name) else ' (edge)'}",
                    *(f"{statistics.fmean(run[score] for run in seeds.values()):.3f}" for score in SCORES),
                    *(f"{statistics.fmean(one):+.3f}" if one else "" for one in more),
                    f"{max(more[0]) - min(more[0]):.3f}" if more[0] else "",
                    f"{4 * seeds[0]['num_elements'] / seeds[0]['bytes_per_step']:,.0f}x",
                    str(len(seeds)),
                ]

    head = ["training", "density", "sends", "rate", "bits, training", "held-out", "to dense, training"]
    head += ["held-out", "spread", "fewer bytes", "seeds"]
    return markdown(head, list(rows()))


_FACTS = {name: value for name, value in SETTING.items() if name not in ("num_steps", "batch")}
STUDY = Study("lengths", names, measure, table, facts={"setting": _FACTS})
