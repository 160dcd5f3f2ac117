"""Sparse AdamW beside dense: larger GPTs on real ranks; sparsifiers by the number of ranks.

On GPUs, with the tokens that nanoGPT's data/openwebtext/prepare.py writes, until its time is up:

    torchrun --nproc-per-node 4 -m benchmarks.studies.sizes "GPT 124 M" --tokens data/openwebtext

It trains what is missing for so many ranks; `scripts/study sizes` does what a CPU can, and shows both.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.studies import adamw, passes
from benchmarks.studies.study import Result, Study, around, launched, load, markdown, parsed, save
from benchmarks.studies.tasks import Task, adapters_task, gpt_task

SETTING = {name: adamw.SETTING[name] for name in ("warmup", "weight_decay", "clip_norm", "beta2")}
SCORES, SIMULATED = ("training_bits", "bits"), "GPT 0.12 M"


class Cell(NamedTuple):
    """A training's steps, first guess of the rate, GPT and batch per rank, and ranks to try on a CPU."""

    steps: int
    rate: float
    shape: dict[str, Any]
    ranks: tuple[int, ...] = ()


CELLS = {
    "GPT 25 M": Cell(
        300, 5e-4, {"layers": 8, "width": 512, "heads": 8, "batch_size": 2, "num_test": 128}, (2,)
    ),
    "GPT 124 M": Cell(
        10_000, 6e-4, {"layers": 12, "width": 768, "heads": 12, "length": 1024, "batch_size": 12}
    ),
    "adapters": Cell(
        300, 1e-2, {"layers": 4, "width": 96, "length": 64, "batch_size": 8, "base_steps": 300}, (2,)
    ),
    "GPT tiny": Cell(20, 6e-4, {"layers": 2, "width": 64, "length": 16, "batch_size": 2}),
    # 16 sequences in all
    SIMULATED: Cell(400, 6e-3, {"layers": 2, "width": 64, "length": 64}, (2, 4, 8, 16)),
}
#: compression, arguments of `attach`, and whether ranks average second moments a hundred times
METHODS: dict[str, tuple[str, dict[str, int], bool]] = {
    "dense": ("", {}, False),
    "1 %, delay=1": ("best:density=0.01", {"delay": 1}, False),
    "1 %": ("best:density=0.01", {}, False),
    "1 %, delay=1, v averaged": ("best:density=0.01", {"delay": 1}, True),
    "1 %, v averaged": ("best:density=0.01", {}, True),
}
SPARSIFIERS = ["dense", "topk 1 %", "exdyna 1 %", "micro 1 %", "spardl 1 %", "oktopk 1 %"]
SPARSIFIERS += ["exdyna P %", "topk 1 % in all"]


def task_of(cell: str, tokens: Path | None) -> Task:
    """Returns a cell's model with its text: the standard library's source, or `tokens`."""
    shape = CELLS[cell].shape
    if tokens is None:
        return adapters_task(**shape) if cell == "adapters" else gpt_task(**shape)
    train, test = (np.memmap(tokens / f"{part}.bin", np.uint16, "r") for part in ("train", "val"))
    return gpt_task(**shape, text=(train, test), vocabulary=50_304)


def rows() -> list[str]:
    """Trainings but for rate and seed, as a CPU does them."""
    return [
        f"{name}, P={size}/{method}"
        for name, cell in CELLS.items()
        for size in cell.ranks
        for method in (SPARSIFIERS if name == SIMULATED else list(METHODS)[:3])
    ]


def names() -> list[str]:
    """Returns the names of all measured runs, and of those that the search for the best rates needs."""
    runs = load(STUDY.file).get("runs", {})
    asked = (around(runs, row, CELLS[row.partition(",")[0]].rate) for row in rows())
    return list(dict.fromkeys([*runs, *itertools.chain(*asked)]))


def measure(name: str, tokens: Path | None = None) -> Result:
    """Trains once: simulated ranks, or this rank and the others of torchrun, which is launched if need be."""
    row, rate, seed = parsed(name)
    label, method = row.split("/")
    cell, _, ranks = label.partition(", P=")
    size = int(ranks)
    setting: dict[str, Any] = {**SETTING, "num_steps": CELLS[cell].steps}
    if cell == SIMULATED:
        sparsifier, _, share = method.partition(" ")
        density = {"1 %": 0.01, "P %": size / 100, "1 % in all": 0.01 / size}.get(share)
        text = f"{sparsifier}:density={density:g},feedback=adam" if density else method
        task = gpt_task(**CELLS[cell].shape, batch_size=16 // size)
        return adamw.trained(task, adamw.Method(size, text), setting, rate, seed)
    if not dist.is_initialized():
        command = ["torchrun", "--standalone", "--nproc-per-node", ranks, "-m", __name__, cell]
        return dict(launched([*command, "--only", name], timeout_s=7200)["runs"][name])
    text, options, averages = METHODS[method]
    make = partial(adamw.adamw, rate=0.0, setting=SETTING)

    def after_step(step: int, optimizer: torch.optim.Optimizer) -> None:
        if averages and step % max(1, CELLS[cell].steps // 100) == 0:
            for state in optimizer.state.values():
                dist.all_reduce(state["exp_avg_sq"])
                state["exp_avg_sq"] /= size

    device = "cuda" if torch.cuda.is_available() else "cpu"
    more: dict[str, Any] = {"device": device, "after_step": after_step}
    found = passes.trained(task_of(cell, tokens), make, text, options, setting, rate, seed, **more)
    return passes.in_bits(found)


def table(result: Result) -> str:
    """Returns a table with each method at its own best rate, beside dense training at its best."""
    runs, lines = result.get("runs", {}), []
    measured = dict.fromkeys(parsed(name)[0] for name in runs)
    for row in [row for row in dict.fromkeys([*rows(), *measured]) if row in measured]:
        dense = runs.get(around(runs, f"{row.partition('/')[0]}/dense", math.nan)[0], {})
        name, *beside = around(runs, row, math.nan)
        run, is_edge = runs[name], not all(one in runs for one in beside)
        told = [f"{run[score]:.3f} ({run[score] - dense.get(score, math.nan):+.3f})" for score in SCORES]
        fewer = 4 * run["num_elements"] / run["bytes_per_step"]
        rate = f"{parsed(name)[1]:g}{' (edge)' if is_edge else ''}"
        lines.append([*row.split("/"), rate, *told, f"{fewer:,.0f}x"])
    head = ["training", "method", "rate", "bits, training (to dense)", "held-out (to dense)", "fewer bytes"]
    return markdown(head, lines)


FACTS = {"setting": SETTING}
STUDY = Study("sizes", names, measure, table, facts=FACTS)


def main() -> None:
    """Trains as one rank what a file lacks for so many ranks: all methods of a cell at two rates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cell", choices=CELLS)
    parser.add_argument("--only", metavar="RUN", help="this one alone")
    parser.add_argument("--tokens", type=Path, metavar="FOLDER", help="train.bin and val.bin of 16 bits")
    parser.add_argument("--json", type=Path, default=STUDY.file, metavar="FILE", help="(default %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rates = [f"{rate:g}" for rate in (CELLS[options.cell].rate, 2 * CELLS[options.cell].rate)]
    row = f"{options.cell}, P={dist.get_world_size()}"
    asked = [f"{row}/{method}/rate {rate}/seed 0" for rate in rates for method in METHODS]
    result = {"command": "scripts/study sizes", **FACTS, **load(options.json)}
    runs = [result.setdefault("runs", {})]
    dist.broadcast_object_list(runs)  # a host may have another file
    for name in [options.only] if options.only else asked:
        if name not in runs[0]:
            result["runs"][name] = measure(name, options.tokens)
            if dist.get_rank() == 0:
                save(options.json, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
