"""`scripts/bench local`: what a rank does in a step, all but the network, against one copy of n elements.

On one core, or with `--device cuda` on a GPU.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.common import timing
from benchmarks.common.options import count
from benchmarks.common.tables import timings_table
from benchmarks.local.steps import StepWorks
from benchmarks.local.works import DeviceWorks, Works


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything that the command line asks for; returns what is written to JSON."""
    torch.set_num_threads(1)
    sizes = options.elements, options.density, options.ranks
    works = Works(*sizes) if options.device == "cpu" else DeviceWorks(*sizes, options.device)
    steps = StepWorks(works)
    everything = [*works.parts(), *steps.steps(), *steps.decoding(), *works.others()]
    if options.device != "cpu":  # messages are decoded on the host
        everything = [work for work in everything if not work.name.startswith("decode")]
    everything = [work for work in everything if any(word in work.name for word in options.only)]
    timings = timing.measure(works.baseline(), everything, options.repeat, seconds=works.seconds)
    needed = [
        works.extra_memory(lambda memory, name=name: steps.run(steps.bucket(name, memory)))  # type: ignore[misc]
        for name in ("topk", "exdyna")
    ]
    facts = {
        "ranks": options.ranks,
        "device": options.device,
        "extra_memory": max((share for share in needed if share is not None), default=None),
        "baseline": timings[0].name,
    }
    return timing.timed(timings, options, **facts)


tables = timings_table


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = timing.rank_parser("local", __doc__, 0.001)
    add = made.add_argument
    add("--ranks", type=count, default=8, help="P (default %(default)s)")
    text = "only what has one of these words in its name, such as topk,decode"
    add("--only", type=lambda text: text.split(","), default=[""], metavar="WORDS", help=text)
    add("--device", default="cpu", help="cpu, or a device of PyTorch (default %(default)s)")
    return made
