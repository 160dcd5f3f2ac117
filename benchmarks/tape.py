"""`scripts/bench tape`: what a tape inside `tf.function` adds to backward, local work and collectives.

Three things are timed in turn, by every rank at the same time: a step with a plain `tf.GradientTape`; the
same step with our tape; and what the tape has to do, without it: the same buckets' coroutines on NumPy
arrays, whose requests Horovod's operations carry out one by one. What is left of the second when the other
two are taken away is the tape's own: host functions, their scheduling, and what it costs to merge gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

for _variable in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402

from benchmarks.common.launched import launched  # noqa: E402
from benchmarks.common.options import command_line, count  # noqa: E402
from benchmarks.common.samples import spread  # noqa: E402

#: milliseconds that the tape may add
_BUDGET_MS = 2.0
_BATCH, _NUM_WARMUP = 16, 5


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench tape", description=__doc__)
    parser.add_argument("--variables", type=count, default=20, help="an even number (default %(default)s)")
    parser.add_argument("--width", type=count, default=256, help="of a layer (default %(default)s)")
    parser.add_argument("--sparsifier", default="exdyna:density=0.01", help="default: %(default)s")
    parser.add_argument("--ranks", type=count, default=2, help="on this machine (default %(default)s)")
    parser.add_argument("--repeat", type=count, default=60, help="rounds (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE")
    parser.add_argument("--check", action="store_true", help="fail if the budget is exceeded")
    options = parser.parse_args(arguments)
    if options.variables % 2:
        parser.error("--variables: a layer has two, so give an even number")
    return options


class _Network:
    """Layers of the same width: half of the variables are matrices, half are vectors."""

    def __init__(self, num_variables: int, width: int) -> None:
        import tensorflow as tf

        self._tf = tf
        generator = np.random.default_rng(0)
        self.weights = []
        for layer in range(num_variables // 2):
            matrix = (generator.standard_normal((width, width)) / width**0.5).astype(np.float32)
            self.weights.append(self._tf.Variable(matrix, name=f"layer{layer}/kernel"))
            self.weights.append(self._tf.Variable(self._tf.zeros([width]), name=f"layer{layer}/bias"))

    def step(self, wrap: Callable[[Any], Any]) -> Any:
        """A step of descent as a graph; `wrap` takes and gives a tape."""
        tf, weights = self._tf, self.weights

        @tf.function
        def step(inputs: Any) -> None:
            with tf.GradientTape() as tape:
                values = inputs
                for kernel, bias in zip(weights[::2], weights[1::2], strict=True):
                    values = tf.nn.relu(values @ kernel + bias)
                loss = tf.reduce_mean(values**2)
            for weight, gradient in zip(weights, wrap(tape).gradient(loss, weights), strict=True):
                weight.assign_sub(1e-3 * gradient)

        return step


def _requests_alone(compression: Any, weights: Sequence[Any]) -> Callable[[], None]:
    """What a tape has to do in a step, without it."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from horovod_sparse.tensorflow import collectives

    synchronizer = compression.bind()
    generator = np.random.default_rng(hvd.rank())
    drawn = {
        name: generator.standard_normal(weight.shape).astype(np.float32)
        for name, weight in zip([weight.name.split(":")[0] for weight in weights], weights, strict=True)
    }
    synchronizer.synchronize([tf.constant(drawn[name]) for name in drawn], weights)  # makes the buckets

    def run() -> None:
        for part in synchronizer.parts:
            task, gradients = part.task, [drawn[name] for name in part.names]
            buffer, splits = task.start(part.begin(0.1, gradients), synchronizer.place)
            for number, kind in enumerate(task.kinds):
                name = f"{task.name}.{number}"
                output = collectives.carry_out(kind, buffer, splits, name, hvd.global_process_set)
                buffer, splits = task.resume(output[0].numpy(), output[1].numpy())
            part.apply(1.0)

    return run


def _measure(options: argparse.Namespace) -> dict[str, Any] | None:
    """On every rank; the result on rank 0."""
    if options.ranks == 1:
        os.environ.setdefault("HOROVOD_ELASTIC", "1")  # others may join, so one alone synchronizes, too
    import tensorflow as tf

    import horovod_sparse.tensorflow as hvd

    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    network = _Network(options.variables, options.width)
    compression = hvd.Compression.parse(options.sparsifier)
    inputs = tf.random.stateless_normal([_BATCH, options.width], [hvd.rank(), 0])
    plain = network.step(lambda tape: tape)
    ours = network.step(lambda tape: hvd.DistributedGradientTape(tape, compression=compression))
    requests = _requests_alone(hvd.Compression.parse(options.sparsifier), network.weights)
    works = {"plain": lambda: plain(inputs), "tape": lambda: ours(inputs), "requests": requests}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(-_NUM_WARMUP, options.repeat):
        for name, work in works.items():
            hvd.allreduce(tf.zeros([1]), name="barrier")
            started = time.perf_counter()
            work()
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
    gathered = hvd.allgather(tf.constant([list(seconds.values())], tf.float64), name="seconds").numpy()
    size, rank = hvd.size(), hvd.rank()
    hvd.shutdown()
    if rank != 0:
        return None
    rounds = 1e3 * gathered.mean(axis=0)  # [work, round], means over ranks
    by_name = dict(zip(works, rounds, strict=True))
    added = by_name["tape"] - by_name["plain"] - by_name["requests"]
    return {
        "benchmark": "tape",
        "variables": options.variables,
        "elements": sum(int(np.prod(weight.shape)) for weight in network.weights),
        "sparsifier": options.sparsifier,
        "ranks": size,
        "rounds": options.repeat,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "budget_ms": _BUDGET_MS,
        "ms": {**{name: spread(values) for name, values in by_name.items()}, "added": spread(added)},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints.

    Args:
        arguments: of the command line; None takes the process's own.

    Returns:
        The exit code: 1 if --check found the budget exceeded.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _arguments(given)
    os.environ["HOROVOD_SPARSE_TENSOR_SELECTION"] = "all"  # what is asked for is measured
    is_rank = "HOROVOD_RANK" in os.environ
    if options.ranks > 1 and not is_rank:
        result: dict[str, Any] | None = {
            "command": command_line("tape", given),
            **launched("benchmarks.tape", options.ranks, given),
        }
    else:
        result = _measure(options)
    if result is None:
        return 0
    for name, values in result["ms"].items():
        print(f"{name:10} {values['median']:8.2f} ms  ({values['low']:.2f}, {values['high']:.2f})")
    if options.json:
        Path(options.json).write_text(
            json.dumps({"command": command_line("tape", given), **result}, indent=2) + "\n"
        )
    return 1 if options.check and not is_rank and result["ms"]["added"]["median"] > _BUDGET_MS else 0


if __name__ == "__main__":
    sys.exit(main())
