"""Score over seconds of dense and sparse training at 1 and 10 Gbit/s, and of PyTorch's PowerSGD.

How a score grows with steps does not depend on the network: every method trains each model once per seed, on
two real ranks of this machine. How long an iteration takes does: all methods take turns in one launch on two
hosts of scripts/cluster, per model and rate. Seconds at a step are its number times the median iteration.

scripts/study time_to_accuracy           run what is missing, then draw and write the table
scripts/study time_to_accuracy --train   no hosts, so no root: the trainings only
scripts/study time_to_accuracy --time    iterations only, on a machine with nothing else to do
scripts/study time_to_accuracy --draw    only picture and table, from docs/measurements/time_to_accuracy.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.hosts import LOOPBACK, NETWORKS, Hosts, ThisMachine, cluster_for, machine_facts
from horovod_sparse.plans.dense import TENSOR_SELECTION_VARIABLE
from studies import results
from studies.time_to_accuracy import links
from studies.time_to_accuracy.curves import FILE, SAME_STEPS, SCORES, table
from studies.time_to_accuracy.images import make_images
from studies.time_to_accuracy.picture import draw

CLUSTER = Path(__file__).parents[3] / "scripts" / "cluster"
PICTURE = results.PICTURES / "time_to_accuracy.png"
RANK, MARK = "studies.time_to_accuracy.rank", "finished "
SIZE, SEEDS, RATES = 2, (0, 1, 2), ("1gbit", "10gbit")
#: steps of a training, and between two tests
STEPS = {"digits": (160, 16), "resnet20": (160, 16), "gpt": (240, 20)}
DENSITY = {"digits": 0.01, "resnet20": 0.01, "gpt": 0.05}
SPARSIFIERS = ("topk", "exdyna", "spardl", "dragonn", "dgc")
#: with the feedback that suits the optimizer
BEST = "topk, best"
METHODS = ("dense", "dense, DDP", "fp16", *SPARSIFIERS, BEST, "PowerSGD")


def texts(model: str, methods: Sequence[str]) -> dict[str, str]:
    """Methods -> what a rank makes of them."""
    known = {"dense": "none", "dense, DDP": "ddp", "fp16": "fp16", "PowerSGD": "powersgd 4"}
    known |= {name: f"{name}:density={DENSITY[model]}" for name in SPARSIFIERS}
    known[BEST] = f"{known['topk']},feedback=best"
    return {name: known[name] for name in methods}


def shape_of(model: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Arguments of a training."""
    shape: dict[str, Any] = {"folder": folder} if model == "resnet20" else {}
    if options.tiny:
        shape |= {"digits": {"hidden": 16, "batch_size": 4}, "resnet20": {"batch_size": 2, "num_test": 4},
                  "gpt": {"layers": 1, "width": 8, "length": 8, "num_test": 4}}[model]  # fmt: skip
    return shape


def run(
    hosts: Hosts, options: argparse.Namespace, settings: dict[str, Any], on_line: Any = lambda line: None
) -> Any:
    """One launch of the ranks."""
    # what is asked for is measured, whether it can win or not
    variables = {TENSOR_SELECTION_VARIABLE: "all"}
    if hosts.rate == LOOPBACK:
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return hosts.run(
        RANK,
        settings,
        num_ranks=SIZE,
        network=NETWORKS["gloo"],
        variables=variables,
        timeout_s=options.timeout,
        on_progress=on_line,
    )


def train(options: argparse.Namespace, result: dict[str, Any], folder: str) -> None:
    """Trains what is missing, one seed before the next; each run is written when it is done."""
    runs = result.setdefault("runs", {})
    for seed in options.seeds:
        for model in options.models:
            wanted = [name for name in options.methods if name not in SAME_STEPS]
            todo = [name for name in wanted if options.again or f"{model}/{name}/seed {seed}" not in runs]
            if not todo:
                continue
            steps, every = STEPS[model]
            settings = {
                "work": "train", "model": model, "shape": shape_of(model, options, folder),
                "methods": texts(model, todo), "runs": [[name, seed] for name in todo],
                "steps": options.steps or steps, "every": every,
            }  # fmt: skip

            def keep(line: str) -> None:
                _, found, text = line.partition(MARK)
                if not found:
                    return
                model, name, seed, told = json.loads(text)
                runs[f"{model}/{name}/seed {seed}"] = told
                results.save(options.json, result)
                last = SCORES[model].shown.format(told["curve"][-1][1])
                print(
                    f"{model}, {name}, seed {seed}: {'diverged' if told['diverged'] else last}",
                    file=sys.stderr,
                )

            run(ThisMachine("this machine", SIZE, LOOPBACK), options, settings, keep)


def measure(options: argparse.Namespace, result: dict[str, Any], folder: str) -> None:
    """Times the iterations that are missing: all methods of a model in one launch."""
    timings = result.setdefault("timings", {})
    for rate in options.rates:
        todo = [model for model in options.models if options.again or f"{model}/{rate}" not in timings]
        if not todo:
            continue
        with cluster_for(SIZE, rate, options.name) as hosts:
            if rate != LOOPBACK:
                result.setdefault("reached", {})[rate] = reached_by(hosts)
            for model in todo:
                settings = {
                    "work": "time", "model": model, "shape": shape_of(model, options, folder),
                    "methods": texts(model, options.methods), "repeat": options.repeat,
                }  # fmt: skip
                before = machine_facts()
                found = run(hosts, options, settings)
                timings[f"{model}/{rate}"] = {"machine": before, **found}
                results.save(options.json, result)
                for name, item in found["methods"].items():
                    print(f"{model}, {rate}, {name}: {1e3 * item['median']:.1f} ms", file=sys.stderr)


def reached_by(hosts: Hosts) -> dict[str, float]:
    """Bits per second that TCP gets through between the hosts: one way, and both ways at once."""
    command = [str(CLUSTER), "measure", "--name", hosts.name, "--json"]
    told = subprocess.run(
        command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    ).stdout
    return {item["pattern"]: round(item["slowest_bits_per_second"]) for item in json.loads(told)}


@contextlib.contextmanager
def images_at(folder: Path | None) -> Iterator[str]:
    """CIFAR-10 where it is; else made images, on disk for as long as they are needed."""
    if folder is not None:
        yield str(folder.resolve())
        return
    with tempfile.TemporaryDirectory(prefix="horovod_sparse_images") as made:
        make_images(Path(made))
        yield made


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="scripts/study time_to_accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    only = made.add_mutually_exclusive_group()
    only.add_argument("--train", action="store_true", help="time nothing")
    only.add_argument("--time", action="store_true", help="train nothing")
    only.add_argument("--draw", action="store_true", help="measure nothing")
    told = "losses over slow links, of methods that have this in their name"
    only.add_argument("--links", nargs="?", const="", metavar="TEXT", help=told)
    add("--sample", type=float, metavar="SECONDS", help="with --links: more of each, for its time")
    add("--again", action="store_true", help="measure anew")
    add(
        "--models",
        nargs="+",
        choices=list(SCORES),
        default=list(SCORES),
        metavar="MODEL",
        help="default: all",
    )
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME", help="default: all")
    add("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="N", help="(default %(default)s)")
    add("--rates", nargs="+", default=list(RATES), help=f"of the hosts, or {LOOPBACK} (default %(default)s)")
    add("--data", type=Path, metavar="FOLDER", help="cifar-10-batches-py (default: made images)")
    add("--steps", type=int, help="of a training (default: by model)")
    add("--repeat", type=int, default=15, help="iterations that are timed (default %(default)s)")
    add("--tiny", action="store_true", help="models of a few parameters: to try the command out")
    add("--name", default="cluster", help="cluster to use if it is up (default %(default)s)")
    add("--timeout", type=float, default=1800, metavar="SECONDS", help="of a launch (default %(default)s)")
    add("--json", type=Path, default=FILE, metavar="FILE", help="(default %(default)s)")
    add("--picture", type=Path, metavar="FILE", help="(default: docs/pictures/time_to_accuracy.png)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, draws, and writes the table."""
    options = parser().parse_args(arguments)
    # as an exception would end it: with its ranks
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    result = results.load(options.json)
    if options.links is not None:
        links.measure(options)
        result = results.load(options.json)
    elif not options.draw:
        result |= {
            "command": "scripts/study time_to_accuracy",
            "machine": results.machine(),
            "size": SIZE,
            "rates": options.rates,
            "methods": list(options.methods),
            "densities": DENSITY,
            "images": "CIFAR-10" if options.data else "made",
        }
        with images_at(options.data) as folder:
            if not options.time:
                train(options, result, folder)
            if not options.train:
                measure(options, result, folder)
        results.save(options.json, result)
    print(f"{table(result)}\n\n{links.table(result)}")
    if options.json == FILE:
        results.write_appendix()
    if result.get("timings") and (options.json == FILE or options.picture):
        draw(result, options.picture or PICTURE)
        links.draw(result, results.PICTURES / "time_to_dense.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
