"""`scripts/bench drift`: what comparing the replicas costs, beside the step after which it is done.

Every rank of this machine steps with Adam, whose state is looked at, too: gradients are synchronized sparsely
and applied, without a forward or a backward pass, so the step is shorter than any user's. Then all compare.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

for _variable in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import numpy as np  # noqa: E402

from benchmarks.common.launched import launched  # noqa: E402
from benchmarks.common.options import command_line, count  # noqa: E402
from benchmarks.common.samples import spread  # noqa: E402

#: largest share of a step that the check may take, spread over the steps between two of them
_BUDGET, _EVERY = 0.01, 1000
_PARAMETERS, _NUM_WARMUP = 160, 2


def _measure(options: argparse.Namespace) -> dict[str, Any] | None:
    import torch

    import horovod_sparse.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    size = options.elements // _PARAMETERS
    parameters = [torch.nn.Parameter(torch.zeros(size)) for _ in range(_PARAMETERS)]
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.Adam(parameters), compression=options.sparsifier, check_every=0
    )
    given = torch.randn(size, generator=torch.Generator().manual_seed(hvd.rank()))
    seconds: dict[str, list[float]] = {"step": [], "check": []}

    def timed(name: str, work: Any, keep: bool) -> None:
        hvd.allreduce(torch.zeros(1), name="barrier")
        started = time.perf_counter()
        work()
        if keep:
            seconds[name].append(time.perf_counter() - started)

    for number in range(-_NUM_WARMUP, options.repeat):
        torch.autograd.backward([(parameter * given).sum() for parameter in parameters])
        timed("step", optimizer.step, number >= 0)
        optimizer.zero_grad()
        timed("check", optimizer._synchronizer.check_drift, number >= 0)
    gathered = hvd.allgather(torch.tensor([list(seconds.values())], dtype=torch.float64)).numpy()
    ranks, rank = hvd.size(), hvd.rank()
    hvd.shutdown()
    if rank != 0:
        return None
    rounds = dict(zip(seconds, 1e3 * gathered.mean(axis=0), strict=True))
    share = float(np.median(rounds["check"]) / (_EVERY * np.median(rounds["step"])))
    return {
        "benchmark": "drift",
        "elements": size * _PARAMETERS,
        "compared_bytes": 3 * 4 * size * _PARAMETERS,
        "sparsifier": options.sparsifier,
        "ranks": ranks,
        "rounds": options.repeat,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "check_every": _EVERY,
        "budget": _BUDGET,
        "share": share,
        "ms": {name: spread(values) for name, values in rounds.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints.

    Args:
        arguments: of the command line; None takes the process's own.

    Returns:
        The exit code: 1 if --check found the budget exceeded.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="scripts/bench drift", description=__doc__)
    parser.add_argument("--elements", type=count, default=25_600_000, help="n (default %(default)s)")
    parser.add_argument("--sparsifier", default="exdyna:density=0.001", help="default: %(default)s")
    parser.add_argument("--ranks", type=count, default=2, help="on this machine (default %(default)s)")
    parser.add_argument("--repeat", type=count, default=15, help="rounds (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE")
    parser.add_argument("--check", action="store_true", help="fail if the budget is exceeded")
    options = parser.parse_args(given)
    is_rank = "HOROVOD_RANK" in os.environ
    result: dict[str, Any] | None = {"command": command_line("drift", given)}
    result = _measure(options) if is_rank else result
    if result is None:
        return 0
    if not is_rank:
        result |= launched("benchmarks.drift", options.ranks, given)
        for name, values in result["ms"].items():
            print(f"{name:6} {values['median']:8.2f} ms  ({values['low']:.2f}, {values['high']:.2f})")
        print(f"every {_EVERY} steps: {100 * result['share']:.4f} % of a step")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 1 if options.check and not is_rank and result["share"] > _BUDGET else 0


if __name__ == "__main__":
    sys.exit(main())
