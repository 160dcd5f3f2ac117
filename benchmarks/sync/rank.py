"""One rank of `scripts/bench sync`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.common.gradients import random_layers
from benchmarks.sync.ddp_methods import SUFFIX, DdpMethod, start_torch_distributed
from benchmarks.sync.methods import Synthetic, make_method


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Every method in turn."""
    layers = [(name, size) for name, size in settings["layers"] or ()]
    sizes = [size for _, size in layers] or random_layers(settings["elements"])
    model = Synthetic(layers or [("gradient", settings["elements"])], sizes)
    methods = [
        make_method(name, model, settings["density"], settings["options"], settings["sparsifiers"])
        for name in settings["methods"]
    ]
    if settings["ddp"]:
        start_torch_distributed()
        methods += [DdpMethod(name + SUFFIX, model, text) for name, text in settings["ddp"].items()]
    ranks.say("ready")
    own = ranks.own_traffic(10)
    results = ranks.results_of(methods, settings["repeat"], own)
    peak = hvd.allgather_object(_peak_bytes())
    return {"horovod_own": own, "peak_bytes_of_ranks": int(np.sum(peak)), "results": results}


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit(ranks.main(measure))
