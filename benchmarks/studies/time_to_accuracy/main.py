"""Score over seconds of dense and sparse training at 1 and 10 Gbit/s, and of PyTorch's PowerSGD.

How a score grows with steps does not depend on the network: every method trains each model once per seed, on
two real ranks of this machine. How long an iteration takes does: all methods take turns in one launch on two
hosts of scripts/cluster, per model and rate. Seconds at a step are its number times the median iteration.

scripts/study time_to_accuracy                run what is missing, then draw and write the tables
scripts/study time_to_accuracy --part train   no hosts, so no root: the trainings only
scripts/study time_to_accuracy --part time    iterations only, on a machine with nothing else to do
scripts/study time_to_accuracy --part links   losses over slow links
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.hosts import LOOPBACK, NETWORKS, Hosts, ThisMachine, cluster_for, machine_facts
from benchmarks.studies.study import PICTURES, ROOT, Result, load, save
from benchmarks.studies.time_to_accuracy import links
from benchmarks.studies.time_to_accuracy.curves import FILE, SAME_STEPS, SCORES, table
from benchmarks.studies.time_to_accuracy.images import make_images
from benchmarks.studies.time_to_accuracy.picture import draw
from horovod_sparse.plans import TENSOR_SELECTION_VARIABLE

RANK, MARK = "benchmarks.studies.time_to_accuracy.rank", "finished "
SIZE, SEEDS, RATES, REPEAT = 2, (0, 1, 2), ("1gbit", "10gbit"), 15
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


def run(hosts: Hosts, settings: dict[str, Any], on_line: Any = lambda line: None) -> Any:
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
        timeout_s=1800,
        on_progress=on_line,
    )


def train(options: argparse.Namespace, result: Result, shapes: dict[str, Any]) -> None:
    """Trains what is missing, one seed before the next; each run is written when it is done."""
    runs = result.setdefault("runs", {})

    def keep(line: str) -> None:
        _, found, text = line.partition(MARK)
        if found:
            model, name, seed, told = json.loads(text)
            runs[f"{model}/{name}/seed {seed}"] = told
            save(options.json, result)

    for seed in SEEDS:
        for model, (steps, every) in STEPS.items():
            keys = {f"{model}/{name}/seed {seed}": name for name in METHODS if name not in SAME_STEPS}
            wanted = [key for key in keys if options.only in key and (options.again or key not in runs)]
            todo = [keys[key] for key in wanted]
            if todo:
                settings = {"work": "train", "model": model, "shape": shapes[model], "steps": steps}
                settings |= {"methods": texts(model, todo), "runs": [[n, seed] for n in todo], "every": every}
                run(ThisMachine("this machine", SIZE, LOOPBACK), settings, keep)


def measure(options: argparse.Namespace, result: Result, shapes: dict[str, Any]) -> None:
    """Times the iterations that are missing: all methods of a model in one launch."""
    timings = result.setdefault("timings", {})
    for rate in RATES:
        keys = {f"{model}/{rate}": model for model in STEPS}
        todo = [key for key in keys if options.only in key and (options.again or key not in timings)]
        if not todo:
            continue
        with cluster_for(SIZE, rate) as hosts:
            result.setdefault("reached", {})[rate] = reached_by(hosts)
            for key in todo:
                model, before = keys[key], machine_facts()
                settings = {"work": "time", "model": model, "shape": shapes[model], "repeat": REPEAT}
                found = run(hosts, {**settings, "methods": texts(model, METHODS)})
                timings[key] = {"machine": before, **found}
                save(options.json, result)


def reached_by(hosts: Hosts) -> dict[str, float]:
    """Bits per second that TCP gets through between the hosts: one way, and both ways at once."""
    command = [str(ROOT / "scripts" / "cluster"), "measure", "--name", hosts.name, "--json"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return {item["pattern"]: round(item["slowest_bits_per_second"]) for item in json.loads(told.stdout)}


def main(arguments: Sequence[str]) -> None:
    """Measures, draws, and prints the tables."""
    parser = argparse.ArgumentParser(
        prog="scripts/study time_to_accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--part", choices=("train", "time", "links"), help="measure this only")
    add("--only", default="", metavar="TEXT", help="runs that have this in their name")
    add("--again", action="store_true", help="measure anew")
    add("--draw", action="store_true", help="measure nothing")
    add("--json", type=Path, default=FILE, metavar="FILE", help="(default %(default)s)")
    options = parser.parse_args(arguments)
    # as an exception would end it: with its ranks
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    result = load(options.json)
    if not options.draw:
        result |= {"command": "scripts/study time_to_accuracy", "size": SIZE, "rates": list(RATES)}
        result |= {"methods": list(METHODS), "densities": DENSITY, "images": "made"}
        with tempfile.TemporaryDirectory(prefix="horovod_sparse_images") as folder:
            make_images(Path(folder))
            shapes = {model: {"folder": folder} if model == "resnet20" else {} for model in SCORES}
            for part, work in (("train", train), ("time", measure)):
                if options.part in (None, part):
                    work(options, result, shapes)
        save(options.json, result)
        if options.part in (None, "links"):
            links.measure(options.json, options.only, options.again)
            result = load(options.json)
    print(f"{table(result)}\n\n{links.table(result)}")
    if options.json == FILE:
        draw(result, PICTURES / "time_to_accuracy.png")
        links.draw(result, PICTURES / "time_to_dense.png")
