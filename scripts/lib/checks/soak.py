#!/usr/bin/env python3
"""Trains for long on real ranks that are killed and resumed at random, and compares every step.

Gradients depend on rank and step alone. So the weights after a step are the same on all ranks, and however
often the step is repeated. A kill may hit a checkpoint that is being written. Memory, threads and collectives
in flight must not grow once a process is warm.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SHAPES = {"first": (200, 30), "bias": (7,), "second": (30, 5, 11)}
RECIPE, SAVE_STEPS, LOOK_STEPS, WARM_STEPS, FLAT = "exdyna:density=0.05", 20, 20, 100, 0.01


def worker(folder: Path, steps: int) -> None:
    """Runs one rank from the newest checkpoint to the end."""
    import numpy as np
    import torch

    import horovod_sparse.torch as hvd
    from horovod_sparse.torch.driver import present_start

    torch.set_num_threads(1)
    hvd.init()
    rank = hvd.rank()
    pages = np.random.default_rng(rank).standard_normal((7, sum(int(np.prod(s)) for s in SHAPES.values())))
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(s)) for name, s in SHAPES.items()})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5),
        model.named_parameters(),
        compression=hvd.Compression.parse(RECIPE),
        bucket_bytes=10_000,
    )
    first = 0
    if hvd.broadcast_object(any((folder / "saved").glob("step-*")), 0, name="any"):
        first = hvd.load(folder / "saved", optimizer, model=model)
    with open(folder / f"rank-{rank}.jsonl", "a", buffering=1) as file:
        for step in range(first, steps):
            page = np.roll(pages[step % 7], step) * (1.0 + 0.5 * np.sin(step))
            # sums of these are exact: with three ranks or more the order of a sum, and so its rounding, goes
            # by what Horovod happens to fuse, in any two runs
            page = np.clip(np.rint(page * 64), -256, 256) / 64
            loss, start = torch.zeros(()), 0
            for name, shape in SHAPES.items():
                part = page[start : start + int(np.prod(shape))].reshape(shape).astype(np.float32)
                loss, start = loss + (model[name] * torch.from_numpy(part)).sum(), start + part.size
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            digest = 0
            for parameter in model.parameters():
                digest = zlib.crc32(parameter.detach().numpy(), digest)
            facts = {"step": step, "digest": digest, "pid": os.getpid()}
            if step % LOOK_STEPS == 0:
                held = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                handles = len(present_start()) if hvd.size() > 1 else 0
                facts |= {"bytes": held, "threads": threading.active_count(), "handles": handles}
                facts |= {"tasks": len(os.listdir("/proc/self/task"))}
            file.write(json.dumps(facts) + "\n")
            if (step + 1) % SAVE_STEPS == 0:
                hvd.save(folder / "saved", optimizer, model=model)


def entries(folder: Path, last: bool = False) -> list[dict[str, int]]:
    """Returns what all ranks wrote, or the last entry of each, less lines that a kill cut short."""
    found = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        own: list[Any] = []
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 1000) if last else 0)
            for line in file.read().splitlines():
                with contextlib.suppress(ValueError):
                    own.append(json.loads(line))
        found += [one for one in own if isinstance(one, dict)][-1 if last else 0 :]
    return found


def last_step(folder: Path) -> int:
    return max((entry["step"] for entry in entries(folder, last=True)), default=-1)


def soak(given: argparse.Namespace) -> dict[str, Any]:
    """Trains to the end, however often it is killed; returns what came of it."""
    steps, ranks, kills = given.steps, given.ranks, given.kills
    draw, started = random.Random(given.seed), time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    marks = sorted(draw.randrange(steps) for _ in range(kills))
    with tempfile.TemporaryDirectory() as name:
        folder, num_starts = Path(name), 0
        while last_step(folder) < steps - 1:
            if num_starts > kills:
                raise SystemExit(f"it did not end by itself: {(folder / 'log').read_text()[-3000:]}")
            inner = [sys.executable, __file__, "--worker", name, "--steps", str(steps)]
            with open(folder / "log", "w") as log:
                command = ["horovodrun", "--gloo", "-np", str(ranks), *inner]
                job = subprocess.Popen(
                    command, stdout=log, stderr=log, env=environment, start_new_session=True
                )
            num_starts, before = num_starts + 1, last_step(folder)
            mark = max(marks.pop(0), before + 1) if marks else None
            while job.poll() is None:
                time.sleep(0.02)
                if mark is not None and last_step(folder) >= mark:
                    time.sleep(draw.random() * 0.05)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(draw.choice(entries(folder, last=True))["pid"], signal.SIGKILL)
                    job.wait(60)
        found = figures(entries(folder), steps, ranks)
    asked = {"steps": steps, "ranks": ranks, "seed": given.seed, "recipe": RECIPE}
    return {**asked, "kills": num_starts - 1, "seconds": round(time.monotonic() - started), **found}


def figures(found: list[dict[str, int]], steps: int, ranks: int) -> dict[str, Any]:
    """Returns which steps differ or are missing, and what every process that lived for long came to."""
    digests, lives = collections.defaultdict(list), collections.defaultdict(list)
    for entry in found:
        digests[entry["step"]].append(entry["digest"])
        if "bytes" in entry:
            lives[entry["pid"]].append(entry)
    return {
        "different": sorted(step for step, values in digests.items() if len(set(values)) > 1),
        "missing": [step for step in range(steps) if len(digests[step]) < ranks],
        "repeated": len(found) - steps * ranks,
        "lives": [life for looks in lives.values() if (life := one_life(looks))],
    }


def one_life(looks: list[dict[str, int]]) -> dict[str, Any]:
    """Returns what a warm process came to, or nothing of one that did not live for long."""
    warm = looks[WARM_STEPS // LOOK_STEPS :]
    quarter = len(warm) // 4
    if quarter < 2:
        return {}
    early, late = (
        statistics.median(entry["bytes"] for entry in part) for part in (warm[:quarter], warm[-quarter:])
    )
    grown = ["memory"] if late > early * (1 + FLAT) else []
    grown += [key for key in ("threads", "tasks", "handles") if warm[-1][key] > warm[0][key]]
    mebibytes = [round(held / 2**20, 2) for held in (early, late)]
    return {"steps": len(warm) * LOOK_STEPS, "mebibytes": mebibytes, "grown": grown}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/check soak", description=__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=20_000, help="steps of the training (default %(default)s)")
    add("--ranks", type=int, default=4, help="ranks, on this machine (default %(default)s)")
    add("--kills", type=int, default=20, help="how often a rank is killed (default %(default)s)")
    add("--seed", type=int, default=0, help="draws the steps of the kills (default %(default)s)")
    add("--output", type=Path, metavar="FILE", help="write the figures as JSON to FILE")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        worker(given.worker, given.steps)
        return
    result = soak(given)
    if given.output is not None:
        command = shlex.join(["scripts/check", "soak", *sys.argv[1:]])
        given.output.write_text(json.dumps({"command": command, **result}, indent=1) + "\n")
    grown = sorted({what for life in result["lives"] for what in life["grown"]})
    missing, different = result["missing"], result["different"]
    print(
        f"{result['steps']} steps, {result['ranks']} ranks, {result['kills']} kills, {result['seconds']} s: "
        f"steps missing {len(missing)}, different {len(different)}, grown {grown or 'nothing'}"
    )
    if different or missing or grown:
        raise SystemExit(f"different: {different[:5]}, missing: {missing[:5]}, grown: {grown}")


if __name__ == "__main__":
    main()
