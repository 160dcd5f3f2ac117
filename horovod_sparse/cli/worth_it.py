"""`horovod-sparse worth-it`: what a step takes dense, in float16 and sparse, by arithmetic.

Each way takes the step's computing, then its bytes over the bandwidth, then its rounds times the latency.
Nothing is measured: `horovod-sparse calibrate` does that.
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

from horovod_sparse.cli.console import console, show
from horovod_sparse.cli.options import bits_per_second, count, num_parameters, time
from horovod_sparse.errors import ArgumentError

#: kept fraction that the documentation recommends to begin with
DENSITY = 0.01
#: bytes of a selected element: an int32 index and a float32 value
_SELECTED_BYTES = 8
#: seconds that one CPU core needs to fold and select a parameter; said, and not counted
_SELECTION_SECONDS = 1e-9
#: a row is recommended if it saves at least this fraction of the step without it
_WORTH = 0.05
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "rmsprop": "RMSprop", "sgd": "SGD"}
_FP16 = (
    "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook; "
    "model.register_comm_hook(None, fp16_compress_hook)"
)


class Case(NamedTuple):
    """A model on a cluster: its parameters, the seconds of its step, nodes, bandwidth and latency."""

    num_parameters: float
    step_seconds: float
    nodes: int
    bits_per_second: float
    latency_seconds: float

    def sending_seconds(self, num_bytes: float, rounds: int) -> float:
        """Returns the seconds in which a node sends so many bytes in so many rounds."""
        return 8 * num_bytes / self.bits_per_second + rounds * self.latency_seconds

    def ring_allreduce_seconds(self, num_bytes: float) -> float:
        """Returns the seconds of a ring: 2 (P - 1) rounds, each of a P-th of the bytes."""
        rounds = 2 * (self.nodes - 1)
        return self.sending_seconds(rounds * num_bytes / self.nodes, rounds)

    def allgather_seconds(self, num_bytes: float) -> float:
        """Returns the seconds in which each node sends its message to the P - 1 others, all in one round."""
        return self.sending_seconds((self.nodes - 1) * num_bytes, 1)


class Row(NamedTuple):
    """One way to synchronize: the seconds that it adds to a step, and the line of code that does it."""

    name: str
    added_seconds: float
    paste: str


def rows_of(case: Case, optimizer: str = "adamw") -> list[Row]:
    """Returns every way to synchronize, dense first.

    Example:
        >>> case = Case(1e6, 0.1, 4, 1e9, 1e-3)
        >>> [(row.name, round(row.added_seconds, 5)) for row in rows_of(case)]
        [('dense', 0.054), ('fp16', 0.03), ('sparse', 0.00292)]
    """
    n = case.num_parameters
    selected = max(1, round(DENSITY * n))
    call = (
        f'import horovod_sparse.ddp; horovod_sparse.ddp.attach(model, "best:density={DENSITY:g}", optimizer)'
    )
    where = f"model: DistributedDataParallel, optimizer: torch.optim.{_OPTIMIZERS[optimizer]}"
    return [
        Row("dense", case.ring_allreduce_seconds(4 * n), "nothing: DistributedDataParallel is dense"),
        Row("fp16", case.ring_allreduce_seconds(2 * n), f"{_FP16}  # {where}"),
        Row("sparse", case.allgather_seconds(_SELECTED_BYTES * selected), f"{call}  # {where}"),
    ]


def recommended(case: Case, rows: list[Row]) -> Row:
    """Returns the first row that no later one makes noticeably shorter."""
    best = rows[0]
    for row in rows[1:]:
        if row.added_seconds < best.added_seconds - _WORTH * (case.step_seconds + best.added_seconds):
            best = row
    return best


def lines_of(case: Case, optimizer: str = "adamw") -> list[str]:
    """Returns the answer: a line for every row, the code to paste, what is not said, and what is assumed."""
    rows = rows_of(case, optimizer)
    lines = [
        f"{row.name}: {case.step_seconds + row.added_seconds:.3g} s a step, {row.added_seconds:.3g} s "
        f"({100 * row.added_seconds / case.step_seconds:.0f} %) longer than the step alone"
        for row in rows
    ]
    selecting = _SELECTION_SECONDS * case.num_parameters
    return [
        *lines,
        f"paste: {recommended(case, rows).paste}",
        "accuracy: not predicted; docs/results.md has what was measured, in small trainings",
        f"assumed: one rank a node, {case.latency_seconds:g} s latency; dense: a ring allreduce of "
        f"2 (P - 1) / P of the bytes; sparse: topk, {DENSITY:g} of all elements, 8 bytes each, to P - 1; "
        "nothing hides behind backward; selection is not counted "
        f"({selecting:.2g} s on a CPU core, far less on a GPU)",
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = (
        "Example: horovod-sparse worth-it --params 124M --step-ms 180 --nodes 4 --bandwidth 10gbit. "
        "By arithmetic alone; horovod-sparse calibrate measures a cluster."
    )
    add("--params", type=num_parameters, required=True, metavar="N", help="parameters, as in 124M")
    add("--step-ms", type=float, required=True, metavar="MS", help="forward, backward and update on one rank")
    add("--nodes", type=count, required=True, metavar="P", help="nodes, from 2; one rank on each")
    add("--bandwidth", type=bits_per_second, required=True, metavar="RATE", help="of a node, as in 10gbit")
    add(
        "--latency", type=time, default=50e-6, metavar="TIME", help="of a message, as in 20ms (default: 50us)"
    )
    add("--optimizer", choices=tuple(_OPTIMIZERS), default="adamw", help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Prints the answer."""
    if not 0.0 < options.step_ms < math.inf:
        raise ArgumentError("--step-ms", options.step_ms, "a time in milliseconds above 0")
    if options.nodes < 2:
        raise ArgumentError("--nodes", options.nodes, "two nodes or more: one alone sends nothing")
    if not 1.0 <= options.params <= 1e13:
        raise ArgumentError("--params", options.params, "a number of parameters, from 1 to 1e13")
    case = Case(options.params, options.step_ms / 1e3, options.nodes, options.bandwidth, options.latency)
    for line in lines_of(case, options.optimizer):
        show(console(), line)
    return 0
