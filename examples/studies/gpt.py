"""examples/gpt_text.py in full on two real ranks, dense and sparse: bits per byte of text it has not seen.

scripts/study gpt               run what is missing, then draw and write the table
scripts/study gpt --only none   these rows only
scripts/study gpt --again       measure anew
scripts/study gpt --draw        only picture and table, from docs/measurements/gpt.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from studies import results

__all__ = ["main", "table"]

FILE = results.MEASUREMENTS / "gpt.json"
EXAMPLE = Path(__file__).parents[1] / "gpt_text.py"
STEPS, SIZE = 1000, 2
_SLOWER, _FASTER = ["--learning-rate", "0.001"], ["--learning-rate", "0.003"]
#: rows of the table -> arguments of the example
ROWS = {
    "none": ["--compression", "none", *_SLOWER],
    "none, three times the rate": ["--compression", "none", *_FASTER],
    "exdyna:density=0.05": ["--compression", "exdyna:density=0.05", *_SLOWER],
    "exdyna:density=0.05, three times the rate": ["--compression", "exdyna:density=0.05", *_FASTER],
    "exdyna:density=0.01": ["--compression", "exdyna:density=0.01", *_SLOWER],
    "exdyna:density=0.01, three times the rate": ["--compression", "exdyna:density=0.01", *_FASTER],
    "topk:density=0.01": ["--compression", "topk:density=0.01", *_SLOWER],
    "topk 1 %, adam, three times the rate": [
        "--compression",
        "topk:density=0.01,feedback=adam(clip_norm=1.0)",
        *_FASTER,
    ],
    "topk 0.3 %, adam, 2 bits, three times the rate": [
        "--compression",
        "topk:density=0.003,values=2bit,indices=gaps,feedback=adam(clip_norm=1.0)",
        *_FASTER,
    ],
}


def launch(row: str, timeout_s: float) -> dict[str, Any]:
    """One training: what it wrote.

    Raises:
        RuntimeError: if the launch failed or took too long, with the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        command = ["timeout", "--kill-after=15", str(timeout_s), "horovodrun", "--gloo", "-np", str(SIZE)]
        command += ["python", str(EXAMPLE), "--steps", str(STEPS), *ROWS[row]]
        done = subprocess.run(
            [*command, "--json", str(file)], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode != 0 or not file.exists():
            words = f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
            raise RuntimeError(words)
        run: dict[str, Any] = json.loads(file.read_text())
    # times on a machine that others use say nothing
    return {name: value for name, value in run.items() if not name.endswith("seconds")}


def _bits(run: dict[str, Any]) -> float:
    return float(run["bits_per_byte"])


def table(result: dict[str, Any]) -> str:
    """A row per training."""
    runs = result["runs"]
    # a step of dense training is the same work at any rate: the better one counts
    dense = min((runs[name] for name in ROWS if name in runs and name[:4] == "none"), key=_bits)
    rows = [
        [
            name,
            f"{run['bits_per_byte']:.3f}",
            f"{run['bits_per_byte'] - dense['bits_per_byte']:+.3f}",
            f"{run['bytes_per_step'] / 1000:,.0f}",
            f"{dense['bytes_per_step'] / run['bytes_per_step']:.0f}x",
            f"{run.get('density_union', 1.0):.2%}",
        ]
        for name, run in ((name, runs[name]) for name in ROWS if name in runs)
    ]
    head = ["compression", "bits per byte", "to dense", "kB per step", "saving", "union"]
    return results.markdown(head, rows)


def draw(result: dict[str, Any]) -> None:
    """Training loss over the steps, smoothed over five points of the curve."""
    figure, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
    for name in ROWS:
        if name not in result["runs"]:
            continue
        steps, bits = zip(*result["runs"][name]["curve"], strict=True)
        smooth = [
            sum(bits[max(0, i - 4) : i + 1]) / len(bits[max(0, i - 4) : i + 1]) for i in range(len(bits))
        ]
        axes.plot(steps, smooth, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte, training")
    axes.set_ylim(top=6)
    axes.grid(True, linewidth=0.3)
    axes.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(results.PICTURES / "gpt.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, draws, and writes the table."""
    parser = results.command_line("scripts/study gpt", __doc__, timeout_s=1200)
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=list(ROWS), help="these rows")
    options = parser.parse_args(arguments)
    result = results.load(FILE)
    if not options.draw:
        result |= {"command": "scripts/study gpt", "machine": results.machine(), "size": SIZE, "steps": STEPS}
        runs = result.setdefault("runs", {})
        for name in options.only or ROWS:
            if options.again or name not in runs:
                runs[name] = launch(name, options.timeout)
                results.save(FILE, result)
                print(f"{name}: {runs[name]['bits_per_byte']:.3f} bits per byte", file=sys.stderr)
    draw(result)
    results.write_appendix()
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
