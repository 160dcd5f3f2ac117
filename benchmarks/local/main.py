"""`scripts/bench local`: what a rank does in a step, all but the network, against one copy of n elements.

On one core, or with `--device cuda` on a GPU. Needs no Horovod.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# One thread everywhere, before anything starts a pool.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from benchmarks.common.options import count, density  # noqa: E402
from benchmarks.common.timing import Work, measure, tell  # noqa: E402
from benchmarks.local.steps import StepWorks  # noqa: E402
from benchmarks.local.works import LocalWorks  # noqa: E402

_MEMORY_BUDGET = 0.05


def _add_chosen(parser: argparse.ArgumentParser) -> None:
    """The argument that chooses another measurement, with arguments of its own."""
    what = "cpu, or a device of PyTorch, whose own arguments --device cuda --help tells (default %(default)s)"
    parser.add_argument("--device", default="cpu", help=what)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench local", description=__doc__)
    parser.add_argument("--elements", type=count, default=25_600_000, help="n (default %(default)s)")
    parser.add_argument("--density", type=density, default=0.001, help="kept fraction (default %(default)s)")
    parser.add_argument("--ranks", type=count, default=8, help="P (default %(default)s)")
    parser.add_argument("--repeat", type=count, default=15, help="rounds (default %(default)s)")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to stdout"
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the thread's CPU time, not the wall clock (busy machines)",
    )
    parser.add_argument(
        "--only",
        type=lambda text: [word for word in text.split(",") if word],
        metavar="WORDS",
        help="only what has one of these words in its name, such as topk,decode",
    )
    parser.add_argument("--check", action="store_true", help="fail if a budget is exceeded")
    _add_chosen(parser)
    return parser.parse_args(arguments)


def _cpu_seconds(work: Work) -> float:
    """Like the wall clock, but without what other processes take from the core."""
    work.prepare()
    start = time.thread_time()
    work.run()
    return time.thread_time() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints.

    Returns the exit code: 1 if --check found a budget exceeded, 2 where a device cannot be used.
    """
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_chosen(chooser)
    if chooser.parse_known_args(arguments)[0].device != "cpu":
        try:
            on_device: Callable[..., int] = importlib.import_module("benchmarks.local.device").main
        except ImportError as error:
            print(f"--device needs PyTorch ({error})", file=sys.stderr)
            return 2
        return on_device(arguments)
    options = _arguments(arguments)
    works = LocalWorks(options.elements, options.density, options.ranks)
    steps = StepWorks(works.source, options.density, options.ranks)
    everything = [*works.parts(), *works.steps(), *steps.steps(), *steps.decoding(), *works.others()]
    with contextlib.suppress(ImportError):  # without PyTorch there are no local steps
        exchange: Any = importlib.import_module("benchmarks.local.exchange")
        everything += exchange.ExchangeWorks(works.source, options.ranks).works()
    if options.only:
        everything = [work for work in everything if any(word in work.name for word in options.only)]
    if options.cpu_time:
        timings = measure(works.baseline(), everything, options.repeat, seconds=_cpu_seconds)
    else:
        timings = measure(works.baseline(), everything, options.repeat)
    extra_memory = works.extra_memory()
    facts = {
        "elements": options.elements,
        "density": options.density,
        "ranks": options.ranks,
        "rounds": options.repeat,
        "threads": 1,
        "clock": "cpu" if options.cpu_time else "wall",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "extra_memory": extra_memory,
        "baseline": timings[0].name,
    }
    words = f"memory beyond residual and gradient: {extra_memory:.1%} (budget {_MEMORY_BUDGET:.0%})"
    tell(timings, facts, options.json, words)
    fits = all(timing.fits for timing in timings) and extra_memory <= _MEMORY_BUDGET
    return 1 if options.check and not fits else 0


if __name__ == "__main__":
    sys.exit(main())
