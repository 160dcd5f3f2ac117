"""`scripts/bench local`: what a rank does in a step, all but the network, against one copy of n elements.

On one core, or with `--device cuda` on a GPU. Needs no Horovod.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence

# One thread everywhere, before anything starts a pool.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from benchmarks.common.options import count, density  # noqa: E402
from benchmarks.common.timing import measure, tell  # noqa: E402
from benchmarks.local.steps import StepWorks  # noqa: E402
from benchmarks.local.works import DeviceWorks, Works  # noqa: E402

_MEMORY_BUDGET = 0.05


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
    parser.add_argument("--device", default="cpu", help="cpu, or a device of PyTorch (default %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints.

    Returns the exit code: 1 if --check found a budget exceeded.
    """
    options = _arguments(arguments)
    sizes = options.elements, options.density, options.ranks
    works = Works(*sizes) if options.device == "cpu" else DeviceWorks(*sizes, options.device)
    steps = StepWorks(works)
    everything = [*works.parts(), *steps.steps(), *steps.decoding(), *works.others()]
    if options.device != "cpu":  # messages are decoded on the host
        everything = [work for work in everything if not work.name.startswith("decode")]
    if options.only:
        everything = [work for work in everything if any(word in work.name for word in options.only)]
    # the thread's time is like the wall clock, but without what other processes take from the core
    clock = time.thread_time if options.cpu_time else time.perf_counter
    timings = measure(
        works.baseline(), everything, options.repeat, seconds=lambda work: works.seconds(work, clock)
    )
    needed = [
        works.extra_memory(lambda memory, name=name: steps.run(steps.bucket(name, memory)))  # type: ignore[misc]
        for name in ("topk", "exdyna")
    ]
    extra_memory = max((share for share in needed if share is not None), default=None)
    facts = {
        "elements": options.elements,
        "density": options.density,
        "ranks": options.ranks,
        "rounds": options.repeat,
        "threads": 1,
        "clock": "cpu" if options.cpu_time else "wall",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": options.device,
        "extra_memory": extra_memory,
        "baseline": timings[0].name,
    }
    share = "unknown" if extra_memory is None else f"{extra_memory:.1%}"
    words = f"memory beyond residual and gradient: {share} (budget {_MEMORY_BUDGET:.0%})"
    tell(timings, facts, options.json, words)
    fits = all(timing.fits for timing in timings) and (extra_memory or 0.0) <= _MEMORY_BUDGET
    return 1 if options.check and not fits else 0


if __name__ == "__main__":
    sys.exit(main())
