"""`horovod-sparse worth-it`: what a step takes dense, in float16 and sparse, by arithmetic.

Each way takes the step's computing, then its bytes over the bandwidth, then its rounds times the latency.
Nothing is measured: `horovod-sparse calibrate` does that.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from horovod_sparse.cli.main import bits_per_second, count, num_parameters, positive, time
from horovod_sparse.errors import ArgumentError

#: kept fraction that the documentation recommends to begin with
DENSITY = 0.01
#: bytes of a selected element: an int32 index and a float32 value
_SELECTED_BYTES = 8
#: every, delay, and steps to a loss, by those of every=1 (docs/appendix/results.md#networks)
_SCHEDULES = (1, 0, 1.0), (1, 1, 1.2), (4, 1, 1.4), (15, 1, 2.3)
#: seconds that one CPU core needs to fold and select a parameter; said, and not counted
_SELECTION_SECONDS = 1e-9
#: fraction of a step that a way has to save to be recommended
_WORTH = 0.05
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "rmsprop": "RMSprop", "sgd": "SGD"}
_SPARSE = 'import horovod_sparse.ddp; horovod_sparse.ddp.attach(model, "best:density={:g}", optimizer{})'
_FP16 = (
    "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook; "
    "model.register_comm_hook(None, fp16_compress_hook)"
)


class Case(NamedTuple):
    """The user's model and cluster: parameters, seconds of a step, nodes, bandwidth and latency.

    `message_bytes` are those of a sparse message by parameter; `exchange_seconds` and `dense_seconds` are a
    rank's work for a sparse and for a dense exchange.
    """

    num_parameters: float
    step_seconds: float
    nodes: int
    bits_per_second: float
    latency_seconds: float
    message_bytes: float = DENSITY * _SELECTED_BYTES
    exchange_seconds: float = 0.0
    dense_seconds: float = 0.0

    def seconds(self, num_bytes: float, rounds: int) -> float:
        """Returns the seconds that `rounds` messages of `num_bytes` each take."""
        return rounds * (8 * num_bytes / self.bits_per_second + self.latency_seconds)


class Row(NamedTuple):
    """A way to synchronize gradients: the seconds that it adds to a step, and the code that chooses it.

    `steps`: its steps to a loss, as a multiple of those with every=1 and delay=0.
    """

    name: str
    added_seconds: float
    paste: str
    steps: float = 1.0


def rows_of(case: Case) -> list[Row]:
    """Returns all ways to synchronize: dense and fp16 in rings of 2 (P - 1) rounds, sparse in P - 1 messages.

    A sparse exchange has the elements of H steps with every=H; with delay=1 it travels behind the next H.
    """
    n, others, rows = case.num_parameters, case.nodes - 1, list[Row]()
    for name, size, paste in ("dense", 4, "nothing: that is DistributedDataParallel"), ("fp16", 2, _FP16):
        rows.append(Row(name, case.dense_seconds + case.seconds(size * n / case.nodes, 2 * others), paste))
    for every, delay, steps in _SCHEDULES:
        given = f", every={every}" * (every > 1) + f", delay={delay}" * (delay > 0)
        exchange = case.seconds(every * others * case.message_bytes * n, 1)
        exposed = max(0.0, exchange - delay * every * case.step_seconds) + case.exchange_seconds
        rows.append(Row(f"sparse{given}", exposed / every, _SPARSE.format(DENSITY, given), steps))
    return rows


def recommended_row(case: Case, rows: list[Row]) -> Row:
    """Returns the row that trains to a given loss soonest; a later row must be 5 % faster."""
    best, least = rows[0], case.step_seconds + rows[0].added_seconds
    for row in rows[1:]:
        seconds = row.steps * (case.step_seconds + row.added_seconds)
        if seconds < (1.0 - _WORTH) * least:
            best, least = row, seconds
    return best


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = "horovod-sparse worth-it --params 124M --step-ms 180 --nodes 4 --bandwidth 10gbit"
    add("--params", type=num_parameters, required=True, metavar="N", help="number of parameters, as in 124M")
    add("--step-ms", type=positive, required=True, metavar="MS", help="of a rank's computing in a step")
    add("--nodes", type=count, required=True, metavar="P", help="number of nodes, 2 or more, one rank each")
    add("--bandwidth", type=bits_per_second, required=True, metavar="RATE", help="a node's, as in 10gbit")
    text = "of a message, as in 20ms (default: 50us)"
    add("--latency", type=time, default=50e-6, metavar="TIME", help=text)
    add("--optimizer", choices=tuple(_OPTIMIZERS), default="adamw", help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Prints each row's seconds, the recommended code, caveats and assumptions. Returns the exit code."""
    if options.nodes < 2:
        raise ArgumentError("--nodes", options.nodes, "two nodes or more: one alone sends nothing")
    case = Case(options.params, options.step_ms / 1e3, options.nodes, options.bandwidth, options.latency)
    # every > 1 saves latencies alone, and its steps to a loss were measured with AdamW alone
    rare = options.optimizer != "sgd" and case.latency_seconds >= 1e-3
    rows = [row for row in rows_of(case) if rare or "every" not in row.name]
    for name, added, _, steps in rows:
        longer = f"{100 * added / case.step_seconds:.3g} % longer than alone"
        more = f", {steps:g} times the steps" if steps > 1.0 else ""
        print(f"{name}: {case.step_seconds + added:.3g} s a step, {longer}{more}")
    where = f"model: DistributedDataParallel, optimizer: torch.optim.{_OPTIMIZERS[options.optimizer]}"
    print(f"paste: {recommended_row(case, rows).paste}  # {where}; untested on GPUs")
    print("accuracy: not predicted; docs/report.md has what was measured, in small trainings")
    selecting = f"{_SELECTION_SECONDS * case.num_parameters:.2g} s on a CPU core"
    print(
        f"assumed: one rank a node, {case.latency_seconds:g} s latency; dense: a ring allreduce of "
        f"2 (P - 1) / P of the bytes; sparse: topk, {DENSITY:g} of all elements, 8 bytes each, to P - 1, and "
        "one latency; more steps: a small GPT's with AdamW; nothing hides behind backward; "
        f"selection is not counted ({selecting})"
    )
    return 0
