"""`scripts/bench local --device cuda`: what a rank does in a step on a GPU, all but the network.

Needs PyTorch, and no Horovod. Times are the device's own, host waits included.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common.options import count, density
from benchmarks.common.timing import measure, tell
from benchmarks.local.device_works import DeviceWorks


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench local --device cuda", description=__doc__)
    parser.add_argument("--elements", type=count, default=126_700_000, help="n (default %(default)s)")
    parser.add_argument("--density", type=density, default=0.001, help="kept fraction (default %(default)s)")
    parser.add_argument("--ranks", type=count, default=8, help="P (default %(default)s)")
    parser.add_argument("--repeat", type=count, default=21, help="rounds (default %(default)s)")
    parser.add_argument("--device", default="cuda", help="device (default %(default)s)")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to stdout"
    )
    parser.add_argument("--check", action="store_true", help="fail if a budget is exceeded")
    return parser.parse_args(arguments)


def _environment(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    try:
        triton: str | None = importlib.import_module("triton").__version__
    except ImportError:
        triton = None
    return {"device": name, "torch": torch.__version__, "triton": triton}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints.

    Returns the exit code: 1 if the selection is wrong, or --check found a budget exceeded.
    """
    options = _arguments(arguments)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        print(
            "PyTorch sees no CUDA device here; scripts/bench local --device cpu measures the CPU",
            file=sys.stderr,
        )
        return 2
    works = DeviceWorks(options.elements, options.density, options.ranks, options.device)
    right = works.check()
    everything = [*works.parts(), *works.steps(), *works.others()]
    timings = measure(works.baseline(), everything, options.repeat, seconds=works.seconds)
    extra_memory = works.extra_memory()
    memory = "unknown" if extra_memory is None else f"{extra_memory:.1%}"
    facts = {
        **_environment(options.device),
        "elements": options.elements,
        "density": options.density,
        "ranks": options.ranks,
        "rounds": options.repeat,
        "selection_right": right,
        "extra_memory": extra_memory,
        "baseline": timings[0].name,
    }
    bandwidth = 8 * options.elements / timings[0].median_ms / 1e9
    words = f"the copy moves {bandwidth:.2f} TB/s", f"memory beyond residual and gradient: {memory}"
    tell(timings, facts, options.json, *words, f"selection right: {right}")
    return 1 if not right or (options.check and not all(timing.fits for timing in timings)) else 0


if __name__ == "__main__":
    sys.exit(main())
