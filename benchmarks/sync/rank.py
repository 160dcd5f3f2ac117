"""One rank of `scripts/bench sync`."""

from __future__ import annotations

import resource
import sys
from typing import Any

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.sync.methods import Gradient, make_method


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Every method in turn."""
    gradient = Gradient(settings["elements"])
    methods = [
        make_method(name, gradient, settings["density"], settings["sparsifiers"])
        for name in settings["methods"]
    ]
    found = ranks.results_of(methods, settings["repeat"])
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**found, "peak_bytes_of_ranks": sum(hvd.allgather_object(peak))}


if __name__ == "__main__":
    sys.exit(ranks.main(measure))
