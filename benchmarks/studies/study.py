"""A study: runs with names, how one of them is measured, and how all are shown."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.tables import markdown as markdown

ROOT = Path(__file__).resolve().parents[2]
MEASUREMENTS = ROOT / "docs" / "measurements"
Result = dict[str, Any]


def load(path: Path) -> Result:
    """Reads a measurement; a missing file is an empty one."""
    return json.loads(path.read_text()) if path.exists() else {}


def measured(name: str) -> Result:
    """Reads a committed measurement by its name."""
    return json.loads((MEASUREMENTS / f"{name}.json").read_text())


def parsed(run: str) -> tuple[str, float, int]:
    """Splits "ROW/rate 0.1/seed 0" into row, rate and seed."""
    row, _, rest = run.partition("/rate ")
    rate, _, seed = rest.partition("/seed ")
    return row, float(rate), int(seed)


def at_best_rate(
    runs: Result, name: str, score: str = "training_bits"
) -> tuple[float, dict[int, Result]] | None:
    """Returns the rate of the lowest score with the first seed, and its runs by seed; None if not measured.

    Args:
        runs: by names; those that diverged have no score.
        name: of a method.
        score: what is compared.
    """
    rates: dict[float, dict[int, Result]] = {}
    for label, run in runs.items():
        row, rate, seed = parsed(label)
        if row == name:
            rates.setdefault(rate, {})[seed] = run
    tried = [(rate, seeds) for rate, seeds in rates.items() if 0 in seeds]
    return min(tried, key=lambda item: float(item[1][0].get(score, math.inf)), default=None)


def around(runs: Result, row: str, guess: float, score: str = "training_bits") -> list[str]:
    """Names the runs that show a row's best rate: the best so far, twice and half of it."""
    best = at_best_rate(runs, row, score)
    rates = (guess,) if best is None else (best[0], best[0] * 2, best[0] / 2)
    return [f"{row}/rate {rate:g}/seed 0" for rate in rates]


def behind(runs: Result, name: str, dense: str, score: str) -> list[float]:
    """Returns how much more a method scores than dense training, each at its best rate, per common seed."""
    found = [at_best_rate(runs, one) for one in (name, dense)]
    own, base = ({} if one is None else one[1] for one in found)
    return [own[seed][score] - base[seed][score] for seed in sorted(own.keys() & base.keys())]


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a measurement, one line per run, so that a change shows which run it belongs to."""
    lines = []
    for key, value in result.items():
        if key == "runs":
            runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in value.items())
            lines.append(f' "runs": {{\n{runs}\n }}')
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def rounded(values: Iterable[float], digits: int = 4) -> list[float | None]:
    """Shortens numbers; NaN becomes None."""
    return [None if math.isnan(value) else float(f"{value:.{digits}g}") for value in values]


@dataclass(frozen=True)
class Study:
    """Trainings of one kind, whose numbers are in docs/measurements.

    Attributes:
        name: of the command.
        names: of all runs, in the order in which they are measured.
        measure: one run by its name.
        table: the tables of the appendix.
        stem: of the JSON file (default: the name).
        facts: what the file says beside the runs.
        complete: measures what belongs to no run, if it is missing.
    """

    name: str
    names: Callable[[], Sequence[str]]
    measure: Callable[[str], Result]
    table: Callable[[Result], str]
    stem: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    complete: Callable[[Result], None] = lambda result: None

    @property
    def file(self) -> Path:
        return MEASUREMENTS / f"{self.stem or self.name}.json"

    def main(self, arguments: Sequence[str]) -> None:
        """Measures what is missing, and prints the table."""
        parser = argparse.ArgumentParser(prog=f"scripts/study {self.name}")
        add = parser.add_argument
        add("--only", default="", metavar="TEXT", help="runs that have this in their name")
        add("--again", action="store_true", help="measure anew")
        add("--json", type=Path, default=self.file, metavar="FILE", help="(default %(default)s)")
        options = parser.parse_args(arguments)
        torch.set_num_threads(1)
        result = load(options.json)
        machine = f"{platform.machine()}, Python {platform.python_version()}"
        result |= {"command": f"scripts/study {self.name}", "machine": machine, **self.facts}
        runs = result.setdefault("runs", {}) if self.names() else {}
        done = set() if options.again else set(runs)
        # what a run says may ask for further ones
        while missing := [run for run in self.names() if options.only in run and run not in done]:
            print(missing[0], file=sys.stderr)
            runs[missing[0]] = self.measure(missing[0])
            done.add(missing[0])
            save(options.json, result)
        self.complete(result)
        save(options.json, result)
        print(self.table(result))


def launched(command: Sequence[str], timeout_s: float = 1200, **variables: str) -> Result:
    """Runs an example to its end; returns the JSON that it writes, without times.

    Args:
        command: but for `--json FILE`.
        timeout_s: after which the launch has failed.
        **variables: of the environment, beside the caller's.

    Returns:
        ``{"diverged": True}`` where its gradients became infinite.

    Raises:
        RuntimeError: if the launch failed or took too long, with the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        words = ["timeout", "--kill-after=15", str(timeout_s), *command, "--json", str(file)]
        env = {**os.environ, **variables}
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env)
        if done.returncode == 1 and "NonFiniteGradientError" in done.stderr:
            return {"diverged": True}
        if done.returncode != 0 or not file.exists():
            end = (done.stdout + done.stderr)[-2000:]
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {end}")
        run: Result = json.loads(file.read_text())
    # times on a machine that others use say nothing
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in run.items()
        if not name.endswith("seconds")
    }
